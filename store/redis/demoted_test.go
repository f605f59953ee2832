package redis

import (
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// demote makes the replica of a shard its primary, and the name by which the
// primary is known lead to it. The connections that were made before stay with
// the server that was the primary, which is a replica now.
func demote(t *testing.T, sh *redistest.Shard, name *redistest.Proxy) {
	t.Helper()
	must(t, sh.WaitReplicated(t.Context()))
	was, next := sh.Primary, sh.Replicas[0]
	must(t, next.Client().Do(t.Context(), "REPLICAOF", "NO", "ONE").Err())
	name.PointTo(next.Addr())
	host, port, err := net.SplitHostPort(next.Addr())
	must(t, err)
	must(t, was.Client().Do(t.Context(), "REPLICAOF", host, port).Err())
}

// TestDemotedServerBehindANameIsLeft: the first refusal makes all calls go to the
// server that the name leads to now, whichever connection they would have used.
func TestDemotedServerBehindANameIsLeft(t *testing.T) {
	for _, buckets := range []int{1, 8} {
		t.Run(fmt.Sprint(buckets, " buckets"), func(t *testing.T) {
			bothWays(t, func(t *testing.T, plain bool) {
				sh := redistest.StartShard(t, 1)
				name := redistest.StartProxy(t, sh.Primary.Addr())
				shard := newShard(t, ShardOptions{Primary: name.Addr(), NoPipelining: plain, PoolSize: 8})
				s := newStore(t, shard, nil)
				useAllConnections(t, s, plain)
				demote(t, sh, name)
				refused := 0
				for round := range 50 {
					if err := anyError(s.Take(t.Context(), takes(hourly, buckets))); err != nil {
						if KindOf(err) != KindReadOnly {
							t.Fatalf("take in round %d: %v", round, err)
						}
						refused++
					}
				}
				if refused > 1 {
					t.Errorf("%d of 50 calls met the server that was the primary, want the first at most", refused)
				}
			})
		})
	}
}

// TestChargesLeaveADemotedServerBehindAName before they have to be given up.
func TestChargesLeaveADemotedServerBehindAName(t *testing.T) {
	for _, buckets := range []int{1, 8} {
		t.Run(fmt.Sprint(buckets, " buckets"), func(t *testing.T) {
			bothWays(t, func(t *testing.T, plain bool) {
				sh := redistest.StartShard(t, 1)
				name := redistest.StartProxy(t, sh.Primary.Addr())
				s := newStore(t, newShard(t, ShardOptions{Primary: name.Addr(), NoPipelining: plain, PoolSize: 4}), nil)
				must(t, anyError(s.Charge(t.Context(), takes(hourly, buckets))))
				demote(t, sh, name)
				reported := make(chan error, buckets)
				s.ChargeReported(takes(hourly, buckets), func(_ int, st store.State) { reported <- st.Err })
				for range buckets {
					if err := <-reported; err != nil {
						t.Errorf("a charge is given up: %v", err)
					}
				}
				for i := range buckets {
					waitForCount(t, sh.Replicas[0], fmt.Sprint("client", i), 2)
				}
			})
		})
	}
}

func anyError(states []store.State) error {
	for _, st := range states {
		if st.Err != nil {
			return st.Err
		}
	}
	return nil
}

// useAllConnections makes a store have several idle connections for takes, if
// each call has one for itself.
func useAllConnections(t *testing.T, s *Store, plain bool) {
	t.Helper()
	must(t, s.Take(t.Context(), ask("probe"))[0].Err)
	if !plain {
		return
	}
	eventually(t, "there are several connections", func() error {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() { s.Take(t.Context(), ask("probe")) })
		}
		wg.Wait()
		if n := s.shards[0].owner(0).checks.figures().Pool.Idle; n < 4 {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
}
