package redis

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestProxies that refuse commands, or close the connection on them, as twemproxy, Envoy and
// managed services do: the limiter counts behind each.
func TestProxies(t *testing.T) {
	t.Parallel()
	const unknown = "-ERR unknown command"
	rare := []string{"hello", "client", "info", "script", "time", "cluster", "select", "readonly", "evalsha_ro"}
	for name, answer := range map[string]func([]string) string{
		"everything passes":     redistest.Refusing(""),
		"HELLO is unknown":      redistest.Refusing(unknown, "hello"),
		"HELLO ends it":         redistest.Refusing(redistest.Cut, "hello", "client"),
		"another protocol":      redistest.Refusing("-NOPROTO unsupported protocol version", "hello"),
		"SCRIPT is unknown":     redistest.Refusing(unknown, "script"),
		"SCRIPT ends it":        redistest.Refusing(redistest.Cut, "script"),
		"EVALSHA_RO is unknown": redistest.Refusing(unknown, "evalsha_ro"),
		"EVALSHA_RO ends it":    redistest.Refusing(redistest.Cut, "evalsha_ro"),
		"INFO is forbidden":     redistest.Refusing("-NOPERM this user has no permissions to run the 'info' command", "info"),
		"rare ones are unknown": redistest.Refusing(unknown, rare...),
		"rare ones end it":      redistest.Refusing(redistest.Cut, rare...),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			filter := redistest.StartFilter(t, redistest.Start(t).Addr(), answer)
			countsAt(t, filter.Addr())
		})
	}
}

// countsAt requires that a store with this primary counts under every algorithm, and keeps overrides.
func countsAt(t *testing.T, addr string) {
	t.Helper()
	s := newStore(t, newShard(t, ShardOptions{Primary: addr}), nil)
	for _, algorithm := range counting {
		limit := &store.Limit{Zone: t.Name(), Algorithm: algorithm, Window: endless}
		var reqs []store.Request
		for client := range 2 {
			reqs = append(reqs, store.Request{Limit: limit, ClientKey: fmt.Sprint("client-", client), Events: 5, Cost: 1})
		}
		for i, step := range []struct {
			op   func(context.Context, []*store.Ask)
			used int64
		}{{s.Check, 0}, {s.Charge, 1}, {s.Take, 2}, {s.Charge, 3}, {s.Check, 3}, {s.Peek, 3}} {
			for n := range reqs {
				reqs[n].ID = strconv.Itoa(i)
			}
			for n, st := range store.Answers(t.Context(), step.op, reqs) {
				used(t, fmt.Sprintf("%v, step %d, bucket %d", algorithm, i, n), st, step.used)
			}
		}
	}
	must(t, setOverride(t, s, block("api", "tag:alice", time.Now().Add(time.Hour))))
	sameKeys(t, "set", overridden(t, s), "tag:alice")
	removes(t, s, store.OverrideBlock, "api", "tag:alice", true)
}
