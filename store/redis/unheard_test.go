package redis

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// TestReplicasStandInForAPrimaryThatWasNeverHeard: a store that is new while the
// primary is away refuses whom the replica shows to be over the limit, whatever
// the algorithm.
func TestReplicasStandInForAPrimaryThatWasNeverHeard(t *testing.T) {
	for name, away := range map[string]func(*redistest.Server) error{
		"killed": (*redistest.Server).Kill,
		"silent": (*redistest.Server).Pause,
	} {
		t.Run(name, func(t *testing.T) {
			sh := redistest.StartShard(t, 1)
			before := newStore(t, shardOf(t, sh), nil)
			full := func(client string) (reqs []store.Request) {
				for i := range storetest.Limits {
					limit := storetest.Limits[i]
					limit.Zone, limit.Window = fmt.Sprint("zone-", i), time.Hour
					reqs = append(reqs, store.Request{Limit: &limit, ClientKey: client, Events: 3, Cost: 1, ID: fmt.Sprintf("%011d", i)})
				}
				return reqs
			}
			reqs := full("k")
			for n := range 3 {
				for i := range reqs {
					reqs[i].ID = fmt.Sprintf("%05d%06d", n, i)
				}
				for _, st := range before.Charge(t.Context(), reqs) {
					must(t, st.Err)
				}
			}
			must(t, sh.WaitReplicated(t.Context()))
			must(t, away(sh.Primary))
			if name == "silent" {
				t.Cleanup(func() { must(t, sh.Primary.Resume()) })
			}

			// Of a check half is for the primary.
			after := newStore(t, shardOf(t, sh), func(o *Options) { o.CheckTimeout = 10 * time.Second })
			for i, st := range after.Check(t.Context(), reqs) {
				if st.Err != nil || st.Allowed || st.Used != 3 || !st.Replica || st.Now == 0 {
					t.Errorf("check of %s: %+v", reqs[i].Limit.Algorithm, st)
				}
			}
			for i, st := range after.Peek(t.Context(), reqs) {
				if st.Err != nil || st.Used != 3 || !st.Replica {
					t.Errorf("peek of %s: %+v", reqs[i].Limit.Algorithm, st)
				}
			}
			for i, copied := range after.Inspect(t.Context(), reqs[0]).Copies {
				if i == 1 && (copied.State.Err != nil || copied.State.Used != 3) {
					t.Errorf("inspection of the replica: %+v", copied)
				}
			}
			// Only the primary opens a window, and takes.
			if st := after.Check(t.Context(), full("another")[:1])[0]; st.Err == nil {
				t.Errorf("check of a window that is not open: %+v", st)
			}
			if _, _, ok := after.shards[0].owner(0).clock.estimate(time.Now()); ok {
				t.Error("a replica's clock passes for the primary's")
			}
		})
	}
}

// TestWindowThatIsOverRefusesNobodyWhileThePrimaryWasNeverHeard: by the replica's
// own clock it ends.
func TestWindowThatIsOverRefusesNobodyWhileThePrimaryWasNeverHeard(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	limit := &store.Limit{Zone: "short", Algorithm: store.FixedWindow, Window: 2 * time.Second}
	full := []store.Request{{Limit: limit, ClientKey: "k", Events: 1, Cost: 1}}
	// The key outlives its window by a second, in which the replica has it.
	must(t, newStore(t, shardOf(t, sh), nil).Charge(t.Context(), full)[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	must(t, sh.Primary.Kill())
	s := newStore(t, shardOf(t, sh), nil)
	eventually(t, "the window is over", func() error {
		switch st := s.Check(t.Context(), full)[0]; {
		case st.Err != nil:
			return nil
		case st.Allowed || st.Now >= st.Reset:
			t.Fatalf("%+v", st)
		}
		return errors.New("it refuses")
	})
}

// TestThePrimarysClockReplacesAReplicas as soon as it is heard.
func TestThePrimarysClockReplacesAReplicas(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	must(t, newStore(t, shardOf(t, sh), nil).Charge(t.Context(), ask("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	s := newStore(t, shardOf(t, sh), nil)
	before := calls(t, sh.Replicas[0], "evalsha_ro")
	// Nothing but the primary decides who it is that has not been heard.
	if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil || st.Replica {
		t.Errorf("the first check: %+v", st)
	}
	if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil || !st.Replica {
		t.Errorf("the second check: %+v", st)
	}
	if n := calls(t, sh.Replicas[0], "evalsha_ro"); n != before {
		t.Errorf("the replica was asked by its own clock %d times", n-before)
	}
}
