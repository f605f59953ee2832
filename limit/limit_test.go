package limit_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/limit"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// openRedis opens a store whose shards are servers, which tests leave much time.
func openRedis(t *testing.T, servers ...*redistest.Server) *limit.Store {
	t.Helper()
	r := limit.Redis{CheckTimeout: 10 * time.Second, ChargeTimeout: 10 * time.Second}
	for i, server := range servers {
		r.Shards = append(r.Shards, limit.Shard{Name: fmt.Sprintf("shard%d", i+1), Primary: server.Addr()})
	}
	s, err := limit.OpenRedis(r)
	must(t, "open", err)
	t.Cleanup(s.Close)
	return s
}

func limitOf(t *testing.T, s *limit.Store, c limit.Config) *limit.Limit {
	t.Helper()
	l, err := s.Limit(c)
	must(t, "limit", err)
	return l
}

// algorithms are all that count events, with the same limit.
func algorithms(events int64) (all []limit.Config) {
	for _, a := range []limit.Algorithm{limit.FixedWindow, limit.SlidingWindow, limit.SlidingLog, limit.GCRA} {
		all = append(all, limit.Config{Name: a.String(), Algorithm: a, Events: events, Window: time.Hour})
	}
	return all
}

// forStores runs a test with a store of each kind.
func forStores(t *testing.T, test func(t *testing.T, s *limit.Store)) {
	t.Run("memory", func(t *testing.T) { test(t, limit.OpenMemory(limit.Memory{})) })
	t.Run("redis", func(t *testing.T) { test(t, openRedis(t, redistest.Start(t), redistest.Start(t))) })
}

// TestNoCaddy: programs that use the package carry no Caddy.
func TestNoCaddy(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").CombinedOutput()
	must(t, "list dependencies: "+string(out), err)
	deps := strings.Fields(string(out))
	if len(deps) < 50 {
		t.Fatalf("there are only %d dependencies", len(deps))
	}
	for _, dep := range deps {
		if strings.HasPrefix(dep, "github.com/caddyserver") || strings.HasPrefix(dep, "go.uber.org/zap") || strings.HasPrefix(dep, "github.com/prometheus") {
			t.Errorf("the package imports %s", dep)
		}
	}
}

// TestTake spends what fits, and shows the bucket.
func TestTake(t *testing.T) {
	forStores(t, func(t *testing.T, s *limit.Store) {
		for _, c := range algorithms(10) {
			l, ctx := limitOf(t, s, c), t.Context()
			for _, step := range []struct {
				n         int64
				allowed   bool
				used      int64
				remaining int64
			}{{4, true, 4, 6}, {7, false, 4, 6}, {0, true, 4, 6}, {6, true, 10, 0}, {1, false, 10, 0}, {0, true, 10, 0}} {
				got, err := l.Take(ctx, "a", step.n)
				must(t, "take", err)
				must(t, c.Name, errors.Join(want("allowed", got.Allowed, step.allowed), want("limit", got.Limit, 10),
					want("used", got.Used, step.used), want("remaining", got.Remaining, step.remaining),
					want("closed", got.ClosedUntil.IsZero(), true)))
				if wait := got.RetryAfter; (wait > 0) == got.Allowed || wait > 2*time.Hour {
					t.Errorf("%s: take %d: retry after %v", c.Name, step.n, wait)
				}
			}
			got, err := l.Take(ctx, "a", 11)
			must(t, "take too much", errors.Join(err, want("allowed", got.Allowed, false), want("retry after", got.RetryAfter, limit.Never)))
			ok, err := l.Allow(ctx, "b")
			must(t, "another key", errors.Join(err, want("allowed", ok, true)))
			_, err = l.Take(ctx, "a", -1)
			must(t, "take less than nothing", want("an error", err != nil, true))
		}
	})
}

// TestTogether: however many take at once, no more pass than fit.
func TestTogether(t *testing.T) {
	forStores(t, func(t *testing.T, s *limit.Store) {
		for _, c := range algorithms(50) {
			l := limitOf(t, s, c)
			must(t, c.Name, want("admitted", allowedOf(t, 120, func() (bool, error) { return l.Allow(t.Context(), "a") }), 50))
		}
	})
}

// allowedOf returns how many of n concurrent calls were allowed.
func allowedOf(t *testing.T, n int, allow func() (bool, error)) int64 {
	t.Helper()
	var allowed atomic.Int64
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			ok, err := allow()
			if err != nil {
				t.Error(err)
			}
			if ok {
				allowed.Add(1)
			}
		})
	}
	all.Wait()
	return allowed.Load()
}

// TestSharedPenalty: a program's penalty holds for other processes too. A test of e2e shows
// the same for a zone of Caddy.
func TestSharedPenalty(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	config := limit.Config{Name: "provider", Key: "provider", Events: 100, Window: time.Hour}
	one, other := limitOf(t, openRedis(t, server), config), limitOf(t, openRedis(t, server), config)
	must(t, "penalize", one.Penalize(t.Context(), "", 10*time.Minute))
	got, err := other.Take(t.Context(), "", 1)
	must(t, "another process", errors.Join(err, want("allowed", got.Allowed, false), want("retry within", got.RetryAfter > 9*time.Minute && got.RetryAfter <= 10*time.Minute, true)))
	must(t, "penalize again", other.Penalize(t.Context(), "", 20*time.Minute))
	again, err := one.Take(t.Context(), "", 1)
	must(t, "it is closed once", errors.Join(err, want("until", again.ClosedUntil.Equal(got.ClosedUntil), true)))
	for _, d := range []time.Duration{0, -1, 25 * time.Hour} {
		must(t, d.String(), want("an error", one.Penalize(t.Context(), "", d) != nil, true))
	}
}

// TestBadConfigs names the field that is wrong.
func TestBadConfigs(t *testing.T) {
	t.Parallel()
	good := limit.Config{Name: "api", Events: 10, Window: time.Minute}
	for field, change := range map[string]func(c *limit.Config){
		"Name":              func(c *limit.Config) { c.Name = "a b" },
		"Name:":             func(c *limit.Config) { c.Name = "" },
		"Key":               func(c *limit.Config) { c.Key = "{a} {b}" },
		"Key \"{a\"":        func(c *limit.Config) { c.Key = "{a" },
		"Key \"a}\"":        func(c *limit.Config) { c.Key = "a}" },
		"Algorithm":         func(c *limit.Config) { c.Algorithm = 99 },
		"Events":            func(c *limit.Config) { c.Events = 0 },
		"Events 100001":     func(c *limit.Config) { c.Events, c.Algorithm = 100_001, limit.SlidingLog },
		"Window":            func(c *limit.Config) { c.Window = 0 },
		"Window 1ns":        func(c *limit.Config) { c.Window = 1 },
		"whole micro":       func(c *limit.Config) { c.Window = time.Second + 1 },
		"Window 1ms":        func(c *limit.Config) { c.Window, c.Algorithm = time.Millisecond, limit.Concurrency },
		"Align":             func(c *limit.Config) { c.Align, c.Algorithm = true, limit.GCRA },
		"Calendar.Unit":     func(c *limit.Config) { c.Window, c.Calendar.Unit = 0, "decade" },
		"Calendar.TimeZone": func(c *limit.Config) { c.Window, c.Calendar = 0, limit.Calendar{Unit: "day", TimeZone: "Mars"} },
		`Calendar.Unit ""`:  func(c *limit.Config) { c.Window, c.Calendar = 0, limit.Calendar{TimeZone: "UTC"} },
		"Window does":       func(c *limit.Config) { c.Calendar.Unit = "day" },
		"Burst":             func(c *limit.Config) { c.Burst = 5 },
		"Burst -1":          func(c *limit.Config) { c.Burst, c.Algorithm = -1, limit.GCRA },
		"100 years":         func(c *limit.Config) { c.Burst, c.Algorithm, c.Window = 1<<52, limit.GCRA, 800_000*time.Hour },
		"ReserveFor":        func(c *limit.Config) { c.ReserveFor = 25 * time.Hour },
	} {
		c := good
		change(&c)
		if _, err := limit.OpenMemory(limit.Memory{}).Limit(c); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%+v: %v, want one that names %s", c, err, field)
		}
	}
	one := []limit.Shard{{Primary: "localhost"}}
	for field, r := range map[string]limit.Redis{
		"Shards":          {},
		"exactly one":     {Shards: []limit.Shard{{Name: "a"}}},
		"set exactly one": {Shards: []limit.Shard{{Primary: "a", Cluster: []string{"b"}}}},
		"Name is that":    {Shards: []limit.Shard{{Primary: "a"}, {Primary: "b"}}},
		"Name: use":       {Shards: []limit.Shard{{Name: "a b", Primary: "a"}}},
		"Weight":          {Shards: []limit.Shard{{Weight: -1, Primary: "a"}}},
		"Sentinel.Master": {Shards: []limit.Shard{{Sentinel: &limit.Sentinel{Addrs: []string{"a"}}}}},
		"Sentinel.Addrs":  {Shards: []limit.Shard{{Sentinel: &limit.Sentinel{Master: "a"}}}},
		"Username":        {Shards: []limit.Shard{{Primary: "a", Username: "u"}}},
		"Credentials": {Shards: []limit.Shard{{Primary: "a", Password: "p", Credentials: func(context.Context) (string, string, error) {
			return "", "", nil
		}}}},
		"a URL":         {Shards: []limit.Shard{{Primary: "redis://localhost"}}},
		"is empty or":   {Shards: []limit.Shard{{Cluster: []string{"a", ""}}}},
		"DB":            {Shards: []limit.Shard{{Cluster: []string{"a"}, DB: -1}}},
		"CheckTimeout":  {Shards: one, CheckTimeout: time.Hour},
		"ChargeTimeout": {Shards: one, ChargeTimeout: -1},
		"MaxBuckets":    {Shards: one, MaxBuckets: -1},
		"KeyPrefix":     {Shards: one, KeyPrefix: "a b"},
	} {
		if _, err := limit.OpenRedis(r); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%+v: %v, want one that names %s", r, err, field)
		}
	}
}

// TestUnavailable: a store that does not answer is an error, and decides nothing.
func TestUnavailable(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s, err := limit.OpenRedis(limit.Redis{CheckTimeout: 50 * time.Millisecond, ChargeTimeout: 50 * time.Millisecond, Shards: []limit.Shard{{Primary: server.Addr()}}})
	must(t, "open", err)
	t.Cleanup(s.Close)
	l := limitOf(t, s, limit.Config{Name: "api", Events: 10, Window: time.Hour})
	var held *limit.Reservation
	eventually(t, "the store answers", func() (err error) {
		held, err = l.Reserve(t.Context(), "a", 1)
		return err
	})
	must(t, "stop", server.Stop())
	for name, call := range map[string]func() error{
		"allow":    func() error { _, err := l.Allow(t.Context(), "a"); return err },
		"wait":     func() error { return l.Wait(t.Context(), "a", 1) },
		"reserve":  func() error { _, err := l.Reserve(t.Context(), "a", 1); return err },
		"penalize": func() error { return l.Penalize(t.Context(), "a", time.Minute) },
		"commit":   func() error { return held.Commit(t.Context(), 3) },
	} {
		if err := call(); !errors.Is(err, limit.ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, "commit again", want("ended", errors.Is(held.Release(t.Context()), limit.ErrEnded), true))
}

// TestUncertain: the server is asked and does not answer, so the events may be spent.
func TestUncertain(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s, err := limit.OpenRedis(limit.Redis{CheckTimeout: 200 * time.Millisecond, Shards: []limit.Shard{{Primary: server.Addr()}}})
	must(t, "open", err)
	t.Cleanup(s.Close)
	l := limitOf(t, s, limit.Config{Name: "api", Events: 10, Window: time.Hour})
	eventually(t, "the store answers", func() error { _, err := l.Allow(t.Context(), "a"); return err })
	try := 0
	// On a machine that stands still, nothing may be sent in time.
	eventually(t, "the server is asked", func() error {
		try++
		must(t, "pause", server.Pause())
		_, err := l.Allow(t.Context(), fmt.Sprint("b", try))
		must(t, "resume", server.Resume())
		must(t, "allow: "+fmt.Sprint(err), want("unavailable", errors.Is(err, limit.ErrUnavailable), true))
		return want("uncertain", errors.Is(err, limit.ErrUncertain), true)
	})
}

// TestLogins: a server with a password and TLS, one found through Sentinel, and a Redis Cluster.
func TestLogins(t *testing.T) {
	t.Parallel()
	config := limit.Config{Name: "api", Events: 10, Window: time.Hour}
	allow := func(what string, shard limit.Shard) {
		t.Helper()
		s, err := limit.OpenRedis(limit.Redis{CheckTimeout: 10 * time.Second, Shards: []limit.Shard{shard}})
		must(t, what, err)
		defer s.Close()
		l := limitOf(t, s, config)
		eventually(t, "the store answers", func() error { _, err := l.Allow(t.Context(), "a"); return err })
	}
	locked := redistest.Start(t, redistest.Args("--requirepass", "secret"))
	allow("password", limit.Shard{Primary: locked.Addr(), Password: "secret"})
	allow("credentials", limit.Shard{Primary: locked.Addr(), Credentials: func(context.Context) (string, string, error) { return "default", "secret", nil }})
	allow("socket", limit.Shard{Primary: "unix/" + redistest.Start(t, redistest.Args("--unixsocket", "redis.sock")).SocketPath()})
	authority := redistest.StartAuthority(t)
	certificate, err := authority.IssueServer(time.Now().Add(time.Hour), "localhost", "127.0.0.1")
	must(t, "issue", err)
	encrypted := redistest.Start(t, redistest.TLS(certificate), redistest.Args("--tls-auth-clients", "no"))
	allow("TLS", limit.Shard{Primary: encrypted.Addr(), TLS: &tls.Config{RootCAs: authority.Pool(), MinVersion: tls.VersionTLS12}})
	sentinels := redistest.StartSentinels(t, "mymaster", redistest.Start(t), 1, redistest.SentinelOptions{})
	allow("Sentinel", limit.Shard{Sentinel: &limit.Sentinel{Master: "mymaster", Addrs: sentinels.Addrs()}})
	allow("cluster", limit.Shard{Cluster: redistest.StartCluster(t, 3, 0).Addrs()})
}

// TestCanceled: the caller's own end is no fault of the store, but the call may have taken effect.
func TestCanceled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, fault := range []error{store.ErrNotExecuted, store.ErrUncertain} {
			l := limitOf(t, memoryWith(&faulty{latency: time.Hour, err: fault}), limit.Config{Name: "api", Events: 10, Window: time.Hour})
			for name, call := range map[string]func(ctx context.Context) error{
				"allow":   func(ctx context.Context) error { _, err := l.Allow(ctx, "a"); return err },
				"wait":    func(ctx context.Context) error { return l.Wait(ctx, "a", 1) },
				"reserve": func(ctx context.Context) error { _, err := l.Reserve(ctx, "a", 1); return err },
			} {
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(time.Second, cancel)
				err := call(ctx)
				must(t, name+": "+fmt.Sprint(err), errors.Join(want("canceled", errors.Is(err, context.Canceled), true),
					want("unavailable", errors.Is(err, limit.ErrUnavailable), false), want("uncertain", errors.Is(err, limit.ErrUncertain), errors.Is(fault, store.ErrUncertain))))
			}
		}
	})
}

// TestEmptyKeys are not the key of a common bucket, which Caddy does not have.
func TestEmptyKeys(t *testing.T) {
	t.Parallel()
	s := limit.OpenMemory(limit.Memory{})
	for _, key := range []string{"", "{header.X-Api-Key}", "{query.id}", "{cookie.id}"} {
		l := limitOf(t, s, limit.Config{Name: "api", Key: key, Events: 10, Window: time.Hour})
		transport := &limit.Transport{Limit: l, Key: func(*http.Request) string { return "" }}
		for name, call := range map[string]func(value string) error{
			"allow":    func(value string) error { _, err := l.Allow(t.Context(), value); return err },
			"wait":     func(value string) error { return l.Wait(t.Context(), value, 1) },
			"reserve":  func(value string) error { _, err := l.Reserve(t.Context(), value, 1); return err },
			"penalize": func(value string) error { return l.Penalize(t.Context(), value, time.Second) },
			"request":  func(string) error { _, err := get(t.Context(), transport, "http://127.0.0.1:1"); return err },
		} {
			must(t, key+" "+name, want("empty", errors.Is(call(""), limit.ErrEmptyKey), true))
			if key != "" {
				must(t, key+" "+name, want("empty", errors.Is(call(" \t"), limit.ErrEmptyKey), true))
			}
		}
	}
	ok, err := limitOf(t, s, limit.Config{Name: "all", Key: "provider", Events: 10, Window: time.Hour}).Allow(t.Context(), "")
	must(t, "a text without a placeholder", errors.Join(err, want("allowed", ok, true)))
}
