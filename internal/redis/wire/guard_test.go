package wire

import (
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestBoundsOfReplies(t *testing.T) {
	text := func(n int) string { return "$" + strconv.Itoa(n) + "\r\n" + strings.Repeat("*", n) + "\r\n" }
	for name, c := range map[string]struct {
		reply string
		holds bool
	}{
		"a status":                    {"+OK\r\n", true},
		"an error":                    {"-ERR no\r\n:1\r\n", true},
		"texts":                       {text(0) + text(1) + text(100_000) + "$-1\r\n", true},
		"a text of lines":             {"$4\r\n\r\n*9\r\n*2\r\n" + text(3) + text(4), true},
		"an array that nests":         {strings.Repeat("*1\r\n", mostNested) + text(3) + strings.Repeat("*1\r\n", mostNested) + ":1\r\n", true},
		"no array":                    {"*-1\r\n*0\r\n", true},
		"empty arrays":                {strings.Repeat("*0\r\n", mostNested+1) + strings.Repeat("*-1\r\n", mostNested+1), true},
		"a text that is too long":     {"$" + strconv.Itoa(mostText+1) + "\r\n", false},
		"a text of any length":        {"$9223372036854775807\r\n", false},
		"a length beyond all numbers": {"$99999999999999999999\r\n", false},
		"many elements after zeros":   {"*" + strings.Repeat("0", 22) + "2000000000\r\n", false},
		"a long text after zeros":     {"$" + strings.Repeat("0", 22) + "2000000000\r\n", false},
		"zeros that fill the room":    {"*" + strings.Repeat("0", 21) + "\r\n", true},
		"zeros beyond the room":       {"$" + strings.Repeat("0", 22) + "\r\n\r\n", false},
		"a number that is long":       {":" + strings.Repeat("0", 30) + "7\r\n", true},
		"slots that lie scattered":    {"*" + strconv.Itoa(SlotCount*(1+2+3*(1+4))) + "\r\n", true},
		"a length that is none":       {"$x\r\n", false},
		"too many elements":           {"*" + strconv.Itoa(mostElements+1) + "\r\n", false},
		"attributes":                  {"|1\r\n+a\r\n+b\r\n:1\r\n", false},
		"another protocol":            {"HTTP/1.1 400 Bad Request\r\n", false},
		"arrays without end":          {strings.Repeat("*1\r\n", mostNested+1), false},
		"arrays in second places":     {strings.Repeat("*2\r\n:1\r\n", mostNested+1), false},
		"arrays after each other":     {"*20\r\n" + strings.Repeat("*2\r\n:1\r\n*0\r\n", 20) + strings.Repeat("*1\r\n", mostNested) + "+OK\r\n", true},
		"arrays that announce much":   {strings.Repeat("*"+strconv.Itoa(mostElements/2+1)+"\r\n:1\r\n", 2), false},
		"texts that are too long":     {"*2\r\n" + text(mostText/2+1) + "$" + strconv.Itoa(mostText/2) + "\r\n", false},
		"long replies":                {text(mostText/2+1) + text(mostText/2+1) + "+OK\r\n", true},
		"a line without end":          {"-" + strings.Repeat("x", mostLine), false},
		"after what is sound":         {text(5) + "*2\r\n:1\r\n$2000000000\r\n", false},
	} {
		for how, wrap := range map[string]func(io.Reader) io.Reader{
			"at once": func(r io.Reader) io.Reader { return r }, "byte by byte": iotest.OneByteReader, "in halves": iotest.HalfReader,
		} {
			var x bounds
			holds, b := true, make([]byte, 4096)
			for from := wrap(strings.NewReader(c.reply)); holds; {
				n, err := from.Read(b)
				if err != nil {
					break
				}
				holds = x.hold(b[:n])
			}
			if holds != c.holds {
				t.Errorf("%s, %s: holds %v, want %v", name, how, holds, c.holds)
			}
		}
	}
}

// TestHelloIsNotSent, and all that follows is.
func TestHelloIsNotSent(t *testing.T) {
	for first, want := range map[string]string{
		"*2\r\n$5\r\nhello\r\n$1\r\n2\r\n": "",
		"*2\r\n$5\r\nHELLO\r\n$1\r\n2\r\n": "",
		"*1\r\n$4\r\nping\r\n":             "*1\r\n$4\r\nping\r\n",
	} {
		client, server := net.Pipe()
		conn := guard(client, nil)
		go func() {
			_, _ = io.WriteString(conn, first)
			if want == "" {
				reply := make([]byte, 5)
				_, _ = io.ReadFull(conn, reply)
				_, _ = conn.Write(reply)
			}
			_ = client.Close()
		}()
		got, err := io.ReadAll(server)
		if want == "" {
			want = "-ERR "
		}
		if string(got) != want || err != nil {
			t.Errorf("%q: the server got %q, %v", first, got, err)
		}
	}
}

// TestUnwritten: a command that a connection did not begin to write did not run; one that is written in part, or
// whose reply is outstanding, may have.
func TestUnwritten(t *testing.T) {
	const reads, fails = "reads", "fails"
	for _, c := range []struct {
		steps     []string
		unwritten bool
	}{
		{steps: []string{fails}, unwritten: true},
		{steps: []string{"one", reads, fails}, unwritten: true},
		{steps: []string{"one", reads, "two", fails}},
		{steps: []string{"one", fails}},
	} {
		client, server := net.Pipe()
		conn := guard(client, nil)
		go func() {
			for b := make([]byte, 10); ; {
				n, err := server.Read(b)
				if err != nil {
					return
				}
				_, _ = io.WriteString(server, strings.Repeat("+OK\r\n", n/3))
			}
		}()
		for _, step := range c.steps {
			var err error
			switch step {
			case reads:
				_, err = io.ReadFull(conn, make([]byte, len("+OK\r\n")))
			case fails:
				if err = conn.SetWriteDeadline(time.Unix(0, 0)); err != nil {
					break
				}
				_, failure := io.WriteString(conn, "end")
				outcome := outcomeOf(failure)
				if errors.Is(outcome, store.ErrNotExecuted) != c.unwritten || errors.Is(outcome, store.ErrUncertain) == c.unwritten {
					t.Errorf("%q: the outcome is %v", c.steps, outcome)
				}
			default:
				_, err = io.WriteString(conn, step)
			}
			if err != nil {
				t.Fatalf("%q: %v", step, err)
			}
		}
		_, _ = client.Close(), server.Close()
	}
}

// TestNeedlessPassword is no error, and what follows its reply stays; a wrong one is an error.
func TestNeedlessPassword(t *testing.T) {
	const refused = "-WRONGPASS invalid username-password pair or user is disabled.\r\n"
	for reply, want := range map[string]string{
		needless + " for the default user. Are you sure?\r\n":        "+OK\r\n",
		needless + " for the default user. Are you sure?\r\n:1\r\n+": "+OK\r\n:1\r\n+",
		refused:   refused,
		"+OK\r\n": "+OK\r\n",
	} {
		b := []byte(reply)
		if got := string(b[:answerLogin(b)]); got != want {
			t.Errorf("%q became %q, want %q", reply, got, want)
		}
	}
}
