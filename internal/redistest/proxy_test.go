//go:build check

package redistest_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestProxyPasses(t *testing.T) {
	s := redistest.Start(t)
	client := clientOf(t, redistest.StartProxy(t, s.Addr()))
	value := strings.Repeat("x", 4<<20)
	must(t, client.Set(t.Context(), "key", value, 0).Err())
	if got, err := client.Get(t.Context(), "key").Result(); got != value || err != nil {
		t.Errorf("got %d bytes and %v through the proxy, want %d", len(got), err, len(value))
	}
}

func TestProxyDelay(t *testing.T) {
	_, proxy := startProxied(t)
	c := dial(t, proxy)
	c.ping()
	const delay = 300 * time.Millisecond
	for _, d := range []time.Duration{delay / 2, delay} {
		must(t, proxy.Delay(d))
		if took := c.ping(); took < d {
			t.Errorf("present connection answers after %v, want at least %v", took, d)
		}
	}
	if took := dial(t, proxy).ping(); took < delay {
		t.Errorf("new connection answers after %v, want at least %v", took, delay)
	}
	// With that delay, no answer would come in time.
	must(t, errors.Join(proxy.Delay(time.Hour), proxy.Delay(0)))
	c.ping()
	if err := proxy.Delay(-1); err == nil {
		t.Error("a negative delay was accepted")
	}
}

func TestProxySwallowsReplies(t *testing.T) {
	s, proxy := startProxied(t)
	present := dial(t, proxy)
	present.ping()
	must(t, proxy.SwallowReplies())
	created := dial(t, proxy)
	increments(present, created)
	waitForValue(t, s, "key", "2")

	passAgain(t, proxy, present, created)
	requireValue(t, s, "key", "2")
}

func TestProxySwallowsAll(t *testing.T) {
	s, proxy := startProxied(t)
	present := dial(t, proxy)
	present.ping()
	must(t, proxy.SwallowAll())
	created := dial(t, proxy)
	increments(present, created)

	passAgain(t, proxy, present, created)
	requireValue(t, s, "key", "")
}

func TestProxySwallowsLess(t *testing.T) {
	s, proxy := startProxied(t)
	for _, swallow := range []func() error{proxy.SwallowReplies, proxy.SwallowAll, proxy.SwallowAll, proxy.SwallowReplies} {
		must(t, swallow())
	}
	c := dial(t, proxy)
	c.send("INCR key\r\n")
	c.requireSilence()
	waitForValue(t, s, "key", "1")
}

func TestProxyShowsNoGaps(t *testing.T) {
	s, proxy := startProxied(t)
	c := dial(t, proxy)
	c.send("SUBSCRIBE channel\r\n")

	// The server writes without end while bytes are dropped and passed again.
	payload := strings.Repeat("x", 1000)
	ctx, cancel := context.WithCancel(t.Context())
	var publisher sync.WaitGroup
	publisher.Go(func() {
		for ctx.Err() == nil {
			s.Client().Publish(ctx, "channel", payload)
		}
	})
	first, err := c.reader.ReadString('x')
	if err != nil {
		t.Error(err)
	}
	var rest []byte
	var reader sync.WaitGroup
	reader.Go(func() { rest, err = io.ReadAll(c.reader) })
	if err := errors.Join(proxy.SwallowReplies(), proxy.Pass()); err != nil {
		t.Error(err)
	}
	reader.Wait()
	cancel()
	publisher.Wait()

	if isTimeout(err) {
		t.Errorf("connection ended with %v, want it closed", err)
	}
	// Only the last message may be cut short, as nothing follows it.
	const header = "*3\r\n$7\r\nmessage\r\n$7\r\nchannel\r\n$1000\r\n"
	messages := strings.Split(first+string(rest), header)[1:]
	for i, message := range messages[:max(0, len(messages)-1)] {
		if message != payload+"\r\n" {
			t.Fatalf("message %d of %d has %d bytes", i, len(messages), len(message))
		}
	}
}

// TestProxyPointsElsewhere for connections that are made from then on.
func TestProxyPointsElsewhere(t *testing.T) {
	before, after := redistest.Start(t), redistest.Start(t)
	for name, s := range map[string]*redistest.Server{"before": before, "after": after} {
		must(t, s.Client().Set(t.Context(), "name", name, 0).Err())
	}
	proxy := redistest.StartProxy(t, before.Addr())
	old := clientOf(t, proxy).Conn()
	defer old.Close()
	require := func(c goredis.Cmdable, want string) {
		t.Helper()
		if name, err := c.Get(t.Context(), "name").Result(); name != want || err != nil {
			t.Errorf("a connection leads to the server %q, error %v, want %q", name, err, want)
		}
	}
	require(old, "before")
	proxy.PointTo(after.Addr())
	require(clientOf(t, proxy), "after")
	require(old, "before")
}

func TestProxyCut(t *testing.T) {
	_, proxy := startProxied(t)
	for range 20 {
		c := dial(t, proxy)
		c.ping()
		must(t, proxy.Cut())
		c.requireClosed()
	}
	dial(t, proxy).ping()
}

func TestProxyCutRefusesNoClient(t *testing.T) {
	_, proxy := startProxied(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 300 {
			conn, err := net.Dial("tcp", proxy.Addr())
			if err != nil {
				t.Errorf("dial while connections are cut: %v", err)
				return
			}
			conn.Close()
		}
	}()
	for {
		select {
		case <-done:
			return
		default:
		}
		if err := proxy.Cut(); err != nil {
			t.Error(err)
		}
	}
}

// TestProxyResetsReplies requires that a connection breaks in the middle of its second
// reply, which has seven bytes as the first one has.
func TestProxyResetsReplies(t *testing.T) {
	_, proxy := startProxied(t)
	present := dial(t, proxy)
	present.ping()
	must(t, proxy.ResetReplies(10))
	created := dial(t, proxy)
	created.ping()
	for _, c := range []*connection{present, created} {
		c.send("PING\r\n")
		// A reset may overtake the bytes before it.
		got, err := io.ReadAll(c.reader)
		if text := string(got); !errors.Is(err, syscall.ECONNRESET) || text != "+PO" && text != "" {
			t.Errorf("got %q and %v, want a reset in the middle of the reply", got, err)
		}
	}
	must(t, proxy.Pass())
	c := dial(t, proxy)
	c.ping()
	c.ping()
	if err := proxy.ResetReplies(-1); err == nil {
		t.Error("a negative number of bytes was accepted")
	}
}

func TestProxyDownAndUp(t *testing.T) {
	_, proxy := startProxied(t)
	addr := proxy.Addr()
	c := dial(t, proxy)
	c.ping()
	for range 2 {
		must(t, proxy.Down())
	}
	c.requireClosed()
	if _, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial while down got %v, want connection refused", err)
	}
	for range 2 {
		must(t, proxy.Up())
	}
	if proxy.Addr() != addr {
		t.Errorf("address %s, want still %s", proxy.Addr(), addr)
	}
	dial(t, proxy).ping()
}

func TestProxyKeepsToxicsWhileDown(t *testing.T) {
	_, proxy := startProxied(t)
	must(t, errors.Join(proxy.Down(), proxy.SwallowAll(), proxy.Up()))
	c := dial(t, proxy)
	c.send("PING\r\n")
	c.requireSilence()
}

func TestProxyWithoutUpstream(t *testing.T) {
	s, proxy := startProxied(t)
	must(t, s.Kill())
	dial(t, proxy).requireClosed()
	must(t, s.Restart())
	dial(t, proxy).ping()
}

func TestProxyClosesWithServer(t *testing.T) {
	s := redistest.Start(t)
	c := dial(t, redistest.StartProxy(t, s.Addr()))
	c.ping()
	must(t, s.Kill())
	c.requireClosed()
}

func TestClosedProxy(t *testing.T) {
	s := redistest.Start(t)
	before := runtime.NumGoroutine()
	proxy := redistest.StartProxy(t, s.Addr())
	for range 3 {
		c := dial(t, proxy)
		c.ping()
		c.send("PING\r\n")
	}
	must(t, errors.Join(proxy.Delay(time.Hour), proxy.SwallowReplies()))
	dial(t, proxy).send("PING\r\n")
	for range 2 {
		must(t, proxy.Close())
	}
	if err := proxy.Up(); err == nil {
		t.Error("bringing up a closed proxy worked")
	}
	redistest.Eventually(t, "no goroutine is left", func() error {
		if n := runtime.NumGoroutine(); n > before {
			return fmt.Errorf("%d goroutines after closing, %d before", n, before)
		}
		return nil
	})
}

// TestProxyUnderLoad changes everything at once while clients work and leave.
func TestProxyUnderLoad(t *testing.T) {
	_, proxy := startProxied(t)
	ctx, cancel := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for ctx.Err() == nil {
				client := goredis.NewClient(&goredis.Options{
					Addr:          proxy.Addr(),
					ReadTimeout:   5 * time.Millisecond,
					DialerRetries: 1,
					MaxRetries:    -1,
				})
				for range 20 {
					client.Echo(ctx, strings.Repeat("x", 10_000))
				}
				client.Close()
			}
		})
	}
	for range 25 {
		err := errors.Join(
			proxy.Delay(2*time.Millisecond), proxy.SwallowReplies(), proxy.Cut(),
			proxy.Delay(0), proxy.Pass(), proxy.Delay(time.Millisecond),
			proxy.SwallowAll(), proxy.Pass(),
		)
		if err != nil {
			t.Error(err)
		}
	}
	cancel()
	workers.Wait()
	dial(t, proxy).ping()
}

// increments sends a command on connections on which no reply comes.
func increments(all ...*connection) {
	for _, c := range all {
		c.send("INCR key\r\n")
		c.requireSilence()
	}
}

// passAgain ends the faults: connections from before are closed, a new one works.
func passAgain(t *testing.T, proxy *redistest.Proxy, before ...*connection) {
	t.Helper()
	must(t, proxy.Pass())
	for _, c := range before {
		c.requireClosed()
	}
	dial(t, proxy).ping()
}

func startProxied(t *testing.T) (*redistest.Server, *redistest.Proxy) {
	t.Helper()
	s := redistest.Start(t)
	return s, redistest.StartProxy(t, s.Addr())
}

func clientOf(t *testing.T, proxy *redistest.Proxy) *goredis.Client {
	client := goredis.NewClient(&goredis.Options{Addr: proxy.Addr(), MaxRetries: -1, DialTimeout: waitLimit, ReadTimeout: waitLimit, WriteTimeout: waitLimit})
	t.Cleanup(func() { client.Close() })
	return client
}

// waitLimit bounds every wait for a condition.
const waitLimit = time.Minute

// short is how long the tests wait for what must not happen.
const short = 100 * time.Millisecond

// connection is a bare connection through a proxy. It ends after waitLimit.
type connection struct {
	t      *testing.T
	conn   net.Conn
	reader *bufio.Reader
}

func dial(t *testing.T, proxy *redistest.Proxy) *connection {
	t.Helper()
	conn, err := net.Dial("tcp", proxy.Addr())
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	c := &connection{t: t, conn: conn, reader: bufio.NewReader(conn)}
	c.endAfter(waitLimit)
	return c
}

// endAfter makes everything fail with a timeout from d on.
func (c *connection) endAfter(d time.Duration) {
	c.t.Helper()
	must(c.t, c.conn.SetDeadline(time.Now().Add(d)))
}

func (c *connection) send(command string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, command); err != nil {
		c.t.Fatal(err)
	}
}

// ping returns how long the server took to answer.
func (c *connection) ping() time.Duration {
	c.t.Helper()
	before := time.Now()
	c.send("PING\r\n")
	if reply, err := c.reader.ReadString('\n'); reply != "+PONG\r\n" || err != nil {
		c.t.Fatalf("ping got %q, %v", reply, err)
	}
	return time.Since(before)
}

// requireSilence checks that the connection is open and that nothing arrives.
func (c *connection) requireSilence() {
	c.t.Helper()
	c.endAfter(short)
	if b, err := c.reader.ReadByte(); !isTimeout(err) {
		c.t.Errorf("read got %q, %v; want silence", b, err)
	}
	c.endAfter(waitLimit)
}

// requireClosed checks that the connection ends and that nothing arrives.
func (c *connection) requireClosed() {
	c.t.Helper()
	if b, err := c.reader.ReadByte(); err == nil || isTimeout(err) {
		c.t.Errorf("read got %q, %v; want the connection closed", b, err)
	}
}
