package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/klauspost/compress/gzip"
)

const caddyLine = `{"level":"info","ts":1646861401.5241024,"logger":"http.log.access.log0","msg":"handled request","request":{"remote_ip":"127.0.0.1","remote_port":"41342","client_ip":"203.0.113.7","proto":"HTTP/2.0","method":"GET","host":"example.com","uri":"/a?b=c","headers":{"X-Key":["k\u00e9\"y","other"],"Cookie":["REDACTED"]},"tls":{"resumed":false,"version":772,"cipher_suite":4865,"proto":"h2","server_name":"example.com"}},"bytes_read":0,"user_id":"ann","duration":0.000929675,"size":10900,"status":200,"resp_headers":{"X-Cost":["3"],"Server":["Caddy"]}}`

func TestReadsLines(t *testing.T) {
	r := reader{logging: new(logging), wanted: []string{"Cookie", "Referer", "User-Agent", "X-Key"}, wantedResponse: []string{"X-Cost"}}
	for name, test := range map[string]struct {
		text   string
		became reading
		want   Line
	}{
		"combined": {`203.0.113.7 - ann [10/Oct/2025:13:55:36 -0700] "GET /a\"b HTTP/1.1" 304 - "https://example.com/" "x\x22y"`, isRequest, Line{
			Format: Combined, At: 1760129736e9, End: 1760129736e9, Remote: "203.0.113.7", Client: "203.0.113.7", User: "ann",
			Method: "GET", URI: `/a"b`, Proto: "HTTP/1.1", Status: 304, Header: http.Header{"Referer": {"https://example.com/"}, "User-Agent": {`x"y`}},
		}},
		"common": {`2001:db8::1 - - [10/Oct/2025:13:55:36 +0000] "POST / HTTP/1.0" 200 2326`, isRequest, Line{
			Format: Combined, At: 1760104536e9, End: 1760104536e9, Remote: "2001:db8::1", Client: "2001:db8::1", Method: "POST", URI: "/", Proto: "HTTP/1.0", Status: 200, Size: 2326,
		}},
		"time as text":  {`{"ts":"2025-10-10T13:55:36.5Z","request":{"remote_ip":"::1","method":"GET","uri":"/"},"duration":"1.5s"}`, isRequest, Line{Format: Caddy, End: 1760104536.5e9, At: 1760104535e9, Remote: "::1", Client: "::1", Method: "GET", URI: "/"}},
		"milliseconds":  {`{"ts":1760104536500.25,"request":{"remote_ip":"::1","method":"GET","uri":"/"},"duration":1e-3}`, isRequest, Line{Format: Caddy, End: 1760104536500250000, At: 1760104536499250000, Remote: "::1", Client: "::1", Method: "GET", URI: "/"}},
		"other entry":   {`{"level":"info","ts":1,"msg":"serving initial configuration"}`, isOther, Line{}},
		"an error":      {`{"ts":1,"logger":"http.log.error.log0","request":{"method":"GET","uri":"/"},"duration":1,"status":502}`, isOther, Line{}},
		"cut":           {caddyLine[:200], isUnreadable, Line{}},
		"no request":    {`203.0.113.7 - - [10/Oct/2025:13:55:36 -0700] "\x16\x03\x01" 400 0 "-" "-"`, isUnreadable, Line{}},
		"no log at all": {"hello", isUnreadable, Line{}},
	} {
		var l Line
		if became := r.read(test.text, &l); became != test.became || became == isRequest && !reflect.DeepEqual(l, test.want) {
			t.Errorf("%s: %d, %+v\nwant %d, %+v", name, became, l, test.became, test.want)
		}
	}
	var l Line
	if r.read(caddyLine, &l) != isRequest || l.End != 1646861401524102000 || l.At != 1646861401523173000 || l.Client != "203.0.113.7" ||
		l.Status != 200 || l.Size != 10900 || l.User != "ann" || l.TLS.ServerName != "example.com" || l.TLS.Version != 772 ||
		!reflect.DeepEqual(l.Header, http.Header{"X-Key": {`ké"y`, "other"}, "Cookie": {redacted}}) || !reflect.DeepEqual(l.Response, http.Header{"X-Cost": {"3"}}) {
		t.Errorf("Caddy's entry is read as %+v", l)
	}
}

// FuzzScanner: the scanner reads what encoding/json reads, but keeps bytes that are no UTF-8, which
// encoding/json replaces.
func FuzzScanner(f *testing.F) {
	f.Add(caddyLine)
	f.Add(`{"a":[1,{"b":"\\"}],"c":"\""}`)
	f.Add("{\"\xfd\":{}}")
	f.Fuzz(func(t *testing.T, text string) {
		s := scanner{text: text}
		found := map[string]string{}
		s.object(func(key string) {
			from := s.at
			if s.next(); s.at > from {
				from = s.at
			}
			s.skip()
			found[key] = text[from:s.at]
		})
		var want map[string]json.RawMessage
		if json.Unmarshal([]byte(text), &want) != nil || want == nil || !utf8.ValidString(text) {
			return
		}
		if s.bad || len(found) != len(want) {
			t.Fatalf("found %v (bad %v) in %s", found, s.bad, text)
		}
		for key, value := range want {
			if found[key] != string(value) {
				t.Errorf("found %q for %q, want %q", found[key], key, value)
			}
		}
	})
}

// TestMergesLogs: logs are read in the order of time, however they are named; lines without an end, and
// those that are too long, do no harm to others.
func TestMergesLogs(t *testing.T) {
	dir := t.TempDir()
	line := func(second string) string {
		return `{"ts":` + second + `,"request":{"remote_ip":"::1","method":"GET","uri":"/` + second + `"},"duration":0}` + "\n"
	}
	write := func(name, text string, compress bool) string {
		file := filepath.Join(dir, name)
		var b bytes.Buffer
		if compress {
			z := gzip.NewWriter(&b)
			_, _ = z.Write([]byte(text))
			_ = z.Close()
		} else {
			b.WriteString(text)
		}
		if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	tooLong := strings.Repeat("x", maxLine+chunkSize) + "\n"
	names := []string{
		write("access.log", line("5")+tooLong+line("7")+strings.TrimSuffix(line("9"), "\n"), false),
		write("access.log.1.gz", line("1")+"nonsense\r\n"+line("3"), true),
		write("other.log", line("2")+line("6")+line("8"), false),
		write("empty.log", "", false),
	}
	l, err := openLogs(names, nil, reader{logging: new(logging)}, func(*passing) {})
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for {
		p, err := l.next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if p == nil {
			break
		}
		order = append(order, p.line.URI)
	}
	if got := strings.Join(order, ""); got != "/1/2/3/5/6/7/8/9" || l.unreadable != 2 {
		t.Errorf("read %s, and %d unreadable lines", got, l.unreadable)
	}
}

// TestReadsPipesOnce: a pipe, as a shell makes of <(...), cannot be read again, so that nothing looks into it before.
func TestReadsPipesOnce(t *testing.T) {
	line := `{"ts":1,"request":{"remote_ip":"::1","method":"GET","uri":"/"},"duration":0}` + "\n"
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = z.Write([]byte(line + line))
	_ = z.Close()
	for name, text := range map[string]string{"plain": line + line, "gzip": packed.String()} {
		from, to, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer from.Close()
		_, _ = to.WriteString(text) // a pipe has room for it
		_ = to.Close()
		l, err := openLogs([]string{fmt.Sprintf("/dev/fd/%d", from.Fd())}, nil, reader{logging: new(logging)}, func(*passing) {})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := drain(t, l); n != 2 || err != nil {
			t.Errorf("%s: read %d lines, %v, want 2", name, n, err)
		}
	}
}

// drain returns how many requests logs have, and which of them could not be read to their ends.
func drain(t *testing.T, l *logs) (n int, err error) {
	t.Helper()
	for {
		p, err := l.next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if p == nil {
			return n, errors.Join(l.errs...)
		}
		n++
	}
}

// TestCutStreamsAreErrors: a gzip stream that was cut, also where a chunk ends, is no whole log, and what was
// read of it counts. A log in plain text is cut while it is being written.
func TestCutStreamsAreErrors(t *testing.T) {
	line := `{"ts":1,"request":{"remote_ip":"::1","method":"GET","uri":"/"},"duration":0}` + "\n"
	text := strings.Repeat(line, 5000)
	var packed bytes.Buffer
	z, _ := gzip.NewWriterLevel(&packed, gzip.NoCompression)
	_, _ = z.Write([]byte(text))
	_ = z.Close()
	whole := packed.String()
	for name, test := range map[string]struct {
		log     string
		isError bool
	}{
		"plain": {text[:len(text)-9], false}, "gzip": {whole, false}, "no checksum": {whole[:len(whole)-8], true}, "half": {whole[:len(whole)/2], true},
		"one chunk": {whole[:chunkSize], true}, "wrong checksum": {whole[:len(whole)-8] + "12345678", true}, "other text behind": {whole + "other text", true},
	} {
		file := filepath.Join(t.TempDir(), "access.log")
		if err := os.WriteFile(file, []byte(test.log), 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := openLogs([]string{file}, nil, reader{logging: new(logging)}, func(*passing) {})
		if err != nil {
			t.Fatal(err)
		}
		n, err := drain(t, l)
		if (err != nil) != test.isError || n < 1000 || err != nil && !strings.Contains(err.Error(), file) {
			t.Errorf("%s: read %d lines, %v", name, n, err)
		}
	}
}

// TestSharesAreExact: the most of n that are a share of them, for all percentages with a digit behind the point.
func TestSharesAreExact(t *testing.T) {
	for _, n := range []int{1, 3, 7, 100, 1000, 99_999, 100_000, mostSized} {
		for tenths := range 1001 {
			share, err := strconv.ParseFloat(fmt.Sprintf("%d.%de-2", tenths/10, tenths%10), 64)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := mostOf(share, n), tenths*n/1000; got != want {
				t.Errorf("%d tenths of a percent of %d are %d, want %d", tenths, n, got, want)
			}
		}
	}
}

// TestClock: what was scheduled happens in order, responses before arrivals, and timers can be stopped and
// set again.
func TestClock(t *testing.T) {
	var c clock
	var order []string
	note := func(name string) func() { return func() { order = append(order, name) } }
	at := func(seconds int64, isArrival bool, name string) {
		c.schedule(seconds*int64(time.Second), isArrival, &timer{clock: &c, f: note(name)})
	}
	at(3, true, "arrival")
	at(3, false, "end")
	at(1, true, "first")
	stopped := c.AfterFunc(2*time.Second, note("stopped"))
	again := c.AfterFunc(4*time.Second, note("again"))
	if !stopped.Stop() || stopped.Stop() {
		t.Error("a timer is stopped once")
	}
	if !again.Reset(5 * time.Second) {
		t.Error("a timer that runs is set again")
	}
	for range 200 {
		// Timers in the middle of the queue.
		c.AfterFunc(10*time.Second, note("never")).Stop()
	}
	for len(c.queue) > 0 {
		c.step()
	}
	if got := strings.Join(order, " "); got != "first end arrival again" || c.Now().Unix() != 5 {
		t.Errorf("%s happened, until %v", got, c.Now())
	}
}

// TestLogsOfOneLogger: what one of them does not change is not lacking.
func TestLogsOfOneLogger(t *testing.T) {
	const masks = `{"include": ["http.log.access"], "encoder": {"format": "filter", "fields": {"request>client_ip": {"filter": "ip_mask"}, "request>headers>X-Key": {"filter": "delete"}}}, "sampling": {"first": 1}}`
	for second, isLacking := range map[string]bool{masks: true, `{"include": ["http.log.access"]}`: false} {
		l, err := loggingOf(json.RawMessage(`{"logs": {"a": ` + masks + `, "b": ` + second + `}}`))
		if err != nil {
			t.Fatal(err)
		}
		// Placeholders name headers in any case.
		for _, name := range []string{clientIP, headerPrefix + "x-key"} {
			if what := l.changes(&zone{}, name, "http.log.access"); (what != "") != isLacking {
				t.Errorf("beside %s, %s: %q", second, name, what)
			}
		}
		if reasons := l.leavesOut("http.log.access"); (len(reasons) > 0) != isLacking {
			t.Errorf("beside %s: %v", second, reasons)
		}
	}
}
