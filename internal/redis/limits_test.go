package redis

import (
	"context"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestDifferingLimits sends requests of different limits through ledgers, with batches,
// where charges wait for others and where they do not.
func TestDifferingLimits(t *testing.T) {
	shard := newShard(t, ShardOptions{Primary: redistest.Start(t).Addr()})
	for name, opts := range map[string]ledger.Options{
		"at once": {Timeout: waitTimeout},
		"held":    {Timeout: waitTimeout, ChargeDelay: ledger.UsualChargeDelay},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.DifferingLimits(t, func(t *testing.T, clock *storetest.Clock) store.Store {
				s := New(Options{
					clock: clock.Now, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout,
					Members: []Member{{Name: "a", Shard: shard}},
				})
				l := ledger.New(ledger.NewRegistry(clock.Now), s, opts)
				t.Cleanup(func() {
					l.Flush(context.Background())
					l.Leave()
				})
				return l
			})
		})
	}
}
