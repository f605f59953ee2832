package e2e

import (
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

// TestOneLimitWithCaddy: a zone of Caddy and a program that uses package limit spend one limit, whatever
// its algorithm, the secret of its keys, and how each spells a key. What the program closes is closed
// for the zone.
func TestOneLimitWithCaddy(t *testing.T) {
	t.Parallel()
	a, b := redistest.Start(t), redistest.Start(t)
	const secret = "hunter2-hunter2-hunter2"
	zone := func(name, key string, more ...string) string {
		return fmt.Sprintf("rate_limit /%[1]s {\nzone %[1]s {\nkey %s\nevents 12\n%s\ncharge before\non_error deny\n}\n}\n", name, key, strings.Join(more, "\n"))
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
		zone("closed", "provider", "window 1h")+
		"respond ok\n}"))
	s, err := limit.OpenRedis(limit.Redis{
		KeyPrefix: "jobs", KeySecret: secret, CheckTimeout: caddytest.WaitLimit, ChargeTimeout: caddytest.WaitLimit,
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
		test.config.Events = 12
		l, err := s.Limit(test.config)
		must(t, test.config.Name, err)
		var admitted atomic.Int64
		caddytest.Together(t, 20, func(i int) error {
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
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				admitted.Add(1)
			} else if resp.StatusCode != http.StatusTooManyRequests {
				return fmt.Errorf("status %d", resp.StatusCode)
			}
			return nil
		})
		must(t, test.config.Name+" "+test.key, want("admitted", admitted.Load(), 12))
	}
	closed, err := s.Limit(limit.Config{Name: "closed", Key: "provider", Events: 40, Window: time.Hour})
	must(t, "limit", err)
	must(t, "penalize", closed.Penalize(t.Context(), "", 10*time.Minute))
	must(t, "a zone that a program has closed", want("status", c.Get("/closed").StatusCode, http.StatusTooManyRequests))
}
