package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/limit"
)

// programLimit is the limit of a program that counts at a server.
func programLimit(t *testing.T, server *redistest.Server, config limit.Config) *limit.Limit {
	t.Helper()
	s, err := limit.OpenRedis(limit.Redis{
		CheckTimeout: caddytest.WaitLimit, ChargeTimeout: caddytest.WaitLimit, Shards: []limit.Shard{{Name: "shard1", Primary: server.Addr()}},
	})
	must(t, "open", err)
	t.Cleanup(s.Close)
	l, err := s.Limit(config)
	must(t, "limit", err)
	return l
}

// TestOneLimitWithCaddy: a zone of Caddy and a program spend one limit, whatever
// its algorithm, the secret of its keys, and how each spells a key.
func TestOneLimitWithCaddy(t *testing.T) {
	t.Parallel()
	a, b := redistest.Start(t), redistest.Start(t)
	const secret = "hunter2-hunter2-hunter2"
	zone := func(name, key string, more ...string) string {
		return fmt.Sprintf("rate_limit /%[1]s {\nzone %[1]s {\nkey %s\nevents 30\n%s\ncharge before\non_error deny\n}\n}\n", name, key, strings.Join(more, "\n"))
	}
	store := fmt.Sprintf("rate_limit {\nstore redis {\nkey_prefix jobs\nkey_secret %s\ncheck_timeout 1m\nshard shard1 {\nprimary %s\nweight 3\n}\nshard shard2 {\nprimary %s\n}\n}\n}", secret, a.Addr(), b.Addr())
	c := caddytest.Start(t, caddytest.Site(store, "route {\n"+
		zone("fixed", "{header.X-Api-Key}", "window 1h")+
		zone("aligned", "{header.X-Host}", "window 1000h aligned")+
		zone("month", "{header.Authorization}", "window month in Europe/Berlin")+
		zone("sliding", "{client_ip}", "window 1h", "algorithm sliding_window")+
		zone("log", "{header.X-Api-Key}", "window 1h", "algorithm sliding_log")+
		zone("gcra", "{header.X-Api-Key}", "window 1000h", "algorithm gcra")+
		zone("everyone", "provider", "window 1h")+
		"respond ok\n}"))
	s, err := limit.OpenRedis(limit.Redis{
		KeyPrefix: "jobs", KeySecret: secret, CheckTimeout: caddytest.WaitLimit,
		Shards: []limit.Shard{{Name: "shard2", Primary: b.Addr()}, {Name: "shard1", Weight: 3, Primary: a.Addr()}},
	})
	must(t, "open", err)
	t.Cleanup(s.Close)
	long := strings.Repeat("long", 100)
	for _, test := range []struct {
		config        limit.Config
		header, value string
		key           string
	}{
		{limit.Config{Name: "fixed", Key: "{header.X-Api-Key}", Window: time.Hour}, "X-Api-Key", "alice", "alice"},
		{limit.Config{Name: "fixed", Key: "{http.request.header.X-Api-Key}", Window: time.Hour}, "X-Api-Key", long, long},
		{limit.Config{Name: "fixed", Key: "{header.X-Api-Key}", Window: time.Hour}, "X-Api-Key", "2001:DB8::0001", "2001:db8::1"},
		{limit.Config{Name: "aligned", Key: "{header.X-Host}", Window: 1000 * time.Hour, Align: true}, "X-Host", "Example.com:443", "example.com"},
		{limit.Config{Name: "month", Key: "{header.Authorization}", Calendar: limit.Calendar{Unit: "month", TimeZone: "Europe/Berlin"}}, "Authorization", "Bearer  x", "bearer x"},
		{limit.Config{Name: "sliding", Key: "{client_ip}", Window: time.Hour, Algorithm: limit.SlidingWindow}, "X", "", "::ffff:127.0.0.1"},
		{limit.Config{Name: "log", Key: "{header.X-Api-Key}", Window: time.Hour, Algorithm: limit.SlidingLog}, "X-Api-Key", "alice", "alice"},
		{limit.Config{Name: "gcra", Key: "{header.X-Api-Key}", Window: 1000 * time.Hour, Algorithm: limit.GCRA}, "X-Api-Key", "alice", "alice"},
		{limit.Config{Name: "everyone", Key: "provider", Window: time.Hour}, "X", "", "whoever"},
	} {
		test.config.Events = 30
		l, err := s.Limit(test.config)
		must(t, "limit", err)
		var admitted atomic.Int64
		caddytest.Together(t, 50, func(i int) error {
			if i%2 == 0 {
				ok, err := l.Allow(t.Context(), test.key)
				if ok {
					admitted.Add(1)
				}
				return err
			}
			resp, err := c.Try("/"+test.config.Name, test.header+": "+test.value)
			if err != nil {
				return err
			}
			if resp.StatusCode == http.StatusOK {
				admitted.Add(1)
			} else if resp.StatusCode != http.StatusTooManyRequests {
				err = fmt.Errorf("status %d", resp.StatusCode)
			}
			return errors.Join(err, resp.Body.Close())
		})
		must(t, test.config.Name+" "+test.key, want("admitted", admitted.Load(), 30))
	}
}

// TestSharedPenalty: what a program closes is closed for Caddy, and for other processes, until then.
func TestSharedPenalty(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := caddytest.Start(t, caddytest.Site(caddytest.RedisStore("shard shard1 {\nprimary "+server.Addr()+"\n}"),
		"rate_limit {\nzone provider {\nkey provider\nevents 100\nwindow 1h\ncharge before\n}\n}\nrespond ok"))
	config := limit.Config{Name: "provider", Key: "provider", Events: 100, Window: time.Hour}
	one, other := programLimit(t, server, config), programLimit(t, server, config)
	must(t, "penalize", one.Penalize(t.Context(), "", 10*time.Minute))
	got, err := other.Take(t.Context(), "", 1)
	must(t, "another process", errors.Join(err, want("allowed", got.Allowed, false), want("retry within", got.RetryAfter > 9*time.Minute && got.RetryAfter <= 10*time.Minute, true)))
	must(t, "Caddy", want("status", c.Get("/").StatusCode, http.StatusTooManyRequests))
	must(t, "penalize again", other.Penalize(t.Context(), "", 20*time.Minute))
	again, err := one.Take(t.Context(), "", 1)
	must(t, "it is closed once", errors.Join(err, want("until", again.ClosedUntil.Equal(got.ClosedUntil), true)))
	for _, d := range []time.Duration{0, -1, 25 * time.Hour} {
		must(t, d.String(), want("an error", one.Penalize(t.Context(), "", d) != nil, true))
	}
}
