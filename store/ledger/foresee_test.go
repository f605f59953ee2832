package ledger

import (
	"context"
	"math/rand/v2"
	"reflect"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// word is what the primary says about a bucket.
func (s *simulation) word(r store.Request) store.State { return s.wordIn(r, 0) }

// wordIn is what it says a while later, if nothing is spent.
func (s *simulation) wordIn(r store.Request, d time.Duration) store.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return algorithm.Peek.Run(bucketIn(s.primary, &r), &r, s.now()+d.Microseconds())
}

// TestForesee tells what Admit answers then, with requests in flight and charges
// that wait, and changes nothing.
func TestForesee(t *testing.T) {
	for _, kind := range kinds {
		if kind.Algorithm == store.Concurrency {
			continue // it takes
		}
		for seed := range uint64(50) {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(seed)
				l := New(NewBooks(nil), s, Options{})
				defer l.Leave()
				rng := rand.New(rand.NewPCG(seed, 2))
				limit := kind
				limit.Zone, limit.Window = "zone", time.Minute
				var held []store.Request
				for n := range 40 {
					r := store.Request{Limit: &limit, ClientKey: "alice", Events: 10, Cost: 1 + rng.Int64N(3), ID: strconv.Itoa(n)}
					before, asked := l.snapshot(&r), [2]int{s.checks, s.writes}
					told := l.Foresee(r, false, s.word)
					if after := l.snapshot(&r); !reflect.DeepEqual(before, after) || asked != [2]int{s.checks, s.writes} {
						t.Fatalf("%s, seed %d: %+v became %+v", limit.Algorithm, seed, before, after)
					}
					// Events that come back while Admit asks cannot be foretold.
					isStill := s.word(r).Used == s.wordIn(r, 10*time.Millisecond).Used
					st := admit(l, r)
					if differs := told.Allowed != st.Allowed || told.InFlight != st.InFlight || told.Used != st.Used || told.Remaining != st.Remaining; differs && isStill {
						t.Fatalf("%s, seed %d, step %d: foretold is %+v, and it is %+v", limit.Algorithm, seed, n, told, st)
					}
					if st.Allowed {
						held = append(held, r)
					}
					if len(held) > 0 && rng.IntN(2) == 0 {
						l.Settle(held[:1], []int64{held[0].Cost})
						held = held[1:]
					}
					// Until what was charged has arrived.
					time.Sleep(10*time.Millisecond + time.Duration(rng.IntN(3000))*time.Millisecond)
				}
				for _, r := range held {
					l.Settle([]store.Request{r}, []int64{r.Cost})
				}
				time.Sleep(time.Second)
			})
		}
	}
}

// snapshot is what is known of a bucket.
func (l *Ledger) snapshot(r *store.Request) any {
	e := l.find(r)
	if e == nil {
		return nil
	}
	defer e.page.mu.Unlock()
	return [...]any{e.known, e.clock, e.trusted, e.confirmed, e.alone, e.failed, e.asked, e.until, e.flight, e.loose, e.silent, e.doubted, e.debts == nil}
}

// TestForeseeOfTake knows refusals and what was taken in advance.
func TestForeseeOfTake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		r := requestOf("alice", 10)
		r.Batch = 4
		take := func() store.State { return l.Take(t.Context(), []store.Request{r})[0] }
		for n := range 12 {
			told := l.Foresee(r, true, s.word)
			if st := take(); told.Err != nil || told.Allowed != st.Allowed {
				t.Errorf("request %d: foretold is %+v, and it is %+v", n, told, st)
			}
		}
		writes := s.writes
		if told := l.Foresee(r, true, func(store.Request) store.State { return store.State{Err: store.ErrNotExecuted} }); told.Allowed || told.Err != nil {
			t.Errorf("a refusal that is known is not told: %+v", told)
		}
		if s.writes != writes {
			t.Error("the store was written to")
		}
		// Until what is left was given back.
		time.Sleep(time.Hour)
		l.Leave()
	})
}

// TestForeseeLocal counts what is in flight, and holds nothing.
func TestForeseeLocal(t *testing.T) {
	m := memory.New(memory.NewBuckets(), memory.Options{})
	flights := NewFlights()
	l := NewLocal(flights, m)
	r := requestOf("alice", 2)
	word := func(r store.Request) store.State { return m.Peek(context.Background(), []store.Request{r})[0] }
	for n, wanted := range []bool{true, true, false} {
		for range 3 {
			if st := l.Foresee(r, false, word); st.Allowed != wanted || st.Used != int64(n) || st.InFlight != !wanted {
				t.Errorf("with %d in flight: %+v", n, st)
			}
		}
		admit(l, r)
	}
	if n := flights.Figures().InFlight; n != 2 {
		t.Errorf("%d are in flight", n)
	}
	if st := l.Foresee(r, true, word); !st.Allowed || st.Used != 0 {
		t.Errorf("a take: %+v", st)
	}
	if other := requestOf("bob", 2); flights.held(&other) != 0 || flights.Len() != 1 {
		t.Error("a flight was made")
	}
}
