package ledger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

var minutely = store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Minute}

func requestOf(client string, events int64) store.Request {
	return store.Request{Limit: &minutely, ClientKey: client, Events: events, Cost: 1, ID: client}
}

// admitter is a ledger, or flights.
type admitter interface {
	Admit(ctx context.Context, reqs []store.Request, states []store.State)
}

func admit(l admitter, r store.Request) store.State {
	var states [1]store.State
	l.Admit(context.Background(), []store.Request{r}, states[:])
	return states[0]
}

func admitAll(l *Ledger, reqs []store.Request) []store.State {
	states := make([]store.State, len(reqs))
	l.Admit(context.Background(), reqs, states)
	return states
}

func takeAll(l *Ledger, reqs []store.Request) []store.State {
	return l.Take(context.Background(), reqs)
}

// TestQuestionsAreShared: of many that come at once, one asks, and the others
// ask together once it has its answer.
func TestQuestionsAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		var wg sync.WaitGroup
		admitted := make([]bool, 100)
		for i := range admitted {
			wg.Go(func() { admitted[i] = admit(l, requestOf("alice", 60)).Allowed })
		}
		wg.Wait()
		n := 0
		for _, ok := range admitted {
			if ok {
				n++
			}
		}
		if n != 60 {
			t.Errorf("admitted %d of 60", n)
		}
		if s.checks != 2 {
			t.Errorf("the store was asked %d times, want twice", s.checks)
		}
		l.Leave()
	})
}

// TestFullBucketIsAskedAboutOnceASecond, however many requests there are.
func TestFullBucketIsAskedAboutOnceASecond(t *testing.T) {
	for _, kind := range kinds {
		for _, op := range []algorithm.Operation{algorithm.Check, algorithm.Take} {
			synctest.Test(t, func(t *testing.T) {
				s := newSimulation(1)
				l := New(NewBooks(nil), s, Options{})
				limit := kind
				limit.Zone, limit.Window = "zone", time.Hour
				r := store.Request{Limit: &limit, ClientKey: "alice", Events: 5, Cost: 1, ID: "id"}
				s.others(algorithm.Charge, store.Request{Limit: &limit, ClientKey: "alice", Events: 5, Cost: 5, ID: "other"})
				ask := admitAll
				if op == algorithm.Take {
					ask = takeAll
				}
				for range 10_000 {
					st := ask(l, []store.Request{r})[0]
					if st.Err != nil || st.Allowed || st.Used != 5 || st.RetryAfter <= 0 {
						t.Fatalf("%s, %s: %+v", limit.Algorithm, op, st)
					}
					time.Sleep(time.Millisecond)
				}
				// Ten seconds have passed.
				if asked := s.checks + s.writes; asked < 9 || asked > 12 {
					t.Errorf("%s, %s: asked %d times in 10 s", limit.Algorithm, op, asked)
				}
				l.Leave()
			})
		}
	}
}

// TestSecondZoneIsNotAsked where the first is known to refuse.
func TestSecondZoneIsNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		full, free := requestOf("full", 1), requestOf("free", 100)
		full.Limit = &store.Limit{Zone: "other", Algorithm: store.FixedWindow, Window: time.Minute}
		s.others(algorithm.Charge, full)
		// A replica says so, and then the primary.
		admit(l, full)
		admit(l, full)
		asked := s.checks
		for _, ask := range []func(*Ledger, []store.Request) []store.State{admitAll, takeAll} {
			states := ask(l, []store.Request{free, full})
			if states[0] != (store.State{}) || states[1].Allowed || states[1].Now == 0 {
				t.Errorf("states %+v", states)
			}
		}
		if s.checks != asked || s.writes != 0 {
			t.Errorf("asked %d times more, written %d times", s.checks-asked, s.writes)
		}
		l.Leave()
	})
}

// TestWordsHeardMeanwhileStay: what the primary says while a charge is on its
// way is not forgotten for the charge's reply, which may be older.
func TestWordsHeardMeanwhileStay(t *testing.T) {
	const now = 1_000_000
	word := func(used int64) *store.State {
		return &store.State{Now: now, Content: store.Content{used, 2 * now}}
	}
	r := requestOf("alice", 100)
	l := &Ledger{books: NewBooks(nil), store: newSimulation(1)}
	own := l.enter(&r, 1)
	*own = entry{id: own.id, page: own.page, place: own.place}
	e := own
	e.hear(&r, word(3), 1, 1)
	own.page.mu.Unlock()
	l.settle(&r, 0, 2)
	e.hear(&r, word(7), 3, 3)
	l.conclude(e, &r, word(5))
	if used := e.known.Content[0]; used != 7 {
		t.Errorf("known is %d, want the 7 that the primary had said", used)
	}
	// And from then on the reply to a charge that was sent later counts.
	l.settle(&r, 0, 4)
	l.conclude(e, &r, word(6))
	if used := e.known.Content[0]; used != 6 {
		t.Errorf("known is %d, want the 6 of the last word", used)
	}
}

// TestWaitingCountsBesideOthers: what waits to be sent counts on top of what
// other processes have spent.
func TestWaitingCountsBesideOthers(t *testing.T) {
	r := requestOf("alice", 100)
	e := &entry{known: algorithm.Known{Content: store.Content{9, 100}}}
	e.debts = &debts{base: algorithm.Known{Content: store.Content{3, 100}}, sent: true, sentCost: 2, waiting: &debt{req: store.Request{Cost: 4}}}
	v := e.viewOf(&r, nil, 50)
	if st := v.ahead(0); st.Used != 9+4 {
		t.Errorf("used is %d, want what was heard, 9, and 4 that wait", st.Used)
	}
}

// TestOutageIsMadeUpFor: what was charged while the shard was down arrives once
// it is back, merged, and is not asked about in between.
func TestOutageIsMadeUpFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		books := NewBooks(nil)
		l := New(books, s, Options{OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) { t.Errorf("%d were lost: %v", n, err) }})
		s.down = true
		const clients, each = 50, 20
		for i := range clients * each {
			r := requestOf(fmt.Sprint(i%clients), 1000)
			if st := admit(l, r); !errors.Is(st.Err, store.ErrNotExecuted) {
				t.Fatalf("answered in an outage: %+v", st)
			}
			l.ChargeDetached([]store.Request{r})
		}
		// A reload: another view on the same books.
		next := New(books, s, Options{})
		l.Leave()
		time.Sleep(30 * time.Second)
		synctest.Wait()
		s.mu.Lock()
		s.down, s.writes = false, 0
		s.mu.Unlock()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		for i := range clients {
			if used := s.used(requestOf(fmt.Sprint(i), 1000)); used != each {
				t.Errorf("client %d: %d are charged, want %d", i, used, each)
			}
		}
		if s.writes > clients {
			t.Errorf("%d calls for %d buckets", s.writes, clients)
		}
		if next.Owes() {
			t.Error("something is still owed")
		}
		next.Leave()
	})
}

// TestChargesExpireWithTheirWindow, and are reported.
func TestChargesExpireWithTheirWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		var expired int64
		l := New(NewBooks(nil), s, Options{OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) {
			if !errors.Is(err, ErrExpired) {
				t.Errorf("%d were lost: %v", n, err)
			}
			expired += n
		}})
		s.down = true
		for range 3 {
			l.ChargeDetached([]store.Request{requestOf("alice", 1000)})
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		s.mu.Lock()
		s.down = false
		s.mu.Unlock()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if used := s.used(requestOf("alice", 1000)); used != 0 || expired != 3 {
			t.Errorf("%d are charged, %d have expired, want none and 3", used, expired)
		}
		l.Leave()
	})
}

// TestWhatIsLeftAtTheEndIsReported.
func TestWhatIsLeftAtTheEndIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		lost := int64(0)
		l := New(NewBooks(nil), s, Options{OnUndelivered: func(shard string, _ algorithm.Operation, n int64, err error) {
			if shard != "shard" || !errors.Is(err, store.ErrNotExecuted) {
				t.Errorf("%d of shard %s were lost: %v", n, shard, err)
			}
			lost += n
		}})
		s.down = true
		for i := range 10 {
			l.ChargeDetached([]store.Request{requestOf(fmt.Sprint(i%2), 1000)})
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		l.Flush(ctx)
		l.Leave()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if lost != 10 || l.Owes() {
			t.Errorf("%d are reported as lost, want 10; owes: %t", lost, l.Owes())
		}
	})
}
