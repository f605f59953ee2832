package body

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// header is that of a body.
func header(contentType, encoding string) http.Header {
	h := http.Header{}
	if contentType != "" {
		h.Set("Content-Type", contentType)
	}
	if encoding != "" {
		h.Set("Content-Encoding", encoding)
	}
	return h
}

func mustParse(t testing.TB, texts ...string) (paths []Path) {
	t.Helper()
	for _, text := range texts {
		path, err := ParsePath(text)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	return paths
}

// readBy reads a body that passes in parts of n bytes.
func readBy(t testing.TB, n int, h http.Header, body string, paths ...string) *Reader {
	t.Helper()
	r := NewReader(h, mustParse(t, paths...))
	for rest := []byte(body); len(rest) > 0; {
		part := rest[:min(n, len(rest))]
		r.Saw(part)
		rest = rest[len(part):]
	}
	r.Close()
	return r
}

// number returns what was found at a path.
func number(r *Reader, path string) string {
	text, _ := r.Number(path)
	return text
}

// long is a string that no reader keeps.
var long = strings.Repeat("x", 20_000)

const (
	jsonType   = "application/json"
	eventsType = "text/event-stream"
	linesType  = "application/x-ndjson"
)

func TestNumbersInBodies(t *testing.T) {
	const usage = "usage.total_tokens"
	for name, test := range map[string]struct {
		kind, body string
		want       string
		err        error
	}{
		"document":         {jsonType + "; charset=utf-8", `{"id": 1, "usage": {"total_tokens": 42}}`, "42", nil},
		"vendor":           {"Application/Vnd.API+JSON", `{"usage": {"total_tokens": "43"}}`, "43", nil},
		"without a type":   {"", `{"usage": {"total_tokens": 42}}`, "42", nil},
		"byte order mark":  {jsonType, "\ufeff{\"usage\": {\"total_tokens\": 42}}", "42", nil},
		"escaped name":     {jsonType, `{"\u0075sage": {"total\u005ftokens": 42}}`, "42", nil},
		"fraction":         {jsonType, `{"usage": {"total_tokens": 42.50}}`, "42.50", nil},
		"exponent":         {jsonType, `{"usage": {"total_tokens": 4.2e1}}`, "4.2e1", nil},
		"without it":       {jsonType, `{"usage": {"tokens": 42}}`, "", nil},
		"elsewhere":        {jsonType, `{"total_tokens": 1, "a": {"usage": {"total_tokens": 42}}, "usage": {"a": {"total_tokens": 1}}, "b": [{"total_tokens": 2}]}`, "", nil},
		"object":           {jsonType, `{"usage": {"total_tokens": {"a": 1}}}`, "", nil},
		"null":             {jsonType, `{"usage": {"total_tokens": null}}`, "", nil},
		"text":             {jsonType, `{"usage": {"total_tokens": "many"}}`, "", nil},
		"empty text":       {jsonType, `{"usage": {"total_tokens": ""}}`, "", nil},
		"no number after":  {jsonType, `{"usage": {"total_tokens": 42}, "usage": null, "usage": {"total_tokens": "many"}}`, "42", nil},
		"twice":            {jsonType, `{"usage": {"total_tokens": 41}, "a": [], "usage": {"total_tokens": 42}}`, "42", nil},
		"several in one":   {jsonType, "{\"usage\": {\"total_tokens\": 1}}\n{\"usage\": {\"total_tokens\": 2}} {}", "2", nil},
		"no JSON":          {jsonType, `nonsense`, "", ErrNotJSON},
		"empty":            {jsonType, ``, "", nil},
		"white space":      {jsonType, " \r\n", "", nil},
		"another type":     {"text/html", `{"usage": {"total_tokens": 42}}`, "", ErrNotJSON},
		"spoilt later":     {jsonType, `{"usage": {"total_tokens": 42}, nonsense`, "42", ErrNotJSON},
		"after long text":  {jsonType, `{"text": "` + long + `", "usage": {"total_tokens": 42}}`, "42", nil},
		"before long text": {jsonType, `{"usage": {"total_tokens": 42}, "text": "` + long + `"}`, "42", nil},
		"long escapes":     {jsonType, `{"text": "` + strings.Repeat(`\"\\\u0022`, 5000) + `", "usage": {"total_tokens": 42}}`, "42", nil},
		"long name":        {jsonType, `{"` + long + `": 1, "usage": {"total_tokens": 42}}`, "42", nil},
		"long spaces":      {jsonType, `{"usage":` + strings.Repeat(" ", 100_000) + `{"total_tokens": 42}}`, "42", nil},
		"long number":      {jsonType, `{"a": ` + strings.Repeat("1", 100_000) + `, "usage": {"total_tokens": 42}}`, "", ErrNotJSON},
		"deep":             {jsonType, `{"a": ` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `, "usage": {"total_tokens": 42}}`, "42", nil},
		"too deep":         {jsonType, `{"a": ` + strings.Repeat("[", 50_000), "", ErrNotJSON},
		"torn off":         {jsonType, `{"usage": {"total_tokens": 42}, "text": "abc`, "42", ErrBrokenOff},
		"torn off number":  {jsonType, `{"usage": {"total_tokens": 4`, "", ErrBrokenOff},

		"last event":             {eventsType, "data: {\"usage\": null}\n\nevent: x\ndata: {\"usage\": {\"total_tokens\": 7}}\n\ndata: [DONE]\n\n", "7", nil},
		"latest of two":          {eventsType, "data: {\"usage\":{\"total_tokens\":7}}\n\ndata: {\"usage\":{\"total_tokens\":9}}\n\n", "9", nil},
		"lines of one event":     {eventsType, "data: {\"usage\":\ndata: {\"total_tokens\": 8}}\n\n", "8", nil},
		"other fields between":   {eventsType, "data: {\"usage\":\nid: 7\n: hello\ndatax: 1\ndat: 2\ndata\ndata: {\"total_tokens\": 8}}\n\n", "8", nil},
		"CR LF":                  {eventsType, ": hello\r\n\r\ndata:{\"usage\":{\"total_tokens\":6}}\r\n\r\n", "6", nil},
		"CR":                     {eventsType, "data: {\"usage\":null}\r\rdata: {\"usage\":\rdata: {\"total_tokens\":9}}\r\rdata: [DONE]\r\r", "9", nil},
		"mixed ends":             {eventsType, "data: {\"usage\":null}\r\n\rdata: {\"usage\":{\"total_tokens\":9}}\n\r\ndata: {}\n\n", "9", nil},
		"events after a mark":    {eventsType, "\ufeffdata: {\"usage\":{\"total_tokens\":9}}\n\n", "9", nil},
		"no end of the event":    {eventsType, "data: {\"usage\":{\"total_tokens\":5}}", "5", nil},
		"no end of the line":     {eventsType, "data: {\"usage\":{\"total_tokens\":5}}\n", "5", nil},
		"after a long event":     {eventsType, "data: {\"text\": \"" + long + "\"}\n\ndata: {\"usage\":{\"total_tokens\":4}}\n\n", "4", nil},
		"in a long event":        {eventsType, "data: {\"usage\":{\"total_tokens\":2}, \"text\": \"" + long + "\"}\n\n", "2", nil},
		"empty lines":            {eventsType, "\n\n\ndata: {\"usage\":{\"total_tokens\":1}}\n\n\n\n", "1", nil},
		"after a broken event":   {eventsType, "data: {\"usage\":\n\ndata: nonsense\n\ndata: {\"usage\":{\"total_tokens\":1}}\n\n", "1", nil},
		"stream without lines":   {eventsType, long, "", nil},
		"stream without JSON":    {eventsType, "data: hello\n\n", "", ErrNotJSON},
		"event that breaks off":  {eventsType, "data: {\"usage\":{\"total_tokens\":7}}\n\ndata: {\"usage\":{\"tot", "7", ErrBrokenOff},
		"events without a usage": {eventsType, "data: {}\n\ndata: [DONE]\n\n", "", nil},

		"lines":                {linesType, "{\"done\":false}\n\n{\"usage\":{\"total_tokens\":900}}\n", "900", nil},
		"lines, CR LF":         {"application/jsonl", "{\"usage\":{\"total_tokens\":1}}\r\n{\"usage\":{\"total_tokens\":2}}\r\n", "2", nil},
		"no end of the last":   {"application/jsonlines", "{}\n{\"usage\":{\"total_tokens\":2}}", "2", nil},
		"a line that is none":  {linesType, "{\"usage\":{\"total_tokens\":1}}\nnonsense\n{\"usage\":{\"total_tokens\":2}}\n", "2", nil},
		"lines that break off": {linesType, "{\"usage\":{\"total_tokens\":1}}\n{\"usage\":{\"tot", "1", ErrBrokenOff},
		"sequence":             {"application/json-seq", "\x1e{\"usage\":{\"total_tokens\":1}}\n\x1e{\"usage\":\n{\"total_tokens\":2}}\n", "2", nil},
		"sequence, broken":     {"application/json-seq", "\x1e{\"usage\":{\"total_tokens\":1}}\n\x1e{\"usage\":\n\x1e{\"usage\": {\"total_tokens\":3}}\n", "3", nil},
	} {
		for _, n := range []int{1, 7, 1 << 20} {
			r := readBy(t, n, header(test.kind, ""), test.body, "id", usage)
			what := fmt.Sprintf("%s, %d bytes at a time", name, n)
			if got := number(r, usage); got != test.want {
				t.Errorf("%s: found %q, want %q", what, got, test.want)
			}
			if err := r.Err(); !errors.Is(err, test.err) || test.err == nil && err != nil {
				t.Errorf("%s: error %v, want %v", what, err, test.err)
			}
		}
	}
}

func TestPaths(t *testing.T) {
	const document = `{"a": {"b.c": 1, "x\"y": 2, "0": 3, "#": 4, "": 5, "é": 6}, "list": [10, {"n": 11}, [12, 13], {"n": 14}], "2": {"1": 15}}`
	for path, want := range map[string]string{
		`a.b\.c`: "1", `a.x"y`: "2", `a.x\"y`: "2", `a.0`: "3", `a.\0`: "3", `a.\#`: "4", `a.é`: "6",
		`list.0`: "10", `list.1.n`: "11", `list.2.1`: "13", `list.#.n`: "14", `list.#`: "10", `list.#.#`: "13", `list.\#.n`: "",
		`2.1`: "15", `list.01.n`: "", `list.9`: "", `a`: "", `a.b`: "", `b.c`: "", `#.n`: "",
	} {
		if got := number(readBy(t, 1<<20, header(jsonType, ""), document, path), path); got != want {
			t.Errorf("%s: found %q, want %q", path, got, want)
		}
	}
	// Of several paths each has its own place.
	r := readBy(t, 3, header(jsonType, ""), `[{"u": {"in": 1, "out": 2}}, {"u": {"out": 3, "x": [{"in": 9}]}}]`, "#.u.in", "#.u.out", "0.u.out", "1.u.in")
	for path, want := range map[string]string{"#.u.in": "1", "#.u.out": "3", "0.u.out": "2", "1.u.in": ""} {
		if got := number(r, path); got != want {
			t.Errorf("%s of several: found %q, want %q", path, got, want)
		}
	}
}

func TestParsePath(t *testing.T) {
	for text, want := range map[string]string{
		"": "has an empty part", "a.": "has an empty part", ".a": "has an empty part", "a..b": "has an empty part",
		"a.*": `has '*'`, "a|b": `has '|'`, "@reverse.0": `has '@'`, "a.#(b=1)": `has '#'`, "a.#b": `has '#'`, "a#": `has '#'`, `a\`: `has '\\'`,
		strings.Repeat("a", 129): "has a name of more than 128 bytes", strings.Repeat("a.", 32) + "a": "has more than 32 parts",
		"a.\xff": "has a name that is no UTF-8",
	} {
		if _, err := ParsePath(text); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// encoders encode, by content coding.
var encoders = map[string]func(io.Writer) io.WriteCloser{
	"gzip":   func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"x-gzip": func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"deflate": func(w io.Writer) io.WriteCloser {
		return zlib.NewWriter(w)
	},
	"br": func(w io.Writer) io.WriteCloser { return brotli.NewWriter(w) },
	"zstd": func(w io.Writer) io.WriteCloser {
		z, _ := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		return z
	},
}

// encode returns a text after some codings.
func encode(t testing.TB, text []byte, codings ...string) []byte {
	t.Helper()
	for _, coding := range codings {
		var b bytes.Buffer
		w := encoders[coding](&b)
		if _, err := w.Write(text); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		text = b.Bytes()
	}
	return text
}

func TestEncodedBodies(t *testing.T) {
	document := `{"text": "` + strings.Repeat("word ", 50_000) + `", "usage": {"n": 42}}`
	events := "data: {\"usage\":{\"n\":1}}\n\ndata: {\"usage\":{\"n\":42}}\n\n"
	for _, codings := range [][]string{{"gzip"}, {"x-gzip"}, {"deflate"}, {"br"}, {"zstd"}, {"gzip", "br"}, {"br", "zstd", "gzip"}} {
		for kind, body := range map[string]string{jsonType: document, eventsType: events} {
			encoded := string(encode(t, []byte(body), codings...))
			for _, n := range []int{1, 100, 1 << 20} {
				r := readBy(t, n, header(kind, strings.ToUpper(strings.Join(codings, " ,"))), encoded, "usage.n")
				if got := number(r, "usage.n"); got != "42" || r.Err() != nil {
					t.Errorf("%v, %s, %d bytes at a time: %q, %v", codings, kind, n, got, r.Err())
				}
			}
			r := readBy(t, 100, header(kind, strings.Join(codings, ",")), encoded[:len(encoded)*2/3], "usage.n")
			if !errors.Is(r.Err(), ErrBrokenOff) {
				t.Errorf("%v, %s, broken off: %v", codings, kind, r.Err())
			}
		}
	}
	var raw bytes.Buffer
	w, _ := flate.NewWriter(&raw, 1)
	_, _ = io.WriteString(w, document)
	w.Close()
	h := http.Header{"Content-Type": {jsonType}, "Content-Encoding": {"identity", "deflate"}}
	if r := readBy(t, 1000, h, raw.String(), "usage.n"); number(r, "usage.n") != "42" || r.Err() != nil {
		t.Errorf("deflate without a header: %v", r.Err())
	}
}

// TestBodiesThatCannotBeDecoded are left, and the number before that is kept.
func TestBodiesThatCannotBeDecoded(t *testing.T) {
	document := `{"n": 42, "text": "` + long + `"}`
	huge := append([]byte(`{"n": 42, "text": "`), bytes.Repeat([]byte{'x'}, 19<<20)...)
	for name, test := range map[string]struct {
		coding string
		body   []byte
		want   string
		err    error
	}{
		"unknown":        {"compress", []byte(document), "", ErrEncoding},
		"not gzip":       {"gzip", []byte(document), "", ErrEncoding},
		"not deflate":    {"deflate", []byte("\x78\x9c\xff" + document), "", ErrEncoding},
		"not zstd":       {"zstd", []byte(document), "", ErrEncoding},
		"not br":         {"br", []byte(document), "", ErrEncoding},
		"spoilt":         {"gzip", append(encode(t, []byte(document), "gzip"), "nonsense and more"...), "42", ErrEncoding},
		"too many":       {"gzip, gzip, gzip, gzip", []byte(document), "", ErrEncoding},
		"one byte":       {"gzip", []byte{0x1f}, "", ErrBrokenOff},
		"not JSON":       {"gzip", encode(t, []byte("nonsense"+long), "gzip"), "", ErrNotJSON},
		"bomb":           {"gzip", encode(t, huge, "gzip"), "42", ErrEncoding},
		"bomb in a bomb": {"zstd, gzip", encode(t, huge, "zstd", "gzip"), "42", ErrEncoding},
	} {
		r := readBy(t, 4096, header(jsonType, test.coding), string(test.body), "n")
		if got := number(r, "n"); got != test.want || !errors.Is(r.Err(), test.err) {
			t.Errorf("%s: %q, %v, want %q, %v", name, got, r.Err(), test.want, test.err)
		}
	}
}

// TestWindowOfZstdIsBounded by what RFC 9659 allows.
func TestWindowOfZstdIsBounded(t *testing.T) {
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, zstd.WithWindowSize(16<<20), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		_, _ = w.Write(bytes.Repeat([]byte("[1,2,3]"), 100_000))
	}
	w.Close()
	if r := readBy(t, 4096, header(jsonType, "zstd"), b.String(), "n"); !errors.Is(r.Err(), ErrEncoding) {
		t.Errorf("a window of 16 MiB: %v", r.Err())
	}
}

// TestReaderKeepsLittle of a body, however long its tokens are.
func TestReaderKeepsLittle(t *testing.T) {
	for name, test := range map[string]struct{ kind, begin, part string }{
		"string":        {jsonType, `{"a": "`, strings.Repeat("x", 1000)},
		"escapes":       {jsonType, `{"a": "`, strings.Repeat(`\"`, 500)},
		"spaces":        {jsonType, `{"a": `, strings.Repeat(" ", 1000)},
		"members":       {jsonType, `{`, strings.Repeat(`"a": 1, "b": 2, `, 50)},
		"event":         {eventsType, `data: {"a": "`, strings.Repeat("x", 1000)},
		"lines":         {eventsType, ``, strings.Repeat("data: {}\n\n", 100)},
		"other field":   {eventsType, `id: `, strings.Repeat("x", 1000)},
		"long line":     {linesType, `{"a": "`, strings.Repeat("x", 1000)},
		"several texts": {jsonType, ``, strings.Repeat(`{"b": [1, {"c": "d"}]}`, 50)},
	} {
		r := NewReader(header(test.kind, ""), mustParse(t, "a", "b.c"))
		r.Saw([]byte(test.begin))
		part := []byte(test.part)
		r.Saw(part)
		const times = 200
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for range times {
			r.Saw(part)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if n := int64(after.HeapAlloc) - int64(before.HeapAlloc); n > 32<<10 {
			t.Errorf("%s: %d bytes are kept of %d parts of %d", name, n, times, len(part))
		}
		r.Close()
	}
}

// TestReadersEndTheirGoroutines, also if nothing was read to its end.
func TestReadersEndTheirGoroutines(t *testing.T) {
	body := encode(t, []byte(`{"n": 1}`), "gzip")
	for _, part := range [][]byte{nil, body[:5], body, []byte("nonsense")} {
		r := NewReader(header(jsonType, "gzip"), mustParse(t, "n"))
		d := r.to.(*decoder)
		r.Saw(part)
		r.Close()
		r.Saw(part)
		r.Close()
		if d.done == nil {
			continue
		}
		select {
		case <-d.done:
		default:
			t.Errorf("%q: the decoder runs", part)
		}
	}
}

// TestNoReader reads nothing.
func TestNoReader(t *testing.T) {
	var r *Reader
	r.Saw([]byte("x"))
	r.Close()
	if _, ok := r.Number("a"); ok || r.Reads() || r.IsStream() || r.IsWhole() || r.Err() != nil {
		t.Error("there is something")
	}
}

// cause returns which of the errors of this package a body was read with.
func cause(r *Reader) string {
	for _, err := range []error{ErrNotJSON, ErrEncoding, ErrBrokenOff} {
		if errors.Is(r.Err(), err) {
			return err.Error()
		}
	}
	return fmt.Sprint(r.Err())
}

// FuzzReader: the result does not depend on how a body is cut into parts, however long its tokens are, and
// whether or not its coding breaks off. The byte at a place is written that many times more.
func FuzzReader(f *testing.F) {
	f.Add(`{"a": {"b": [1, "2"]}}`, uint8(0), uint8(3), uint8(0), uint8(0), uint16(0))
	f.Add("data: {\"a\":\r\ndata: {\"b\": 1}}\r\r", uint8(1), uint8(1), uint8(0), uint8(0), uint16(0))
	f.Add("data: {\"a\": {\"b\": 1}}\n\ndata: [DONE]\n\n", uint8(1), uint8(4), uint8(9), uint8(0), uint16(0))
	f.Add("{\"a\": 1}\n[", uint8(2), uint8(2), uint8(0), uint8(0), uint16(0))
	// A word that is too long begins as a number, follows one, or is as long as the tokenizer takes.
	for _, times := range []uint16{maxToken - 1, maxToken, roomSize - 20, 5000} {
		f.Add("{\"a\": {\"b\": 1\xad", uint8(0), uint8(0), uint8(0), uint8(13), times)
		f.Add(`{"a": {"b": 900,*}}`, uint8(0), uint8(6), uint8(1), uint8(16), times)
		f.Add(`{"a": {"b": 900}, "x": tru`, uint8(3), uint8(0), uint8(18), uint8(20), times)
	}
	kinds := []string{jsonType, eventsType, linesType, "application/json-seq"}
	codings := []string{"", "gzip", "deflate", "br", "zstd"}
	f.Fuzz(func(t *testing.T, body string, kind, n, coding, at uint8, times uint16) {
		if i := int(at); i < len(body) {
			body = body[:i] + strings.Repeat(body[i:i+1], int(times)%8192) + body[i:]
		}
		h := header(kinds[int(kind)%len(kinds)], codings[int(coding)%len(codings)])
		if c := h.Get("Content-Encoding"); c != "" {
			encoded := encode(t, []byte(body), c)
			body = string(encoded[:max(len(encoded)-int(coding)/len(codings), 0)])
		}
		once := readBy(t, 1<<20, h, body, "a.b", "a.#")
		for _, n := range []int{int(n%16) + 1, maxToken, roomSize} {
			parts := readBy(t, n, h, body, "a.b", "a.#")
			for _, path := range []string{"a.b", "a.#"} {
				if number(once, path) != number(parts, path) {
					t.Errorf("%s is %q, and in parts of %d %q", path, number(once, path), n, number(parts, path))
				}
			}
			if cause(once) != cause(parts) || once.IsWhole() != parts.IsWhole() {
				t.Errorf("error %v, whole %t, and in parts of %d %v, %t", once.Err(), once.IsWhole(), n, parts.Err(), parts.IsWhole())
			}
		}
	})
}

// TestExpansionInParts: how far a body may expand depends on its bytes alone, and not on how many more of
// them had arrived. Few bytes become many here, and the rest does not expand.
func TestExpansionInParts(t *testing.T) {
	rest := make([]byte, 3000)
	_, _ = rand.NewChaCha8([32]byte{}).Read(rest)
	tail := `{"a": {"b": 7}, "text": "` + hex.EncodeToString(rest) + `"}`
	body := string(encode(t, []byte(strings.Repeat(" ", freeSize+256<<10)+tail), "br"))
	for _, n := range []int{1 << 20, 4096, 16} {
		if r := readBy(t, n, header(jsonType, "br"), body, "a.b"); r.Err() != nil || number(r, "a.b") != "7" {
			t.Errorf("%d bytes at a time: %q, %v", n, number(r, "a.b"), r.Err())
		}
	}
}

// BenchmarkReader reads megabytes of what is common, in parts of 32 kB as proxies write them.
func BenchmarkReader(b *testing.B) {
	floats := `{"data": [` + strings.Repeat(`{"embedding": [`+strings.Repeat("0.0123456789012345,", 3071)+`1]},`, 16) + `{}], "usage": {"n": 42}}`
	text := `{"text": "` + strings.Repeat(`The quick \"brown\" fox.\n`, 40_000) + `", "usage": {"n": 42}}`
	events := strings.Repeat("data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}],\"usage\":null}\n\n", 10_000) +
		"data: {\"usage\":{\"n\":42}}\n\n"
	for name, test := range map[string]struct{ kind, body string }{
		"numbers": {jsonType, floats}, "text": {jsonType, text}, "events": {eventsType, events},
	} {
		for _, coding := range []string{"", "gzip", "zstd", "br"} {
			b.Run(name+"/"+coding, func(b *testing.B) {
				body := []byte(test.body)
				if coding != "" {
					body = encode(b, body, coding)
				}
				paths := mustParse(b, "usage.n")
				b.SetBytes(int64(len(test.body)))
				b.ReportAllocs()
				for b.Loop() {
					r := NewReader(header(test.kind, coding), paths)
					for rest := body; len(rest) > 0; {
						part := rest[:min(32<<10, len(rest))]
						r.Saw(part)
						rest = rest[len(part):]
					}
					if r.Close(); number(r, "usage.n") != "42" {
						b.Fatal(r.Err())
					}
				}
			})
		}
	}
}

// TestStreamsThatSayTheyEnd are whole, however they are cut into parts; others are not, because nobody
// knows where they would have ended.
func TestStreamsThatSayTheyEnd(t *testing.T) {
	const event = "data: {\"usage\":{\"total_tokens\":7}}\n\n"
	for text, isWhole := range map[string]bool{
		event + "data: [DONE]\n\n":           true,
		event + "data:[DONE]\r\n\r\n":        true,
		event + "data: [DONE]":               true,
		event + "event: x\ndata: [DONE] \r":  true,
		event + "data: [DONE]\n\n: bye\n\n":  true,
		event:                                false,
		event + "data: [DONE":                false,
		event + "data: [DONE]]\n\n":          false,
		event + "data: \"[DONE]\"\n\n":       false,
		event + ": [DONE]\n\n":               false,
		event + "data: [DONE]\n\n" + event:   false,
		event + "data: [DONE]\n\ndata: {\"u": false,
		"":                                   false,
	} {
		for _, n := range []int{1, 7, 1 << 20} {
			r := readBy(t, n, header(eventsType, ""), text, "usage.total_tokens")
			if got := r.IsWhole(); got != isWhole {
				t.Errorf("%q, %d bytes at a time: whole %t", text, n, got)
			}
		}
	}
}
