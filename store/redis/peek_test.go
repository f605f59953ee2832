package redis

import (
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// TestPeekChangesNothing, and tells what is in a bucket, with replicas and
// without.
func TestPeekChangesNothing(t *testing.T) {
	for _, replicas := range []int{0, 1} {
		sh := redistest.StartShard(t, replicas)
		s := newStore(t, shardOf(t, sh), nil)
		client := sh.Primary.Client()
		for n, limit := range storetest.Limits {
			limit.Zone, limit.Window = fmt.Sprint("peek", n), time.Hour
			r := []store.Request{{Limit: &limit, ClientKey: "k", Events: 10, Cost: 1, ID: "id"}}
			before, err := client.DBSize(t.Context()).Result()
			must(t, err)
			if st := s.Peek(t.Context(), r)[0]; st.Err != nil || st.Used != 0 {
				t.Errorf("%s: a bucket that there is not: %+v", limit.Algorithm, st)
			}
			if after, err := client.DBSize(t.Context()).Result(); err != nil || after != before {
				t.Errorf("%s: %d keys, were %d, %v", limit.Algorithm, after, before, err)
			}
			must(t, s.Take(t.Context(), r)[0].Err)
			must(t, sh.WaitReplicated(t.Context()))
			if st := s.Peek(t.Context(), r)[0]; st.Err != nil || st.Used != 1 {
				t.Errorf("%s: one is used: %+v", limit.Algorithm, st)
			}
		}
	}
}

// TestPeekAsksThePrimaryForAReplica that is away.
func TestPeekAsksThePrimaryForAReplica(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, s.Charge(t.Context(), ask("k"))[0].Err)
	must(t, sh.Replicas[0].Kill())
	if st := s.Peek(t.Context(), ask("k"))[0]; st.Err != nil || st.Used != 1 {
		t.Errorf("%+v", st)
	}
}

// TestPeekOpensNothingForTheClock: where the primary's time was not told for
// long, a check has it told by opening its window, and a peek does not.
func TestPeekOpensNothingForTheClock(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	must(t, s.Charge(t.Context(), ask("other"))[0].Err)
	must(t, sh.WaitReplicated(t.Context()))
	clock := s.ownerOf("k").servers.clock
	age := func() {
		clock.mu.Lock()
		defer clock.mu.Unlock()
		clock.start = clock.start.Add(-2 * clockTrust)
		clock.offset -= (2 * clockTrust).Microseconds()
		clock.previous = clock.offset
	}
	keys := func() int64 {
		n, err := sh.Primary.Client().DBSize(t.Context()).Result()
		must(t, err)
		return n
	}
	before := keys()
	age()
	if st := s.Peek(t.Context(), ask("k"))[0]; st.Err != nil || st.Used != 0 {
		t.Errorf("%+v", st)
	}
	// What the peek sent is in line before this.
	r := ask("other")
	r[0].Primary = true
	must(t, s.Check(t.Context(), r)[0].Err)
	if after := keys(); after != before {
		t.Errorf("%d keys, were %d", after, before)
	}
	age()
	must(t, s.Check(t.Context(), ask("other"))[0].Err)
	eventually(t, "the clock is told", func() error {
		if _, age, _ := clock.estimate(time.Now()); age > clockTrust {
			return fmt.Errorf("it is %v old", age)
		}
		return nil
	})
}
