package redis

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestWhatWasRefundedIsNotBroughtAgain although the refund ends the bucket at the
// new owner before the copy at the former one, whichever Caddy looks next.
func TestWhatWasRefundedIsNotBroughtAgain(t *testing.T) {
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	client := moving(before, r.store(r.members, nil), 1)[0]
	former, owner := r.servers[before.Owner(client)].Client(), r.servers["c"].Client()
	for _, limit := range []store.Limit{
		{Algorithm: store.FixedWindow}, {Algorithm: store.SlidingWindow}, {Algorithm: store.SlidingLog}, {Algorithm: store.GCRA},
	} {
		t.Run(string(limit.Algorithm), func(t *testing.T) {
			limit.Zone, limit.Window = "refund", time.Hour
			key := before.keys.key(&limit, client)
			var reqs []store.Request
			for i := range 7 {
				req := store.Request{Limit: &limit, ClientKey: client, Events: 10, Burst: 10, Cost: 1, ID: fmt.Sprint(i)}
				st := before.Take(t.Context(), []store.Request{req})[0]
				if !st.Allowed {
					t.Fatalf("%+v", st)
				}
				req.Receipt = st.Receipt
				reqs = append(reqs, req)
			}
			for _, st := range r.store(r.members, r.members[:2]).Refund(t.Context(), reqs) {
				must(t, st.Err)
			}
			eventually(t, "the copy lives no shorter than the former bucket, or has ended", func() error {
				was, err := former.PExpireTime(t.Context(), key).Result()
				must(t, err)
				now, err := owner.PExpireTime(t.Context(), key).Result()
				must(t, err)
				if now == -2 || now >= was {
					return nil
				}
				return fmt.Errorf("it ends at %d, the former one at %d", now, was)
			})
			other := r.store(r.members, r.members[:2])
			if st := other.Check(t.Context(), reqs[:1])[0]; st.Err != nil || st.Used != 0 {
				t.Errorf("all was refunded, and then: %+v", st)
			}
		})
	}
}

// TestBucketIsBroughtOnce, however many want it.
func TestBucketIsBroughtOnce(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const callers, each = 64, 5
		r := newReshardingOf(t, ShardOptions{NoPipelining: plain})
		before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
		clients := moving(before, after, 20)
		for _, client := range clients {
			must(t, before.Charge(t.Context(), ask(client))[0].Err)
		}
		errs := make(chan error, callers*len(clients)*each)
		for i := range callers {
			go func() {
				for n := range len(clients) * each {
					client := clients[(i+n)%len(clients)]
					if n%2 == 0 {
						errs <- after.Check(context.Background(), ask(client))[0].Err
					} else {
						after.ChargeReported(ask(client), func(_ int, st store.State) { errs <- st.Err })
					}
				}
			}()
		}
		for range cap(errs) {
			must(t, <-errs)
		}
		for _, command := range []string{"dump", "restore"} {
			total := int64(0)
			for _, server := range r.servers {
				total += calls(t, server, command)
			}
			if total != int64(len(clients)) {
				t.Errorf("%d times %s for %d buckets", total, command, len(clients))
			}
		}
		for _, client := range clients {
			if n := stored(t, r.servers["c"], client); n != 1+callers*each/2 {
				t.Errorf("%s has %d, want %d", client, n, 1+callers*each/2)
			}
		}
	})
}

// TestCallersWhoLeaveSpeakAgainstNoServer, whatever they asked, of a server that
// is not quick enough for them.
func TestCallersWhoLeaveSpeakAgainstNoServer(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		r := newReshardingOf(t, ShardOptions{NoPipelining: plain, PoolSize: 2})
		before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
		client := moving(before, after, 1)[0]
		must(t, before.Charge(t.Context(), ask(client))[0].Err)
		was := r.servers[before.Owner(client)]
		must(t, was.Pause())
		for i := range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%4)*5*time.Millisecond)
			if i%5 == 0 {
				cancel()
			}
			for name, call := range map[string]func(context.Context, []store.Request) []store.State{
				"check": before.Check, "take": before.Take, "charge": before.Charge, "moved check": after.Check, "moved charge": after.Charge,
			} {
				if err := call(ctx, ask(client))[0].Err; err == nil {
					t.Errorf("%s: a server that stands still has answered", name)
				} else if errors.Is(err, ErrShardDown) {
					t.Errorf("%s: %v", name, err)
				}
			}
			cancel()
		}
		must(t, was.Resume())
		must(t, before.Check(t.Context(), ask(client))[0].Err)
		must(t, after.Check(t.Context(), ask(client))[0].Err)
		for _, m := range r.members {
			for _, l := range m.Shard.topology.Load().lanes() {
				if counts := l.breaker.Counts(); counts.TotalFailures > 0 {
					t.Errorf("%d failures are counted against %s", counts.TotalFailures, l.addr)
				}
			}
		}
	})
}

var _ = goredis.Nil
var _ = redistest.Start
