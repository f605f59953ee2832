package redis

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// counting are the algorithms that count events.
var counting = []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA}

// ofEach has one request for each algorithm that counts, under an ID.
func ofEach(clientKey string, id int) (reqs []store.Request) {
	for _, name := range counting {
		limit := &store.Limit{Zone: "lost", Algorithm: name, Window: 10000 * time.Hour}
		reqs = append(reqs, store.Request{Limit: limit, ClientKey: clientKey, Events: 10, Cost: 1, ID: fmt.Sprintf("%011d", id)})
	}
	return reqs
}

// TestLostRepliesOfTakesAndRefunds: neither is sent again when its reply does not
// arrive, and both are reported as uncertain.
func TestLostRepliesOfTakesAndRefunds(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		server := redistest.Start(t)
		proxy := redistest.StartProxy(t, server.Addr())
		told := make(chan error, len(counting))
		shard := newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: plain, PoolSize: 1})
		patient := newStore(t, shard, nil)
		s := newStore(t, shard, func(o *Options) {
			o.CheckTimeout, o.ChargeTimeout = 300*time.Millisecond, 300*time.Millisecond
			o.OnUndelivered = func(_ string, op algorithm.Operation, err error) {
				if op != algorithm.Refund || !errors.Is(err, store.ErrUncertain) {
					err = fmt.Errorf("%v ends with %w, want a refund whose outcome is unknown", op, err)
				} else {
					err = nil
				}
				told <- err
			}
		})
		// reachable waits until both ways to the server are open.
		reachable := func() {
			other := ofEach("other", 0)
			eventually(t, "the server is reached", func() error {
				return errors.Join(patient.Check(t.Context(), other)[0].Err, patient.Charge(t.Context(), other)[0].Err)
			})
		}
		direct := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: plain, PoolSize: 1}), nil)
		used := func(what string, n int64) {
			t.Helper()
			for i, st := range direct.Check(t.Context(), ofEach("k", 0)) {
				if st.Err != nil || st.Used != n {
					t.Fatalf("%s, %s: used is %d, want %d; error %v", what, counting[i], st.Used, n, st.Err)
				}
			}
		}
		reachable()
		var taken []store.Request
		for id := range 3 {
			taken = ofEach("k", id)
			for i, st := range patient.Take(t.Context(), taken) {
				must(t, st.Err)
				taken[i].Receipt = st.Receipt
			}
		}

		must(t, proxy.SwallowReplies())
		for i, st := range s.Take(t.Context(), ofEach("k", 3)) {
			if !errors.Is(st.Err, store.ErrUncertain) {
				t.Fatalf("take, %s: error is %v, want an unknown outcome", counting[i], st.Err)
			}
		}
		must(t, proxy.Pass())
		reachable()
		used("after the take", 4)

		must(t, proxy.SwallowReplies())
		s.RefundDetached(taken)
		for range counting {
			must(t, <-told)
		}
		must(t, proxy.Pass())
		reachable()
		used("after the refund", 3)
	})
}
