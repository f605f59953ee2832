package redisstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// tokens returns a token whose command runs in a shell, and what moves its clock. The
// command finds the file of its runs in $1.
func tokens(t *testing.T, script string) (tok *token, pass func(time.Duration), runs func() int) {
	t.Helper()
	var now atomic.Int64
	now.Store(time.Now().UnixNano())
	file := filepath.Join(t.TempDir(), "runs")
	tok = &token{
		command: []string{"sh", "-c", "echo run >>$1; " + script, "sh", file}, lifetime: time.Minute, timeout: tokenTimeout,
		now: func() time.Time { return time.Unix(0, now.Load()) },
	}
	runs = func() int {
		text, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		return strings.Count(string(text), "run")
	}
	return tok, func(d time.Duration) { now.Add(int64(d)) }, runs
}

func (t *token) is(tb testing.TB, want string) {
	tb.Helper()
	if got, err := t.get(tb.Context()); got != want || err != nil {
		tb.Errorf("the token is %q, %v; want %q", got, err, want)
	}
}

// idle waits until no command runs.
func (t *token) idle() {
	t.mu.Lock()
	running := t.running
	t.mu.Unlock()
	if running != nil {
		<-running
	}
}

// TestTokenIsRenewed before it expires, without anybody waiting, and by one command for all.
func TestTokenIsRenewed(t *testing.T) {
	tok, pass, runs := tokens(t, "grep -c run $1")
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() { tok.is(t, "1") })
	}
	all.Wait()
	pass(15 * time.Second)
	tok.is(t, "1")
	tok.idle()
	if n := runs(); n != 1 {
		t.Errorf("after a quarter of its life it was asked for %d times", n)
	}
	pass(time.Second)
	tok.is(t, "1")
	tok.idle()
	tok.is(t, "2")
	pass(2 * time.Minute)
	tok.is(t, "3")
}

// TestTokenThatCannotBeRenewed counts until it expires; then each second makes one more try.
func TestTokenThatCannotBeRenewed(t *testing.T) {
	tok, pass, runs := tokens(t, `[ "$(grep -c run $1)" = 1 ] && echo first || { echo secret; echo "no role" >&2; echo more >&2; exit 3; }`)
	tok.is(t, "first")
	pass(50 * time.Second)
	tok.is(t, "first")
	tok.idle()
	pass(9 * time.Second)
	tok.is(t, "first")
	tok.idle()
	pass(2 * time.Second)
	for range 5 {
		if got, err := tok.get(t.Context()); got != "" || err == nil || err.Error() != "password_command sh: exit status 3: it wrote 13 bytes to standard error, which are not shown: run it by hand" {
			t.Errorf("after its end: %q, %v", got, err)
		}
	}
	if n := runs(); n != 4 {
		t.Errorf("it was asked for %d times", n)
	}
}

// TestTokenThatWasRefused is replaced before the next connection, at most once a second, and stays
// while there is no other.
func TestTokenThatWasRefused(t *testing.T) {
	tok, pass, runs := tokens(t, "n=$(grep -c run $1); [ $n != 3 ] && echo $n")
	tok.is(t, "1")
	tok.refuse()
	tok.is(t, "1")
	pass(time.Second)
	tok.refuse()
	tok.is(t, "2")
	tok.refuse()
	tok.is(t, "2")
	pass(time.Second)
	tok.refuse()
	tok.is(t, "2")
	if n := runs(); n != 3 {
		t.Errorf("it was asked for %d times", n)
	}
	pass(time.Second)
	tok.is(t, "4")
}

// TestTokenTakesTooLong: a caller stops waiting when its context ends.
func TestTokenTakesTooLong(t *testing.T) {
	tok, _, _ := tokens(t, "while [ ! -e $1.go ]; do sleep 0.01; done; echo late")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tok.get(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("the error is %v", err)
	}
	if err := os.WriteFile(tok.command[len(tok.command)-1]+".go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tok.is(t, "late")
}

// TestTokenThatIsNone is refused, and not told. A command that has printed too much is not awaited.
func TestTokenThatIsNone(t *testing.T) {
	for script, want := range map[string]string{
		"true":                                "password_command prints nothing",
		"echo secret; echo more":              "password_command prints more than one line, or more than 16384 bytes",
		"yes":                                 "password_command prints more than one line, or more than 16384 bytes",
		"yes x | tr -d '\\n' | head -c 16385": "password_command prints more than one line, or more than 16384 bytes",
		"yes | head -c 17000; sleep 1000":     "password_command prints more than one line, or more than 16384 bytes",
	} {
		tok, _, _ := tokens(t, script)
		tok.timeout = time.Hour
		if got, err := tok.get(t.Context()); got != "" || err == nil || err.Error() != want {
			t.Errorf("%s: %.20q, %v", script, got, err)
		}
	}
	missing := &token{command: []string{"/nowhere/token"}, lifetime: time.Minute, timeout: tokenTimeout, now: time.Now}
	if _, err := missing.get(t.Context()); err == nil || !strings.Contains(err.Error(), "password_command /nowhere/token: ") {
		t.Errorf("without such a command: %v", err)
	}
}

// begin asks for a token. It returns what get returns and, once the command has opened the
// pipe $1.pipe, a function that waits until no process has the pipe any more.
func (t *token) begin(tb testing.TB) (got func() (string, error), awaitEnd func()) {
	tb.Helper()
	path := t.command[len(t.command)-1] + ".pipe"
	if err := exec.Command("mkfifo", path).Run(); err != nil {
		tb.Fatal(err)
	}
	var text string
	var err error
	var asked sync.WaitGroup
	asked.Go(func() { text, err = t.get(tb.Context()) })
	pipe, openErr := os.OpenFile(path, os.O_RDONLY, 0)
	if openErr != nil {
		tb.Fatal(openErr)
	}
	tb.Cleanup(func() { _ = pipe.Close() })
	got = func() (string, error) {
		asked.Wait()
		return text, err
	}
	return got, func() {
		tb.Helper()
		if err := pipe.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			tb.Fatal(err)
		}
		if _, err := io.ReadAll(pipe); err != nil {
			tb.Errorf("a child still runs: %v", err)
		}
	}
}

// TestTokenOfACommandWithChildren counts, although a child of the command holds its output.
// The child is killed, and so is one that holds nothing.
func TestTokenOfACommandWithChildren(t *testing.T) {
	for _, output := range []string{"", ">/dev/null 2>&1"} {
		tok, _, _ := tokens(t, "exec 3>$1.pipe; sleep 1000 "+output+" & echo token")
		got, awaitEnd := tok.begin(t)
		if text, err := got(); text != "token" || err != nil {
			t.Errorf("the token is %q, %v", text, err)
		}
		awaitEnd()
	}
}

// TestTokenIsStopped with the command's children. The error does not quote what it wrote.
func TestTokenIsStopped(t *testing.T) {
	tok, _, _ := tokens(t, "echo no role >&2; exec 3>$1.pipe; sleep 1000 & wait")
	got, awaitEnd := tok.begin(t)
	tok.stop()
	if text, err := got(); text != "" || err == nil || err.Error() != "password_command sh: context canceled: it wrote 8 bytes to standard error, which are not shown: run it by hand" {
		t.Errorf("after the stop: %q, %v", text, err)
	}
	awaitEnd()
}

// TestTokenTimesOut: the error names the limit.
func TestTokenTimesOut(t *testing.T) {
	tok, _, _ := tokens(t, "sleep 1000")
	tok.timeout = 50 * time.Millisecond
	if text, err := tok.get(t.Context()); text != "" || err == nil || err.Error() != "password_command sh: it has not ended within 50ms" {
		t.Errorf("after the timeout: %q, %v", text, err)
	}
}

// TestTokenCommandIsDone: to kill a command that has ended, with its children, is no error
// of the command.
func TestTokenCommandIsDone(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "true")
	killChildrenToo(cmd)
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Cancel(); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("the error is %v", err)
	}
}

// TestTokenOutputIsBounded: memory does not grow with what a command prints.
func TestTokenOutputIsBounded(t *testing.T) {
	const printed, most = 64 << 20, 16 << 20
	tok, _, _ := tokens(t, fmt.Sprintf("head -c %d /dev/zero; head -c %[1]d /dev/zero >&2", printed))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	text, err := tok.get(t.Context())
	runtime.ReadMemStats(&after)
	if text != "" || err == nil {
		t.Errorf("a token of %d bytes: %.20q, %v", printed, text, err)
	}
	if grown := after.TotalAlloc - before.TotalAlloc; grown > most {
		t.Errorf("it took %d bytes to read %d", grown, 2*printed)
	}
}
