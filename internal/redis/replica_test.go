package redis

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func calls(t *testing.T, server *redistest.Server, command string) int64 {
	t.Helper()
	all, err := server.Calls()
	must(t, err)
	return all[command]
}

func TestChecksGoToReplicasInTurn(t *testing.T) {
	const checks = 100
	sh := redistest.StartShard(t, 2)
	s := newStore(t, shardOf(t, sh), nil)
	// This opens the window and reveals the primary's time.
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	opened := calls(t, sh.Primary, "evalsha")
	for range checks {
		used(t, "check", store.Answers(t.Context(), s.Check, oneOf("k"))[0], 1)
	}
	if n := calls(t, sh.Primary, "evalsha"); n != opened {
		t.Errorf("the primary was asked %d times", n-opened)
	}
	for i, r := range sh.Replicas {
		if n := calls(t, r, "hmget"); n != checks/2 {
			t.Errorf("replica %d was asked %d times, want %d", i, n, checks/2)
		}
	}
}

func TestPrimaryStandsInForReplicas(t *testing.T) {
	sh := redistest.StartShard(t, 2)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	for _, r := range sh.Replicas {
		must(t, r.Kill())
	}
	for i := range 50 {
		used(t, fmt.Sprint("check ", i), store.Answers(t.Context(), s.Check, oneOf("k"))[0], 1)
	}
}

func TestReplicasAnswerWhileThePrimaryIsAway(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	must(t, sh.Primary.Kill())
	for i := range 20 {
		used(t, fmt.Sprint("check ", i), store.Answers(t.Context(), s.Check, oneOf("k"))[0], 1)
	}
}

// TestStaleReplicaIsJudgedByItsReset: a replica that still shows a full window after
// its reset refuses no request; the primary opens the next window.
func TestStaleReplicaIsJudgedByItsReset(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	for refusals, try := 0, 0; refusals == 0; try++ {
		// On a busy machine the window may end before the first check.
		full := oneOf(fmt.Sprint("k", try))
		full[0].Events = 1
		must(t, store.Answers(t.Context(), s.Charge, full)[0].Err)
		reset := endsIn(t, s, sh.Primary, full[0], 2*time.Second)
		must(t, sh.WaitReplicated(t.Context()))
		must(t, sh.Replicas[0].PauseReplication())
		eventually(t, "the window is over", func() error {
			st := store.Answers(t.Context(), s.Check, full)[0]
			switch {
			case st.Err != nil:
				t.Fatal(st.Err)
			case st.Allowed && st.Reset == reset:
				t.Fatalf("allowed in the full window: %+v", st)
			case !st.Allowed && (st.Reset != reset || st.RetryAfter <= 0):
				t.Fatalf("refused by another window: %+v", st)
			case !st.Allowed:
				refusals++
				return fmt.Errorf("refused %d times", refusals)
			case st.Used != 0 || st.Remaining != 1 || st.Reset < reset+hourly.Window.Microseconds():
				t.Fatalf("the new window is %+v after %d", st, reset)
			}
			return nil
		})
		must(t, sh.Replicas[0].ResumeReplication())
	}
}

// TestReplicasStandInBeforeThePrimaryAnswers: a store that starts while the
// primary is away refuses clients that are over the limit at the replica, under every
// algorithm.
func TestReplicasStandInBeforeThePrimaryAnswers(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]func(*redistest.Server) error{
		"killed": (*redistest.Server).Kill,
		"silent": (*redistest.Server).Pause,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sh := redistest.StartShard(t, 1)
			before := newStore(t, shardOf(t, sh), nil)
			full := func(client string) (reqs []store.Request) {
				for i := range storetest.Limits {
					limit := storetest.Limits[i]
					limit.Zone, limit.Window = fmt.Sprint("zone-", i), endless
					reqs = append(reqs, store.Request{Limit: &limit, ClientKey: client, Events: 3, Cost: 1, ID: fmt.Sprintf("%011d", i)})
				}
				return reqs
			}
			reqs := full("k")
			for n := range 3 {
				for i := range reqs {
					reqs[i].ID = fmt.Sprintf("%05d%06d", n, i)
				}
				for _, st := range store.Answers(t.Context(), before.Charge, reqs) {
					must(t, st.Err)
				}
			}
			must(t, sh.WaitReplicated(t.Context()))
			must(t, away(sh.Primary))
			if name == "silent" {
				t.Cleanup(func() { must(t, sh.Primary.Resume()) })
			}

			var after *Store
			// The estimate of the primary's clock may be behind the charges, so that gcra counts
			// one more.
			eventually(t, "the replica answers the first check", func() (err error) {
				// The primary gets half of a check's timeout.
				after = newStore(t, shardOf(t, sh), func(o *Options) { o.CheckTimeout = 10 * time.Second })
				for i, st := range store.Answers(t.Context(), after.Check, reqs) {
					if st.Err != nil || st.Allowed || st.Used != 3 || !st.Replica || st.Now == 0 {
						err = errors.Join(err, fmt.Errorf("check of %s: %+v", reqs[i].Limit.Algorithm, st))
					}
				}
				return err
			})
			for i, st := range store.Answers(t.Context(), after.Peek, reqs) {
				if st.Err != nil || st.Used != 3 || !st.Replica {
					t.Errorf("peek of %s: %+v", reqs[i].Limit.Algorithm, st)
				}
			}
			eventually(t, "the replica answers an inspection in time", func() error {
				copied := after.Inspect(t.Context(), reqs[0]).Copies[1]
				if kind := store.KindOf(copied.State.Err); kind == store.KindTimeout || kind == store.KindBreaker {
					return copied.State.Err
				}
				if copied.State.Err != nil || copied.State.Used != 3 {
					t.Errorf("inspection of the replica: %+v", copied)
				}
				return nil
			})
			// Only the primary opens windows and takes.
			if st := store.Answers(t.Context(), after.Check, full("another")[:1])[0]; st.Err == nil {
				t.Errorf("check of a window that is not open: %+v", st)
			}
			if _, _, ok := after.opts.Members[0].Shard.Owner(0).Clock.Estimate(time.Now()); ok {
				t.Error("a replica's clock is taken for the primary's")
			}
		})
	}
}

// TestEndedWindowRefusesNoRequestBeforeThePrimaryAnswers: the window ends by
// the replica's own clock.
func TestEndedWindowRefusesNoRequestBeforeThePrimaryAnswers(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	limit := &store.Limit{Zone: "short", Algorithm: store.FixedWindow, Window: 2 * time.Second}
	full := []store.Request{{Limit: limit, ClientKey: "k", Events: 1, Cost: 1}}
	// The key outlives its window by a second.
	must(t, store.Answers(t.Context(), newStore(t, shardOf(t, sh), nil).Charge, full)[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	must(t, sh.Primary.Kill())
	s := newStore(t, shardOf(t, sh), nil)
	eventually(t, "the window is over", func() error {
		switch st := store.Answers(t.Context(), s.Check, full)[0]; {
		case st.Err != nil:
			return nil
		case st.Allowed || st.Now >= st.Reset:
			t.Fatalf("%+v", st)
		}
		return errors.New("it refuses")
	})
}

// TestThePrimarysClockReplacesAReplicas with the primary's first reply.
func TestThePrimarysClockReplacesAReplicas(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	must(t, store.Answers(t.Context(), newStore(t, shardOf(t, sh), nil).Charge, oneOf("k"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	s := newStore(t, shardOf(t, sh), nil)
	before := calls(t, sh.Replicas[0], "evalsha_ro")
	// Before its first reply the primary itself answers.
	if st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]; st.Err != nil || st.Replica {
		t.Errorf("the first check: %+v", st)
	}
	if st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]; st.Err != nil || !st.Replica {
		t.Errorf("the second check: %+v", st)
	}
	if n := calls(t, sh.Replicas[0], "evalsha_ro"); n != before {
		t.Errorf("the replica was asked %d times by its own clock", n-before)
	}
}

// TestPeekChangesNothing and returns the content of a bucket, with and without
// replicas.
func TestPeekChangesNothing(t *testing.T) {
	for _, replicas := range []int{0, 1} {
		sh := redistest.StartShard(t, replicas)
		s := newStore(t, shardOf(t, sh), nil)
		client := sh.Primary.Client()
		for n, limit := range storetest.Limits {
			limit.Zone, limit.Window = fmt.Sprint("peek", n), endless
			r := []store.Request{{Limit: &limit, ClientKey: "k", Events: 10, Cost: 1, ID: "id"}}
			before, err := client.DBSize(t.Context()).Result()
			must(t, err)
			used(t, fmt.Sprint(limit.Algorithm, ": a missing bucket"), store.Answers(t.Context(), s.Peek, r)[0], 0)
			if after, err := client.DBSize(t.Context()).Result(); err != nil || after != before {
				t.Errorf("%s: %d keys, were %d, %v", limit.Algorithm, after, before, err)
			}
			must(t, store.Answers(t.Context(), s.Take, r)[0].Err)
			must(t, sh.WaitReplicated(t.Context()))
			used(t, fmt.Sprint(limit.Algorithm, ": after a charge"), store.Answers(t.Context(), s.Peek, r)[0], 1)
		}
	}
}

// TestPeekAsksThePrimaryForAReplica that does not answer.
func TestPeekAsksThePrimaryForAReplica(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	must(t, sh.Replicas[0].Kill())
	used(t, "peek", store.Answers(t.Context(), s.Peek, oneOf("k"))[0], 1)
}

// TestPeekOpensNothingForTheClock: a check renews an old estimate of the primary's time
// by opening its window; a peek does not.
func TestPeekOpensNothingForTheClock(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("other"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	clock := s.serversOf(&store.Request{ClientKey: "k"}).Clock
	age := func() {
		mu, start, offset := hidden[sync.Mutex](clock, "mu"), hidden[time.Time](clock, "start"), hidden[int64](clock, "offset")
		mu.Lock()
		defer mu.Unlock()
		*start = start.Add(-2 * wire.ClockTrust)
		*offset -= (2 * wire.ClockTrust).Microseconds()
		*hidden[int64](clock, "previous") = *offset
	}
	keys := func() int64 {
		n, err := sh.Primary.Client().DBSize(t.Context()).Result()
		must(t, err)
		return n
	}
	before := keys()
	age()
	used(t, "peek", store.Answers(t.Context(), s.Peek, oneOf("k"))[0], 0)
	// This is queued behind the calls of the peek.
	r := oneOf("other")
	r[0].Primary = true
	must(t, store.Answers(t.Context(), s.Check, r)[0].Err)
	if after := keys(); after != before {
		t.Errorf("%d keys, were %d", after, before)
	}
	age()
	must(t, store.Answers(t.Context(), s.Check, oneOf("other"))[0].Err)
	eventually(t, "the clock is renewed", func() error {
		if _, age, _ := clock.Estimate(time.Now()); age > wire.ClockTrust {
			return fmt.Errorf("it is %v old", age)
		}
		return nil
	})
}
