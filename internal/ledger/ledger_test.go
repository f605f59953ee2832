package ledger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

var minutely = store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Minute}

func requestOf(client string, events int64) store.Request {
	return store.Request{Limit: &minutely, ClientKey: client, Events: events, Cost: 1, ID: client}
}

// admitter is a Ledger or a Local.
type admitter interface {
	Admit(ctx context.Context, asks []*store.Ask)
}

func admit(l admitter, r store.Request) store.State {
	asked := store.Ask{Request: r}
	l.Admit(context.Background(), []*store.Ask{&asked})
	return asked.State
}

func admitAll(l *Ledger, reqs []store.Request) []store.State {
	return store.Answers(context.Background(), l.Admit, reqs)
}

func takeAll(l *Ledger, reqs []store.Request) []store.State {
	return store.Answers(context.Background(), l.Take, reqs)
}

// TestChecksAreCoalesced: of concurrent requests one checks, and the others share
// the next check.
func TestChecksAreCoalesced(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
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
	})
}

// TestFullBucketIsCheckedOnceASecond, however many requests there are.
func TestFullBucketIsCheckedOnceASecond(t *testing.T) {
	for _, kind := range kinds {
		for _, op := range []algorithm.Operation{algorithm.Check, algorithm.Take} {
			simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
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
					pass(time.Millisecond)
				}
				// Ten seconds have passed.
				if asked := s.checks + s.writes; asked < 9 || asked > 12 {
					t.Errorf("%s, %s: %d calls in 10 s", limit.Algorithm, op, asked)
				}
			})
		}
	}
}

// TestSecondZoneIsNotChecked if the first is known to refuse.
func TestSecondZoneIsNotChecked(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		full, free := requestOf("full", 1), requestOf("free", 100)
		full.Limit = &store.Limit{Zone: "other", Algorithm: store.FixedWindow, Window: time.Minute}
		s.others(algorithm.Charge, full)
		// First a replica refuses, then the primary.
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
			t.Errorf("%d more checks, %d writes", s.checks-asked, s.writes)
		}
	})
}

// TestChargesOfAnOutageArriveLater, merged, and without a call for each of them.
func TestChargesOfAnOutageArriveLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		registry := NewRegistry(nil)
		l := New(registry, s, Options{OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
			t.Errorf("%d charges were lost: %v", n, err)
		}})
		s.down = true
		const clients, each = 50, 20
		for i := range clients * each {
			r := requestOf(fmt.Sprint(i%clients), 1000)
			if st := admit(l, r); !errors.Is(st.Err, store.ErrNotExecuted) {
				t.Fatalf("answered in an outage: %+v", st)
			}
			l.ChargeDetached([]*store.Request{new(r)})
		}
		// A reload: another view on the same registry.
		next := New(registry, s, Options{})
		l.Leave()
		pass(30 * time.Second)
		synctest.Wait()
		s.mu.Lock()
		s.down, s.writes = false, 0
		s.mu.Unlock()
		pass(3 * time.Second)
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
			t.Error("charges are still pending")
		}
		next.Leave()
	})
}

// TestChargesExpireWithTheirWindow, and are reported.
func TestChargesExpireWithTheirWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		var expired int64
		l := New(NewRegistry(nil), s, Options{OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
			if !errors.Is(err, ErrExpired) {
				t.Errorf("%d charges were lost: %v", n, err)
			}
			expired += n
		}})
		s.down = true
		for range 3 {
			l.ChargeDetached([]*store.Request{new(requestOf("alice", 1000))})
		}
		pass(time.Minute)
		synctest.Wait()
		s.setDown(false, false)
		pass(3 * time.Second)
		synctest.Wait()
		if used := s.used(requestOf("alice", 1000)); used != 0 || expired != 3 {
			t.Errorf("%d are charged, %d have expired, want none and 3", used, expired)
		}
		l.Leave()
	})
}

// TestChargesWaitAsLongAsTheyCount, which is not the length of a window: what a burst has
// spent drains for long, a sliding window counts for another, and a window of the clock or
// of a calendar ends with it.
func TestChargesWaitAsLongAsTheyCount(t *testing.T) {
	const charges = 100
	day := store.Calendar{Unit: store.Day}
	for name, c := range map[string]struct {
		limit   store.Limit
		begins  time.Duration // after midnight
		arrives time.Duration // after an outage of that length
		expires time.Duration
		want    int64 // that many still count
	}{
		"fixed":    {store.Limit{Algorithm: store.FixedWindow, Window: time.Minute}, 0, 59 * time.Second, time.Minute, charges},
		"align":    {store.Limit{Algorithm: store.FixedWindow, Window: time.Hour, Align: true}, 30 * time.Minute, 29 * time.Minute, 30 * time.Minute, charges},
		"calendar": {store.Limit{Algorithm: store.FixedWindow, Window: day.Window(), Align: true, Calendar: day}, 23 * time.Hour, 59 * time.Minute, time.Hour, charges},
		"sliding":  {store.Limit{Algorithm: store.SlidingWindow, Window: time.Minute}, 40 * time.Second, 90 * time.Second, 150 * time.Second, charges / 2},
		"gcra":     {store.Limit{Algorithm: store.GCRA, Window: time.Second}, 0, (charges - 10) * time.Second, charges * time.Second, charges},
	} {
		for _, outage := range []time.Duration{c.arrives, c.expires} {
			t.Run(fmt.Sprint(name, outage), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					pass(c.begins)
					s := newSimulation(1)
					var lost atomic.Int64
					l := New(NewRegistry(nil), s, Options{OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, _ error) { lost.Add(n) }})
					s.setDown(true, false)
					r := store.Request{Limit: &c.limit, ClientKey: "alice", Events: 1, Burst: 600, Cost: 1}
					for range charges {
						l.ChargeDetached([]*store.Request{new(r)})
					}
					pass(outage)
					s.setDown(false, false)
					// Retries are a second apart; time goes on in small steps, to see a count
					// before it drains.
					most := int64(0)
					for range 3000 {
						pass(time.Millisecond)
						most = max(most, s.used(r))
					}
					want, expired := c.want, int64(0)
					if outage == c.expires {
						want, expired = 0, charges
					}
					// Retries take up to a second, in which charges go on to count for less.
					if most > want || most < want-2 || lost.Load() != expired {
						t.Errorf("%d of %d charges have arrived, want %d; %d are lost", most, charges, want, lost.Load())
					}
					l.Leave()
				})
			})
		}
	}
}

func TestChargesLeftAtTheEndAreReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		lost := int64(0)
		l := New(NewRegistry(nil), s, Options{OnUndelivered: func(shard string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
			if shard != "shard" || !errors.Is(err, store.ErrNotExecuted) {
				t.Errorf("%d charges of shard %s were lost: %v", n, shard, err)
			}
			lost += n
		}})
		s.down = true
		for i := range 10 {
			l.ChargeDetached([]*store.Request{new(requestOf(fmt.Sprint(i%2), 1000))})
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		l.Flush(ctx)
		l.Leave()
		pass(5 * time.Second)
		synctest.Wait()
		if lost != 10 || l.Owes() {
			t.Errorf("%d are reported as lost, want 10; owes: %t", lost, l.Owes())
		}
	})
}

// TestAnswersGoToTheirBuckets, also if a call repeats checks in another order.
func TestAnswersGoToTheirBuckets(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		one, other := requestOf("one", 100), requestOf("other", 100)
		s.others(algorithm.Charge, one)
		for range 5 {
			s.others(algorithm.Charge, other)
		}
		a := &admission{call: call{ledger: l, ctx: t.Context(), asks: store.Asks([]store.Request{one, other})}}
		m := l.moment()
		for _, place := range []int{1, 0} {
			a.join(place, &m)
		}
		a.ask(a.asking)
		if states := store.States(a.asks); states[0].Used != 1 || states[1].Used != 5 {
			t.Errorf("states %+v", states)
		}
	})
}

// TestReservationIsNoRefusal: a batch of all that was left does not refuse its own
// tokens.
func TestReservationIsNoRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 10, 10)
		l := b.ledgers[0]
		b.take(l, 1)
		asks := store.Asks([]store.Request{b.request(1)})
		if l.RefuseKnown(asks) {
			t.Errorf("refused: %+v", asks[0].State)
		}
		for range 9 {
			if st := b.take(l, 1); !st.Allowed {
				t.Fatalf("refused: %+v", st)
			}
		}
		// The last request made no call, so the store itself refuses.
		if st := b.take(l, 1); st.Allowed {
			t.Errorf("served more than the limit: %+v", st)
		}
		if !l.RefuseKnown(asks) {
			t.Error("the bucket is not known to be full")
		}
		b.leave()
	})
}

// TestAlignedWindowInAnOutage: the charges of an unknown client are retried like
// others.
func TestAlignedWindowInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewRegistry(nil), s, Options{OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
			t.Errorf("%d charges were lost: %v", n, err)
		}})
		aligned := store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: 24 * time.Hour, Align: true}
		r := store.Request{Limit: &aligned, ClientKey: "alice", Events: 100, Cost: 1}
		s.down = true
		for range 20 {
			l.ChargeDetached([]*store.Request{new(r)})
			pass(100 * time.Millisecond)
		}
		s.setDown(false, false)
		pass(3 * time.Second)
		synctest.Wait()
		if used := s.used(r); used != 20 {
			t.Errorf("%d are charged, want 20", used)
		}
		l.Leave()
	})
}

// TestLoans: tokens that a request borrowed come back if the store refuses the rest,
// but not into another window, and not into a new reservation.
func TestLoans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 11, 9)
		l := b.ledgers[0]
		b.take(l, 1)
		s := b.request(10)
		b.sim.others(algorithm.Charge, store.Request{Limit: &b.limit, ClientKey: "client", Events: 11, Cost: 2})
		loaned := l.borrow(&s)
		if s.Cost != 2 {
			t.Fatalf("borrowed %+v", loaned)
		}
		e := l.look(&s)
		m := l.moment()
		if e.Worth(&m) <= core.Alone {
			t.Error("an entry with a loan may be forgotten")
		}
		e.stripe.mu.Unlock()
		l.repay(&s, loaned, &store.State{})
		pass(2 * time.Second)
		synctest.Wait()
		if spent := b.spent(); spent != 3 {
			t.Errorf("%d are spent after the loan was idle, want 3", spent)
		}
		b.leave()
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBatches(t, 1, 1, 20, 10)
		b.limit.Window = 300 * time.Millisecond
		l := b.ledgers[0]
		b.take(l, 2)
		r := b.request(18)
		loaned := l.borrow(&r)
		pass(400 * time.Millisecond)
		b.take(l, 1)
		l.repay(&r, loaned, &store.State{})
		e := l.look(&r)
		if tokens := e.Gauges().Tokens; tokens != 9 {
			t.Errorf("%d are left of a batch of 10 of which 1 was used", tokens)
		}
		e.stripe.mu.Unlock()
		b.leave()
	})
}

// TestLateAnswerLacksARefund: the refusal of a take that was sent before a refund
// arrives after the reply to a later take.
func TestLateAnswerLacksARefund(t *testing.T) {
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog} {
		simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
			request := func(id string, cost int64) store.Request {
				return store.Request{Limit: &store.Limit{Zone: "zone", Algorithm: a, Window: time.Hour}, ClientKey: "alice", Events: 10, Cost: cost, ID: id}
			}
			taken, late := request("taken", 8), request("late", 5)
			taken.Receipt = store.Answers(t.Context(), l.Take, []store.Request{taken})[0].Receipt
			asked := l.registry.now()
			refusal := store.Answers(t.Context(), s.Take, []store.Request{late})[0]
			l.RefundDetached([]*store.Request{new(taken)})
			pass(10 * time.Millisecond)
			for _, cost := range []int64{1, 5} {
				if st := store.Answers(t.Context(), l.Take, []store.Request{request("", cost)})[0]; !st.Allowed {
					t.Errorf("%s: %d refused after the refund: %+v", a, cost, st)
				}
				l.hearTake(&late, &refusal, asked, 0)
			}
		})
	}
}

// TestSkippedCheckIsMadeByTheNextRequest: a request makes no call if another zone is
// known to refuse it, so the next one has to.
func TestSkippedCheckIsMadeByTheNextRequest(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		one, other := requestOf("one", 1), requestOf("other", 1)
		for _, r := range []store.Request{one, other} {
			s.others(algorithm.Charge, r)
			store.Answers(t.Context(), l.Take, []store.Request{r})
		}
		pass(1500 * time.Millisecond)
		// The other's refusal is fresh.
		store.Answers(t.Context(), l.Take, []store.Request{other})
		s.reset("zone/one")
		store.Answers(t.Context(), l.Take, []store.Request{one, other})
		if st := store.Answers(t.Context(), l.Take, []store.Request{one})[0]; !st.Allowed {
			t.Errorf("refused without a call: %+v", st)
		}
	})
}

// TestPrimaryAway: while the primary is away a replica answers, and not every request
// tries the primary.
func TestPrimaryAway(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		r := requestOf("alice", 3)
		for range 3 {
			if st := admit(l, r); !st.Allowed {
				t.Fatalf("%+v", st)
			}
			l.Settle([]*store.Request{new(r)}, nil)
			pass(10 * time.Millisecond)
		}
		s.setDown(false, true)
		for range 300 {
			pass(10 * time.Millisecond)
			if st := admit(l, r); st.Allowed || st.Err != nil {
				t.Fatalf("a client over its limit while the primary is away: %+v", st)
			}
		}
	})
}

// TestChargesWithFinalErrorsAreReported once for each request, and not sent again: a
// permission is missing, or the key has foreign data.
func TestChargesWithFinalErrorsAreReported(t *testing.T) {
	const key, requests = "rl:3:z:fw3600s:alice", 3
	r := store.Request{Limit: &store.Limit{Zone: "z", Algorithm: store.FixedWindow, Window: time.Hour}, ClientKey: "alice", Events: 10, Cost: 1}
	for name, c := range map[string]struct{ refuse, mend []any }{
		"pexpire":      {[]any{"ACL", "SETUSER", "limiter", "-pexpire"}, []any{"ACL", "SETUSER", "limiter", "+pexpire"}},
		"hset":         {[]any{"ACL", "SETUSER", "limiter", "-hset"}, []any{"ACL", "SETUSER", "limiter", "+hset"}},
		"evalsha":      {[]any{"ACL", "SETUSER", "limiter", "-evalsha"}, []any{"ACL", "SETUSER", "limiter", "+evalsha"}},
		"foreign data": {[]any{"SET", key, "foreign"}, []any{"DEL", key}},
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			do := func(args ...any) {
				t.Helper()
				redistest.Must(t, server.Client().Do(t.Context(), args...).Err())
			}
			do("ACL", "SETUSER", "limiter", "reset", "on", ">secret", "~*", "+@all")
			shard := redis.NewShard(redis.ShardOptions{
				Primary: server.Addr(), DialTimeout: time.Minute,
				Credentials: func(context.Context) (string, string, error) { return "limiter", "secret", nil },
			})
			defer shard.Close(context.Background())
			var lost atomic.Int64
			l := New(NewRegistry(nil), redis.New(redis.Options{
				Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: time.Minute, ChargeTimeout: time.Minute,
			}), Options{
				OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
					if !errors.Is(err, store.ErrFinal) {
						t.Errorf("%d charges were lost: %v, want a final error", n, err)
					}
					lost.Add(n)
				},
			})
			defer l.Leave()
			do(c.refuse...)
			for range requests {
				l.ChargeDetached([]*store.Request{new(r)})
			}
			awaitNothingOwed(t, l)
			if lost.Load() != requests {
				t.Errorf("%d of %d are reported", lost.Load(), requests)
			}
			do(c.mend...)
			l.ChargeDetached([]*store.Request{new(r)})
			awaitNothingOwed(t, l)
			if n, err := server.Client().HGet(t.Context(), key, "c").Int(); n != 1 || err != nil {
				t.Errorf("%d are counted, error %v, want the charge after the repair", n, err)
			}
			if ttl := server.Client().PTTL(t.Context(), key).Val(); ttl <= 0 {
				t.Errorf("the bucket expires in %v", ttl)
			}
		})
	}
}

// awaitNothingOwed waits until no charge is pending: each was answered by a server, or given up and
// reported.
func awaitNothingOwed(t *testing.T, l *Ledger) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); l.Owes(); {
		if time.Now().After(deadline) {
			t.Fatal("charges are still pending after a minute")
		}
		time.Sleep(time.Millisecond) // Owes has nothing to wait on
	}
}
