package redisstore

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"
)

const (
	// defaultTokenLifetime suits tokens that are valid for a quarter of an hour, which
	// are the shortest that clouds give out.
	defaultTokenLifetime = 10 * time.Minute
	minTokenLifetime     = 10 * time.Second
	tokenTimeout         = 30 * time.Second
	// tokenParts is into how many parts the life of a token is divided. After one, a new
	// one is asked for, and connections are replaced when they are that old: so a
	// connection made with a token of the second part ends before the fourth.
	tokenParts = 4
	// tokenPause is how long after a failure the command runs again.
	tokenPause = time.Second
	maxToken   = 16 << 10
)

// token is a password that a command prints and that expires. It is asked for when a
// connection is made.
type token struct {
	command  []string
	lifetime time.Duration
	// timeout bounds one run of the command.
	timeout time.Duration
	now     func() time.Time

	mu   sync.Mutex
	text string
	// printed is when the command began that printed text.
	printed time.Time
	// running is closed when the command that runs ends; nil if none runs. err is how
	// the last one ended.
	running chan struct{}
	err     error
	// kill ends the one that runs.
	kill context.CancelFunc
	// failed is when the last one ended, if it failed.
	failed time.Time
	// isRefused is set once a server has refused text, until there is another one.
	isRefused bool
}

// get returns a token that has not expired. One that will soon is replaced in the
// background; without one, or with one that was refused, get waits for the command until
// ctx ends.
func (t *token) get(ctx context.Context) (string, error) {
	t.mu.Lock()
	now := t.now()
	age := now.Sub(t.printed)
	if (t.text == "" || t.isRefused || age > t.lifetime/tokenParts) && t.running == nil && now.Sub(t.failed) >= tokenPause {
		t.running = make(chan struct{})
		var life context.Context
		life, t.kill = context.WithTimeoutCause(context.Background(), t.timeout, fmt.Errorf("it has not ended within %s", t.timeout))
		go t.renew(life, t.running)
	}
	text, running, err, isRefused := t.text, t.running, t.err, t.isRefused
	t.mu.Unlock()
	isValid := text != "" && age < t.lifetime
	switch {
	case isValid && (!isRefused || running == nil):
		return text, nil
	case running == nil:
		return "", err
	}
	select {
	case <-running:
	case <-ctx.Done():
		return "", fmt.Errorf("password_command has not ended: %w", ctx.Err())
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil && !isValid {
		return "", t.err
	}
	return t.text, nil
}

// refuse notes that a server has refused a token. Unless that is older than the last one, it is replaced
// before the next connection: a server may have revoked it.
func (t *token) refuse() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.isRefused = t.isRefused || t.text != "" && t.now().Sub(t.printed) >= tokenPause
}

// stop kills the command if it runs.
func (t *token) stop() {
	t.mu.Lock()
	running := t.running
	if running != nil {
		t.kill()
	}
	t.mu.Unlock()
	if running != nil {
		<-running
	}
}

func (t *token) renew(ctx context.Context, running chan struct{}) {
	began := t.now()
	text, err := runTokenCommand(ctx, t.command)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kill()
	if t.err = err; err == nil {
		t.text, t.printed, t.failed, t.isRefused = text, began, time.Time{}, false
	} else {
		t.failed = t.now()
	}
	t.running = nil
	close(running)
}

// runTokenCommand returns the line that a command prints. Errors do not quote it.
func runTokenCommand(ctx context.Context, command []string) (string, error) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	// One byte more than a token and the end of its line shows that there is more.
	out, complaint := &head{most: maxToken + len("\r\n") + 1, full: end}, new(counter)
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = out, complaint
	killChildrenToo(cmd)
	// Its children may keep the pipe open.
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if cmd.Process != nil {
		// The command has ended: this kills the children that it leaves behind.
		_ = cmd.Cancel()
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) && len(out.text) < out.most {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		err = fmt.Errorf("password_command %s: %w", command[0], err)
		if *complaint > 0 {
			// It may have the token, such as by set -x.
			err = fmt.Errorf("%w: it wrote %d bytes to standard error, which are not shown: run it by hand", err, *complaint)
		}
		return "", err
	}
	text := strings.TrimRight(string(out.text), "\r\n")
	switch {
	case text == "":
		return "", errors.New("password_command prints nothing")
	case len(out.text) == out.most || len(text) > maxToken || strings.ContainsAny(text, "\r\n"):
		return "", fmt.Errorf("password_command prints more than one line, or more than %d bytes", maxToken)
	}
	return text, nil
}

// head keeps the beginning of what is written to it, up to most bytes, and calls full with the last of them.
type head struct {
	text []byte
	most int
	full func()
}

func (h *head) Write(p []byte) (int, error) {
	h.text = append(h.text, p[:min(len(p), h.most-len(h.text))]...)
	if len(h.text) == h.most {
		h.full()
	}
	return len(p), nil
}

// counter counts the bytes that are written to it.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
