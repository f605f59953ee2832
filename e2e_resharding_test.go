package shardlimit_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestReshardingOneCaddyAfterTheOther adds a shard, and then removes another,
// while one Caddy has the new config and one the old: nobody's quota is refilled
// by a Caddy that has the new one, and what the other admits of a client that
// moves comes on top, at most.
func TestReshardingOneCaddyAfterTheOther(t *testing.T) {
	t.Parallel()
	const (
		clients = 60
		events  = 10
	)
	servers := caddytest.StartShards(t, 3, 0)
	lines := func(n int, options ...string) []string {
		var lines []string
		for i := range n {
			lines = append(lines, caddytest.ShardOf(caddytest.ShardName(i), servers[i]))
		}
		return append(lines, options...)
	}
	config := func(zone string, store ...string) string {
		return fmt.Sprintf("{\n{{global}}\n%s\n}\n{{site}} {\nrate_limit {\nzone %s {\nkey {header.X-Key}\nevents %d\nwindow 1h\ncharge before\n}\n}\nrespond ok\n}\n", caddytest.RedisStore(store...), zone, events)
	}
	two, three := lines(2), lines(3, "previous_shards a b")
	retired := lines(3, "previous_shards a b c")
	retired[0] = "shard a {\nprimary " + servers[0].Primary.Addr() + "\nretired\n}"
	for _, c := range []struct {
		zone          string
		before, after []string
	}{
		{"added", two, three},
		{"removed", lines(3), retired},
	} {
		caddys := []*caddytest.Caddy{caddytest.Start(t, config(c.zone, c.before...)), caddytest.Start(t, config(c.zone, c.before...))}
		served, resets := map[string]int64{}, map[string]int64{}
		ask := func(at int, client string) caddytest.Answer {
			t.Helper()
			a, err := caddys[at].TryAsk("/", "X-Key: "+client)
			must(t, "ask", err)
			if a.Status == http.StatusOK {
				served[client]++
			}
			switch was, ok := resets[client]; {
			case !ok:
				resets[client] = a.Reset
			case was != a.Reset:
				t.Errorf("%s: %s has reset %d, which was %d", c.zone, client, a.Reset, was)
			}
			return a
		}
		name := func(n int) string { return fmt.Sprint("client-", n) }
		for n := range clients {
			for i := range 4 {
				ask(i%2, name(n))
			}
		}
		eventually(t, "all is charged", func() error {
			total := int64(0)
			for _, server := range servers {
				for key, b := range caddytest.ReadBuckets(t, server.Primary.Client()) {
					if strings.Contains(key, ":"+c.zone+":") {
						total += b.Count
					}
				}
			}
			return want("charges", total, 4*clients)
		})
		caddys[0].MustLoad(config(c.zone, c.after...))
		for n := range clients {
			for i := range 3 {
				if a := ask(0, name(n)); a.Used != int64(5+i) {
					t.Errorf("%s: %s has used %d by the new config, want %d", c.zone, name(n), a.Used, 5+i)
				}
			}
		}
		// The old config knows nothing of those three where the client has moved.
		moved := map[string]bool{}
		for n := range clients {
			moved[name(n)] = ask(1, name(n)).Used < 8
			ask(1, name(n))
		}
		caddys[1].MustLoad(config(c.zone, c.after...))
		for n := range clients {
			for i := range 2 * events {
				ask(i%2, name(n))
			}
		}
		some := 0
		for client, total := range served {
			most := int64(events)
			if moved[client] {
				most += 2
				some++
			}
			if total < events || total > most {
				t.Errorf("%s: %s, moved %v, was served %d times, want %d to %d", c.zone, client, moved[client], total, events, most)
			}
		}
		if some == 0 || some == clients {
			t.Errorf("%s: %d of %d clients have moved", c.zone, some, clients)
		}
	}
}
