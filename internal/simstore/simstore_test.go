//go:build check

package simstore_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/simredis"
	"github.com/shardlimit/caddy-shardlimit/internal/simstore"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

var epoch = time.UnixMilli(1_800_000_000_000)

// world is a primary and its replica, by one clock.
type world struct {
	now              time.Time
	servers          [2]*simredis.Server
	primary, replica *simstore.Server
}

func newWorld() *world {
	w, interpreter := &world{now: epoch}, simredis.NewInterpreter()
	for i := range w.servers {
		w.servers[i] = simredis.New(func() time.Time { return w.now }, interpreter)
	}
	w.servers[1].ReplicaOf(w.servers[0])
	w.primary, w.replica = simstore.New(w.servers[0].Do), simstore.New(w.servers[1].Do)
	return w
}

func (w *world) micros() int64 { return w.now.UnixMicro() }

// TestServersAnswerAsTheAlgorithms runs operations by the server's own clock, which is ahead.
// The replica has what it was sent.
func TestServersAnswerAsTheAlgorithms(t *testing.T) {
	for n, limit := range storetest.Limits {
		limit.Zone = fmt.Sprint("zone", n)
		w, bucket, rng := newWorld(), algorithm.New(&limit), rand.New(rand.NewPCG(1, 2))
		w.servers[0].Ahead = time.Minute
		until := int64(0)
		for i := range 500 {
			w.now = w.now.Add(time.Duration(rng.Int64N(int64(limit.Window / 4))).Truncate(time.Microsecond))
			r := store.Request{Limit: &limit, ClientKey: "k", Events: 10, Cost: 1 + rng.Int64N(3), ID: fmt.Sprint(i), Until: until}
			op := []algorithm.Operation{algorithm.Check, algorithm.Charge, algorithm.Take}[rng.IntN(3)]
			now := w.micros() + time.Minute.Microseconds()
			got, want := w.primary.Run(op, r), op.Run(bucket, &r, now)
			if got != want {
				t.Fatalf("%v %v, step %d, %v: %+v, want %+v", limit.Algorithm, limit.Align, i, op, got, want)
			}
			// Checks do not store an aligned window.
			if until = 0; want.Used > 0 {
				until = want.Reset
			}
			w.servers[1].Apply(w.now)
			want = bucket.View(&r, now, false)
			want.Replica = true
			if got = w.replica.Look(r, store.RoleReplica, now); got != want {
				t.Fatalf("%v %v, step %d, at the replica: %+v, want %+v", limit.Algorithm, limit.Align, i, got, want)
			}
		}
		if limit.Algorithm == store.FixedWindow && w.primary.Plain < 100 {
			t.Errorf("%d charges did without a script", w.primary.Plain)
		}
	}
}

// TestMissedWindowIsRepaired charges a window of which the promoted server knows nothing, or
// that was emptied.
func TestMissedWindowIsRepaired(t *testing.T) {
	w := newWorld()
	limit := store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Hour}
	r := store.Request{Limit: &limit, ClientKey: "k", Events: 10, Cost: 3}
	r.Until = w.primary.Run(algorithm.Charge, r).Reset
	for _, lose := range []func(){
		func() {
			if err := w.primary.Empty(r); err != nil {
				t.Error(err)
			}
		},
		func() {
			w.servers[1].Promote()
			w.primary = w.replica
		},
	} {
		lose()
		before := w.primary.Plain
		st := w.primary.Run(algorithm.Charge, r)
		if st.Err != nil || st.Used != 3 || st.Reset <= w.micros() || w.primary.Plain != before+1 {
			t.Errorf("a plain charge of no window is %+v", st)
		}
		if st = w.primary.Look(r, store.RolePrimary, w.micros()); st.Used != 3 {
			t.Errorf("afterwards the bucket is %+v", st)
		}
	}
}
