package redis

import (
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
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
	// Opens the window, and tells the primary's time.
	if st := s.Charge(t.Context(), ask("k"))[0]; st.Err != nil {
		t.Fatal(st.Err)
	}
	must(t, sh.WaitReplicated(t.Context()))
	opened := calls(t, sh.Primary, "evalsha")
	for range checks {
		if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil || st.Used != 1 {
			t.Fatalf("check: %+v", st)
		}
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
	if st := s.Charge(t.Context(), ask("k"))[0]; st.Err != nil {
		t.Fatal(st.Err)
	}
	for _, r := range sh.Replicas {
		must(t, r.Kill())
	}
	for i := range 50 {
		if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil || st.Used != 1 {
			t.Fatalf("check %d: %+v", i, st)
		}
	}
}

func TestReplicasAnswerWhileThePrimaryIsAway(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	if st := s.Charge(t.Context(), ask("k"))[0]; st.Err != nil {
		t.Fatal(st.Err)
	}
	must(t, sh.WaitReplicated(t.Context()))
	must(t, sh.Primary.Kill())
	for i := range 20 {
		if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil || st.Used != 1 {
			t.Fatalf("check %d: %+v", i, st)
		}
	}
}

func TestReadFromPrimaryLeavesReplicasAlone(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), func(o *Options) { o.ReadPrimary = true })
	for range 10 {
		if st := s.Check(t.Context(), ask("k"))[0]; st.Err != nil {
			t.Fatal(st.Err)
		}
	}
	if n := calls(t, sh.Replicas[0], "hmget"); n != 0 {
		t.Errorf("the replica was asked %d times", n)
	}
}

// TestStaleReplicaIsJudgedByItsReset: a replica that still shows a closed
// window, full, refuses nobody; the primary opens the next one.
func TestStaleReplicaIsJudgedByItsReset(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	for refusals, try := 0, 0; refusals == 0; try++ {
		// On a busy machine the window may end before anybody asks.
		full := ask(fmt.Sprint("k", try))
		full[0].Events = 1
		must(t, s.Charge(t.Context(), full)[0].Err)
		reset := endsIn(t, s, sh.Primary, full[0], 2*time.Second)
		must(t, sh.WaitReplicated(t.Context()))
		must(t, sh.Replicas[0].PauseReplication())
		eventually(t, "the window is over", func() error {
			st := s.Check(t.Context(), full)[0]
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
