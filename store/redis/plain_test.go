package redis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// plainRequest is a request of a window that is open long enough for plain charges.
func plainRequest(cost int64) store.Request {
	return store.Request{
		Limit:     &store.Limit{Zone: "api", Algorithm: store.FixedWindow, Window: endless},
		ClientKey: "alice", Events: 1000, Cost: cost,
	}
}

// maxTries is how often a machine may be too slow for the period of a clock.
const maxTries = 100

// inTime calls try with one number after the other until a call takes less than half of the period
// of a clock, and returns what that call returns. A store that has not heard the primary's clock
// for longer asks a script.
func inTime(t *testing.T, try func(n int) int64) int64 {
	t.Helper()
	for n := range maxTries {
		began := time.Now()
		if got := try(n); time.Since(began) < clockPeriod/2 {
			return got
		}
	}
	t.Fatalf("%d tries took longer than half of %v", maxTries, clockPeriod)
	return 0
}

// scripts returns how many scripts the server runs for a call.
func scripts(t *testing.T, server *redistest.Server, call func()) int64 {
	t.Helper()
	before, err := server.Calls()
	must(t, err)
	call()
	after, err := server.Calls()
	must(t, err)
	return after["evalsha"] - before["evalsha"]
}

// plainCharging returns a store that makes plain charges, and a request whose window it has opened.
func plainCharging(t *testing.T, sh *redistest.Shard, align bool) (*Store, store.Request) {
	t.Helper()
	s := newStore(t, shardOf(t, sh), func(o *Options) { o.ChargeTimeout, o.ReadPrimary = waitTimeout, true })
	r := plainRequest(3)
	r.ClientKey, r.Limit.Align = t.Name(), align
	r.Until = openWindow(t, s, r)
	return s, r
}

// reported makes detached charges and returns what is reported of them.
func reported(t *testing.T, s *Store, reqs ...store.Request) []store.State {
	t.Helper()
	states := make([]store.State, len(reqs))
	done := make(chan int, len(reqs))
	s.ChargeReported(reqs, func(i int, st store.State) {
		states[i] = st
		done <- i
	})
	for range reqs {
		select {
		case <-done:
		case <-time.After(waitTimeout):
			t.Fatal("no report")
		}
	}
	return states
}

// openWindow opens the request's window by a script, which tells the store the primary's time, and
// returns its end.
func openWindow(t *testing.T, s *Store, r store.Request) int64 {
	t.Helper()
	st := s.Check(t.Context(), []store.Request{r})[0]
	if st.Err != nil || st.Reset == 0 {
		t.Fatalf("the check got %+v", st)
	}
	return st.Reset
}

// fieldsOf returns the fields of the request's bucket in Redis, and its time to live.
func fieldsOf(t *testing.T, s *Store, server *redistest.Server, r store.Request) (fields map[string]string, ttl time.Duration) {
	t.Helper()
	key := s.keys.key(r.Limit, r.ClientKey)
	fields, err := server.Client().HGetAll(t.Context(), key).Result()
	must(t, err)
	if ttl, err = server.Client().PTTL(t.Context(), key).Result(); err != nil {
		t.Fatal(err)
	}
	return fields, ttl
}

// TestPlainChargesCallNoScript checks that charges of a window that is known to be open are plain
// commands, unless that is switched off, the window ends too soon, or the primary's time is not
// known.
func TestPlainChargesCallNoScript(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for name, test := range map[string]struct {
		change  func(*Options)
		shorten int64
		scripts int64
	}{
		"on":          {nil, 0, 0},
		"off":         {func(o *Options) { o.NoPlainCharges = true }, 0, 1},
		"near reset":  {nil, (endless - time.Second).Microseconds(), 1},
		"local clock": {func(o *Options) { o.LocalClock = true }, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, shardOf(t, sh), func(o *Options) {
				o.ChargeTimeout, o.ReadPrimary = waitTimeout, true
				if test.change != nil {
					test.change(o)
				}
			})
			ran := inTime(t, func(try int) int64 {
				r := plainRequest(3)
				r.ClientKey = fmt.Sprint(name, try)
				end := openWindow(t, s, r)
				r.Until = end - test.shorten
				return scripts(t, sh.Primary, func() {
					if st := reported(t, s, r)[0]; st.Err != nil || st.Used != 3 || st.Reset != end || st.Now == 0 {
						t.Errorf("the charge got %+v, want 3 used until %d", st, end)
					}
				})
			})
			if ran != test.scripts {
				t.Errorf("%d scripts ran, want %d", ran, test.scripts)
			}
		})
	}
}

// TestOrphanIsMended checks that a plain charge of a bucket that has vanished counts once, in a
// window that is opened at once, aligned or not.
func TestOrphanIsMended(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for _, align := range []bool{false, true} {
		t.Run(fmt.Sprint(align), func(t *testing.T) {
			s, r := plainCharging(t, sh, align)
			must(t, sh.Primary.Client().FlushAll(t.Context()).Err())
			for i, st := range reported(t, s, r, r, r, r, r) {
				if st.Err != nil || st.Reset < r.Until || st.Reset == r.Until && !align {
					t.Errorf("charge %d got %+v, want a new window", i, st)
				}
			}
			fields, ttl := fieldsOf(t, s, sh.Primary, r)
			if fields["c"] != "15" || fields["r"] == "" || ttl <= 0 || ttl < endless-waitTimeout && !align {
				t.Errorf("the bucket is %v with %v to live, want a count of 15 for the whole window", fields, ttl)
			}
		})
	}
}

// TestPlainChargeOfAnOldCopy checks that a charge is made by the script if the server's copy of the
// bucket has a window that was over already, or if the charge had waited for too long.
func TestPlainChargeOfAnOldCopy(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for _, align := range []bool{false, true} {
		t.Run(fmt.Sprint(align), func(t *testing.T) {
			s, r := plainCharging(t, sh, align)
			over := time.Now().Add(-time.Minute).UnixMicro()
			must(t, sh.Primary.Client().HSet(t.Context(), s.keys.key(r.Limit, r.ClientKey), "c", 7, "r", over).Err())
			used(t, "the charge in a new window", reported(t, s, r)[0], 3)
			if fields, _ := fieldsOf(t, s, sh.Primary, r); fields["c"] != "3" {
				t.Errorf("the bucket is %v, want a count of 3", fields)
			}
			cmd := newPlainCharge("key", &r, 0, nil)
			if cmd.checkWindow(r.Until - time.Second.Microseconds()); cmd.charge != nil || cmd.script != scriptFixedWindow {
				t.Error("a charge is plain a second before its window ends")
			}
		})
	}
}

// TestForeignHashIsNoOrphan checks that a hash of another program stays as it is.
func TestForeignHashIsNoOrphan(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for name, test := range map[string]struct {
		fields []any
		ttl    time.Duration
	}{
		"a text":                 {[]any{"c", "abc", "other", "data"}, 0},
		"no count":               {[]any{"other", "data"}, 0},
		"a count with an expiry": {[]any{"c", "7", "other", "data"}, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, shardOf(t, sh), nil)
			r := plainRequest(3)
			r.ClientKey = t.Name()
			key := s.keys.key(r.Limit, r.ClientKey)
			must(t, sh.Primary.Client().HSet(t.Context(), key, test.fields...).Err())
			if test.ttl > 0 {
				must(t, sh.Primary.Client().Expire(t.Context(), key, test.ttl).Err())
			}
			before, _ := fieldsOf(t, s, sh.Primary, r)
			if st := s.Charge(t.Context(), []store.Request{r})[0]; !errors.Is(st.Err, store.ErrNotExecuted) {
				t.Errorf("the charge got %+v", st)
			}
			if after, _ := fieldsOf(t, s, sh.Primary, r); !maps.Equal(after, before) {
				t.Errorf("the hash is %v, was %v", after, before)
			}
		})
	}
}

// TestOrphanIsAdopted checks that whatever touches an orphan, a count without window and expiry,
// gives it both, and keeps the count.
func TestOrphanIsAdopted(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for op, used := range map[algorithm.Operation]string{
		algorithm.Check: "5", algorithm.Charge: "8", algorithm.Take: "8", algorithm.Refund: "5", algorithm.Penalize: "5",
	} {
		for _, align := range []bool{false, true} {
			t.Run(fmt.Sprint(operations[op], align), func(t *testing.T) {
				s := newStore(t, shardOf(t, sh), func(o *Options) { o.ReadPrimary = true })
				r := plainRequest(3)
				r.Limit.Align = align
				r.ClientKey = t.Name()
				r.Until = time.Now().Add(time.Minute).UnixMicro()
				must(t, sh.Primary.Client().HSet(t.Context(), s.keys.key(r.Limit, r.ClientKey), "c", 5).Err())
				run := map[algorithm.Operation]func(context.Context, []store.Request) []store.State{
					algorithm.Check: s.Check, algorithm.Charge: s.Charge, algorithm.Take: s.Take, algorithm.Refund: s.Refund, algorithm.Penalize: s.Penalize,
				}[op]
				if st := run(t.Context(), []store.Request{r})[0]; st.Err != nil {
					t.Fatal(st.Err)
				}
				fields, ttl := fieldsOf(t, s, sh.Primary, r)
				if fields["c"] != used || fields["r"] == "" || ttl <= 0 {
					t.Errorf("the bucket is %v with %v to live, want a count of %s, a reset and an expiry", fields, ttl, used)
				}
			})
		}
	}
	t.Run("a take that does not fit", func(t *testing.T) {
		s := newStore(t, shardOf(t, sh), nil)
		r := plainRequest(3)
		r.Events, r.ClientKey = 7, t.Name()
		must(t, sh.Primary.Client().HSet(t.Context(), s.keys.key(r.Limit, r.ClientKey), "c", 5).Err())
		if st := s.Take(t.Context(), []store.Request{r})[0]; st.Err != nil || st.Allowed || st.Used != 5 {
			t.Errorf("the take got %+v, want a refusal at 5", st)
		}
	})
}

// TestOpenWindowIsReadAtThePrimary checks that a check at a primary calls no script where the window
// is known to be open, and that a bucket that has vanished gets a window all the same.
func TestOpenWindowIsReadAtThePrimary(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for name, test := range map[string]struct {
		change  func(*Options)
		vanish  bool
		scripts int64
	}{
		"open":        {nil, false, 0},
		"vanished":    {nil, true, 1},
		"off":         {func(o *Options) { o.NoPlainCharges = true }, false, 1},
		"local clock": {func(o *Options) { o.LocalClock = true }, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, shardOf(t, sh), test.change)
			ran := inTime(t, func(try int) int64 {
				r := plainRequest(3)
				r.ClientKey = fmt.Sprint(name, try)
				r.Until = openWindow(t, s, r)
				must(t, s.Charge(t.Context(), []store.Request{r})[0].Err)
				if test.vanish {
					must(t, sh.Primary.Client().FlushAll(t.Context()).Err())
				}
				return scripts(t, sh.Primary, func() {
					switch st := s.Check(t.Context(), []store.Request{r})[0]; {
					case st.Err != nil, st.Replica, st.Now == 0:
						t.Errorf("the check got %+v", st)
					case test.vanish && (st.Used != 0 || st.Reset <= r.Until):
						t.Errorf("the check got %+v, want a new window", st)
					case !test.vanish && (st.Used != 3 || st.Reset != r.Until):
						t.Errorf("the check got %+v, want 3 used until %d", st, r.Until)
					}
				})
			})
			if ran != test.scripts {
				t.Errorf("%d scripts ran, want %d", ran, test.scripts)
			}
		})
	}
}

// TestNewcomersAskThePrimary checks that checks of clients that no replica knows go to the primary
// once most are so, but for a sample, and come back to the replica when most are known.
func TestNewcomersAskThePrimary(t *testing.T) {
	const clients = 64
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	waitUntilUp(t, s)
	replica := sh.Replicas[0]
	// visit checks clients, and returns how many of the checks a replica was asked.
	visit := func(name string, n int) int64 {
		before, err := replica.Asked()
		must(t, err)
		for i := range n {
			r := plainRequest(1)
			r.ClientKey = fmt.Sprint(name, i)
			if st := s.Check(t.Context(), []store.Request{r})[0]; st.Err != nil || st.Reset == 0 {
				t.Fatalf("the check got %+v", st)
			}
		}
		after, err := replica.Asked()
		must(t, err)
		return after - before
	}
	if n := visit("first", clients); n < clients/2 {
		t.Errorf("the replica was asked about %d of the first %d new clients", n, clients)
	}
	if n := visit("second", clients); n > clients/newcomersSample+1 {
		t.Errorf("the replica was asked about %d of the next %d", n, clients)
	}
	eventually(t, "the replica is asked about clients that it knows", func() error {
		if n := visit("first", clients); n < clients {
			return fmt.Errorf("about %d of %d", n, clients)
		}
		return nil
	})
}
