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

// TestRefusedChargeDelaysNoOther of its pipeline or after it: a server that is full
// refuses to open a window, and answers where nothing is to be written.
func TestRefusedChargeDelaysNoOther(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const good = 50
		server := redistest.Start(t)
		shard := newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: plain, PoolSize: 1})
		s := newStore(t, shard, nil)
		must(t, s.Charge(t.Context(), ask("probe"))[0].Err)
		must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].refuse...).Err())

		reqs := []store.Request{{Limit: hourly, ClientKey: "refused", Events: 10, Cost: 1}}
		for i := range good {
			reqs = append(reqs, store.Request{Limit: freeOfCharge, ClientKey: fmt.Sprint("good", i), Events: 10, Cost: 0})
		}
		refused, answered := make(chan store.State, 1), make(chan store.State, 2*good)
		report := func(i int, st store.State) {
			if i == 0 {
				refused <- st
			} else {
				answered <- st
			}
		}
		s.ChargeReported(reqs, report)
		// These come later, and there is one connection.
		s.ChargeReported(reqs[1:], func(i int, st store.State) { report(i+1, st) })
		for range 2 * good {
			select {
			case st := <-answered:
				must(t, st.Err)
			case st := <-refused:
				t.Fatalf("the charge that is refused ends before others that are not: %v", st.Err)
			}
		}
		must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].mend...).Err())
		must(t, (<-refused).Err)
		waitForCount(t, server, "refused", 1)
	})
}

// freeOfCharge is a limit under which a charge of nothing writes nothing.
var freeOfCharge = &store.Limit{Zone: "free", Algorithm: store.GCRA, Window: time.Hour}

// TestRefusedChargeIsGivenUpAtItsDeadline, however long others go on.
func TestRefusedChargeIsGivenUpAtItsDeadline(t *testing.T) {
	server := redistest.Start(t)
	shard := newShard(t, ShardOptions{Primary: server.Addr()})
	s := newStore(t, shard, func(o *Options) { o.ChargeTimeout = 200 * time.Millisecond })
	must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].refuse...).Err())
	told := make(chan error, 1)
	s.opts.OnUndelivered = func(_ string, _ algorithm.Operation, err error) { told <- err }
	s.ChargeDetached(ask("k"))
	if err := <-told; !errors.Is(err, store.ErrNotExecuted) || KindOf(err) != KindMemory {
		t.Errorf("error is %v, want that of a charge that did not run", err)
	}
}

// TestFullServerRefusesWhatAdds, whatever the algorithm, but for leases: these are
// few, and have to be renewed.
func TestFullServerRefusesWhatAdds(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	s.Warm(t.Context())
	must(t, server.Client().Do(t.Context(), serverRefusals["OOM"].refuse...).Err())
	for _, algorithm := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA, store.Concurrency} {
		limit := &store.Limit{Zone: "full", Algorithm: algorithm, Window: time.Hour}
		err := s.Take(t.Context(), []store.Request{{Limit: limit, ClientKey: "k", Events: 10, Cost: 1, ID: "id"}})[0].Err
		if algorithm == store.Concurrency {
			must(t, err)
		} else if KindOf(err) != KindMemory || !errors.Is(err, store.ErrNotExecuted) {
			t.Errorf("take of %s: error %v, want that it did not run", algorithm, err)
		}
	}
}
