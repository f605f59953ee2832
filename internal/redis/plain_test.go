package redis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
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
func inTime[T any](t *testing.T, try func(n int) T) (got T) {
	t.Helper()
	for n := range maxTries {
		began := time.Now()
		if got = try(n); time.Since(began) < wire.ClockPeriod/2 {
			return got
		}
	}
	t.Fatalf("%d tries took longer than half of %v", maxTries, wire.ClockPeriod)
	return got
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
	s.ChargeReported(storetest.Posts(reqs), func(i int, st store.State) {
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

// hearTime makes the store hear the time of the primary of a key: a take is always a script.
func hearTime(t *testing.T, s *Store, key string) {
	t.Helper()
	must(t, store.Answers(t.Context(), s.Take, oneOf(key))[0].Err)
}

// openWindow opens the request's window, and returns its end.
func openWindow(t *testing.T, s *Store, r store.Request) int64 {
	t.Helper()
	st := store.Answers(t.Context(), s.Check, []store.Request{r})[0]
	if st.Err != nil || st.Reset == 0 {
		t.Fatalf("the check got %+v", st)
	}
	return st.Reset
}

// fieldsOf returns the fields of the request's bucket in Redis, and its time to live.
func fieldsOf(t *testing.T, s *Store, server *redistest.Server, r store.Request) (fields map[string]string, ttl time.Duration) {
	t.Helper()
	key := s.asker.Keys.Key(r.Limit, r.ClientKey)
	fields, err := server.Client().HGetAll(t.Context(), key).Result()
	must(t, err)
	if ttl, err = server.Client().PTTL(t.Context(), key).Result(); err != nil {
		t.Fatal(err)
	}
	return fields, ttl
}

// TestPlainChargesCallNoScript checks that charges of a window that is known to be open are plain
// commands, unless the window ends too soon.
func TestPlainChargesCallNoScript(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for name, test := range map[string]struct {
		change  func(*Options)
		shorten int64
		scripts int64
	}{
		"open":        {nil, 0, 0},
		"near reset":  {nil, (endless - time.Second).Microseconds(), 1},
		"local clock": {func(o *Options) { o.clock = time.Now }, 0, 0},
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
				hearTime(t, s, "heard")
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

// plainRefusals are what servers and proxies reply to a plain command that they refuse.
var plainRefusals = []string{
	"-ERR unknown command 'hincrby', with args beginning with: ", "-unsupported command 'HINCRBY'", "-NOPERM this user has no permissions to run the 'hincrby' command",
}

// TestScriptReplacesRefusedCommands checks that charges, and checks at a primary, are scripts from
// the first plain command on that a proxy refuses, whichever that is, and that each counts once.
func TestScriptReplacesRefusedCommands(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for _, refusal := range plainRefusals {
		for _, refused := range [][]string{{"hincrby"}, {"hmget"}, {"hincrby", "hmget"}} {
			t.Run(fmt.Sprint(refused, " ", refusal), func(t *testing.T) {
				filter := redistest.StartFilter(t, server.Addr(), redistest.Refusing(refusal, refused...))
				s := newStore(t, newShard(t, ShardOptions{Primary: filter.Addr(), PoolSize: 1}), func(o *Options) { o.ReadPrimary = true })
				r := plainRequest(3)
				r.ClientKey = t.Name()
				r.Until = openWindow(t, s, r)
				// do runs f until the primary's time was known all the while, and returns how many
				// commands were refused, and how many scripts ran.
				do := func(f func()) (n [2]int64) {
					return inTime(t, func(int) [2]int64 {
						hearTime(t, s, "heard")
						before := filter.Answered()
						ran := scripts(t, server, f)
						return [2]int64{filter.Answered() - before, ran}
					})
				}
				counted := int64(0)
				charge := func() {
					counted += r.Cost
					if st := reported(t, s, r)[0]; st.Err != nil || st.Used != counted || st.Reset != r.Until {
						t.Errorf("the charge got %+v, want %d used until %d", st, counted, r.Until)
					}
				}
				check := func() {
					if st := store.Answers(t.Context(), s.Check, []store.Request{r})[0]; st.Err != nil || st.Used != counted || st.Reset != r.Until {
						t.Errorf("the check got %+v, want %d used until %d", st, counted, r.Until)
					}
				}
				do(charge)
				if n := do(charge); n != [2]int64{0, 1} {
					t.Errorf("a later charge: %d commands refused, %d scripts", n[0], n[1])
				}
				do(check)
				want := [2]int64{0, 1}
				if !slices.Contains(refused, "hmget") {
					want[1] = 0
				}
				if n := do(check); n != want {
					t.Errorf("a later check: %d commands refused, %d scripts, want %d", n[0], n[1], want)
				}
				// Of a charge both commands may be refused, and of a check one.
				if n := filter.Answered(); n > int64(2*len(refused)) {
					t.Errorf("%d commands were refused", n)
				}
				if fields, ttl := fieldsOf(t, s, server, r); fields["c"] != fmt.Sprint(counted) || ttl <= 0 {
					t.Errorf("the bucket is %v with %v to live, want a count of %d", fields, ttl, counted)
				}
			})
		}
	}
}

// TestRestartedServerIsTriedAnew checks that a server that has refused plain commands is sent them again
// after its next start, such as that of a newer version.
func TestRestartedServerIsTriedAnew(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var serves atomic.Bool
	refuse := redistest.Refusing("-ERR unknown command", "hincrby", "hsetnx")
	filter := redistest.StartFilter(t, server.Addr(), func(command []string) string {
		if serves.Load() {
			return ""
		}
		return refuse(command)
	})
	shard := newShard(t, ShardOptions{Primary: filter.Addr()})
	met := keepJournal(shard)
	s := newStore(t, shard, func(o *Options) { o.ReadPrimary = true })
	charged := func(name string) int64 {
		return inTime(t, func(try int) int64 {
			r := plainRequest(1)
			r.ClientKey = fmt.Sprint(name, try)
			r.Until = openWindow(t, s, r)
			hearTime(t, s, "heard")
			return scripts(t, server, func() { must(t, reported(t, s, r)[0].Err) })
		})
	}
	charged("first")
	if n := charged("refused"); n != 1 {
		t.Errorf("the charge took %d scripts, want 1", n)
	}
	met.await(t, wire.Met, filter.Addr())
	serves.Store(true)
	must(t, server.Restart())
	eventually(t, "the new start is noticed", func() error {
		if len(met.all(wire.Met, filter.Addr())) < 2 {
			return errors.New("it is not")
		}
		return nil
	})
	// Connections to the earlier start end one by one.
	eventually(t, "charges are delivered", func() error { return reported(t, s, plainRequest(1))[0].Err })
	if n := charged("restarted"); n != 0 {
		t.Errorf("after the restart the charge took %d scripts", n)
	}
	awaitOpenings(t, s, shard)
}

// TestMissingRightIsNotRemembered checks that charges are plain commands again once a user gets
// the right that they, and the script as well, had lacked.
func TestMissingRightIsNotRemembered(t *testing.T) {
	t.Parallel()
	server := undone(t, redistest.Start(t))
	user := func(rules ...any) {
		must(t, server.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", "limiter"}, rules...)...).Err())
	}
	user("reset", "on", ">secret", "~*", "+@all")
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("limiter", "secret")}), func(o *Options) { o.ReadPrimary = true })
	r := plainRequest(3)
	r.Until = openWindow(t, s, r)
	user("-hincrby", "-hmget")
	for range 3 {
		if st := reported(t, s, r)[0]; !errors.Is(st.Err, store.ErrFinal) {
			t.Errorf("the charge got %+v, want a final error", st)
		}
		if st := store.Answers(t.Context(), s.Check, []store.Request{r})[0]; !errors.Is(st.Err, store.ErrFinal) {
			t.Errorf("the check got %+v, want a final error", st)
		}
	}
	user("+hincrby", "+hmget")
	counted := int64(0)
	ran := inTime(t, func(int) int64 {
		hearTime(t, s, "heard")
		return scripts(t, server, func() {
			counted += r.Cost
			used(t, "the charge", reported(t, s, r)[0], counted)
			used(t, "the check", store.Answers(t.Context(), s.Check, []store.Request{r})[0], counted)
		})
	})
	if ran != 0 {
		t.Errorf("%d scripts ran, want none", ran)
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

// TestRefusedMendIsUncertain checks that a plain charge of a bucket that has vanished has an unknown
// outcome if its user may not repair the orphan: it counts there already, and the next charge of the
// bucket, once that may, gives the orphan a window and keeps both.
func TestRefusedMendIsUncertain(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	undone(t, sh.Primary)
	user := func(rules ...any) {
		must(t, sh.Primary.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", "limiter"}, rules...)...).Err())
	}
	user("reset", "on", ">secret", "~*", "+@all")
	for _, command := range []string{"evalsha", "pexpire"} {
		t.Run(command, func(t *testing.T) {
			shard := newShard(t, ShardOptions{Primary: sh.Primary.Addr(), Credentials: login("limiter", "secret")})
			s := newStore(t, shard, func(o *Options) { o.ReadPrimary = true })
			var r store.Request
			st := inTime(t, func(try int) store.State {
				r = plainRequest(3)
				r.ClientKey = fmt.Sprint(command, try)
				r.Until = openWindow(t, s, r)
				hearTime(t, s, "heard")
				must(t, sh.Primary.Client().FlushAll(t.Context()).Err())
				user("-" + command)
				defer user("+" + command)
				return reported(t, s, r)[0]
			})
			if !errors.Is(st.Err, store.ErrUncertain) || errors.Is(st.Err, store.ErrNotExecuted) {
				t.Errorf("the charge got %+v, want an unknown outcome", st)
			}
			if fields, ttl := fieldsOf(t, s, sh.Primary, r); !maps.Equal(fields, map[string]string{"c": "3"}) || ttl > 0 {
				t.Errorf("the bucket is %v with %v to live, want an orphan with a count of 3", fields, ttl)
			}
			used(t, "the next charge", reported(t, s, r)[0], 6)
			if fields, ttl := fieldsOf(t, s, sh.Primary, r); fields["c"] != "6" || fields["r"] == "" || ttl <= 0 {
				t.Errorf("the bucket is %v with %v to live, want a count of 6 in a window", fields, ttl)
			}
		})
	}
}

// TestPlainChargeFollowsItsSlot checks that a plain charge in a Redis Cluster calls no script, and
// that one whose slot is moving, or has moved, is refused by the node as a whole and counts once, by
// the script, at the node that has its bucket.
func TestPlainChargeFollowsItsSlot(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout), redistest.Args("--user", "limiter", "on", ">secret", "~*", "+@all"))
	shard := newShard(t, ShardOptions{Cluster: c.Addrs()[:1], Credentials: login("limiter", "secret")})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	waitUntilUp(t, s)
	m := &movingSlot{Cluster: c, from: masterOf(t, c, "k"), to: c.Nodes[0]}
	if m.to == m.from {
		m.to = c.Nodes[1]
	}
	r := oneOf("k")[0]
	r.Until = openWindow(t, s, r)
	// Both nodes get the script.
	stays := neighbour(t, m, m.from)
	hearTime(t, s, stays)
	hearTime(t, s, neighbour(t, m, m.to))
	// What the store knows of slots stays as it is.
	for _, node := range c.Nodes {
		must(t, node.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "-cluster").Err())
	}
	j.await(t, wire.DiscoveryFailed, "")
	counted := int64(0)
	charges := func(what string, at *redistest.Server, redirected bool, scriptsAt int64) {
		t.Helper()
		type figures struct {
			redirected            bool // Redis 8 counts one of two
			scripts, scriptsThere int64
		}
		got := inTime(t, func(int) (f figures) {
			hearTime(t, s, stays)
			before := redirects(t, m.from)
			f.scripts = scripts(t, m.from, func() {
				f.scriptsThere = scripts(t, m.to, func() {
					counted++
					used(t, what, reported(t, s, r)[0], counted)
				})
			})
			f.redirected = redirects(t, m.from) > before
			if n := tagged(t, at, "k"); n != counted {
				t.Fatalf("%s: the count is %d, want %d", what, n, counted)
			}
			return f
		})
		if want := (figures{redirected, 0, scriptsAt}); got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	charges("charge", m.from, false, 0)
	moving, err := c.BeginMigration(t.Context(), int(wire.SlotOf([]byte("k"))), m.from, m.to)
	must(t, err)
	if n, err := moving.MoveKeys(t.Context(), 10); n != 1 || err != nil {
		t.Fatalf("%d buckets have moved, error %v", n, err)
	}
	// HINCRBY and HMGET are refused.
	charges("charge while the slot moves", m.to, true, 1)
	must(t, moving.Finish(t.Context()))
	charges("charge when the slot has moved", m.to, true, 1)
}

// TestPlainChargeOfAnOldCopy checks that a charge is made by the script if the server's copy of the
// bucket has a window that was over already, or if the charge had waited for too long.
func TestPlainChargeOfAnOldCopy(t *testing.T) {
	sh := redistest.StartShard(t, 0)
	for _, align := range []bool{false, true} {
		t.Run(fmt.Sprint(align), func(t *testing.T) {
			s, r := plainCharging(t, sh, align)
			over := time.Now().Add(-time.Minute).UnixMicro()
			must(t, sh.Primary.Client().HSet(t.Context(), s.asker.Keys.Key(r.Limit, r.ClientKey), "c", 7, "r", over).Err())
			used(t, "the charge in a new window", reported(t, s, r)[0], 3)
			if fields, _ := fieldsOf(t, s, sh.Primary, r); fields["c"] != "3" {
				t.Errorf("the bucket is %v, want a count of 3", fields)
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
			key := s.asker.Keys.Key(r.Limit, r.ClientKey)
			must(t, sh.Primary.Client().HSet(t.Context(), key, test.fields...).Err())
			if test.ttl > 0 {
				must(t, sh.Primary.Client().Expire(t.Context(), key, test.ttl).Err())
			}
			before, _ := fieldsOf(t, s, sh.Primary, r)
			if st := store.Answers(t.Context(), s.Charge, []store.Request{r})[0]; !errors.Is(st.Err, store.ErrNotExecuted) {
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
			t.Run(fmt.Sprint(op, align), func(t *testing.T) {
				s := newStore(t, shardOf(t, sh), func(o *Options) { o.ReadPrimary = true })
				r := plainRequest(3)
				r.Limit.Align = align
				r.ClientKey = t.Name()
				r.Until = time.Now().Add(time.Minute).UnixMicro()
				must(t, sh.Primary.Client().HSet(t.Context(), s.asker.Keys.Key(r.Limit, r.ClientKey), "c", 5).Err())
				run := map[algorithm.Operation]func(context.Context, []*store.Ask){
					algorithm.Check: s.Check, algorithm.Charge: s.Charge, algorithm.Take: s.Take, algorithm.Refund: s.Refund, algorithm.Penalize: s.Penalize,
				}[op]
				if st := store.Answers(t.Context(), run, []store.Request{r})[0]; st.Err != nil {
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
		must(t, sh.Primary.Client().HSet(t.Context(), s.asker.Keys.Key(r.Limit, r.ClientKey), "c", 5).Err())
		if st := store.Answers(t.Context(), s.Take, []store.Request{r})[0]; st.Err != nil || st.Allowed || st.Used != 5 {
			t.Errorf("the take got %+v, want a refusal at 5", st)
		}
	})
}

// TestOrphanUnderAFalsePenaltyIsAdopted checks that a count without a window, under a penalty by a
// clock that was wrong, is kept by whatever touches it, as the count of a window is.
func TestOrphanUnderAFalsePenaltyIsAdopted(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.ReadPrimary = true })
	for op, run := range map[algorithm.Operation]func(context.Context, []*store.Ask){
		algorithm.Check: s.Check, algorithm.Charge: s.Charge, algorithm.Take: s.Take, algorithm.Refund: s.Refund, algorithm.Penalize: s.Penalize,
	} {
		for _, align := range []bool{false, true} {
			for _, before := range []int64{0, 5} {
				r := plainRequest(3)
				r.Limit.Align, r.ClientKey, r.Penalty = align, fmt.Sprint(op, align, before), time.Minute
				r.Until = time.Now().Add(time.Minute).UnixMicro()
				key := s.asker.Keys.Key(r.Limit, r.ClientKey)
				must(t, server.Client().HSet(t.Context(), key, "p", time.Now().Add(far).UnixMicro()).Err())
				if before > 0 {
					must(t, server.Client().HSet(t.Context(), key, "c", before).Err())
				}
				must(t, server.Client().PExpire(t.Context(), key, far).Err())
				want := before
				if op == algorithm.Charge || op == algorithm.Take {
					want += r.Cost
				}
				st := store.Answers(t.Context(), run, []store.Request{r})[0]
				if st.Err != nil || st.Used != want || (st.Penalty != 0) != (op == algorithm.Penalize) {
					t.Errorf("%v of %d, align %t: %+v, want %d used", op, before, align, st, want)
				}
				fields, ttl := fieldsOf(t, s, server, r)
				if fields["c"] != fmt.Sprint(want) || fields["r"] == "" || ttl <= 0 {
					t.Errorf("%v of %d, align %t: the bucket is %v with %v to live", op, before, align, fields, ttl)
				}
			}
		}
	}
}

// TestRefusedRepairIsNotExecuted checks that an operation whose user may not set an expiry is refused
// as a whole, and one that may not add to the count did not run, although the penalty that is not
// believed is gone.
func TestRefusedRepairIsNotExecuted(t *testing.T) {
	server := undone(t, redistest.Start(t))
	user := func(rules ...any) {
		must(t, server.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", "limiter"}, rules...)...).Err())
	}
	user("reset", "on", ">secret", "~*", "+@all")
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("limiter", "secret")}), nil)
	r := plainRequest(3)
	r.Penalty = time.Minute
	key := s.asker.Keys.Key(r.Limit, r.ClientKey)
	for command, repaired := range map[string]bool{"pexpire": false, "hincrby": true} {
		for _, reset := range []time.Duration{0, time.Minute} {
			must(t, server.Client().FlushAll(t.Context()).Err())
			must(t, server.Client().HSet(t.Context(), key, "c", 5, "p", time.Now().Add(far).UnixMicro()).Err())
			if reset > 0 {
				must(t, server.Client().HSet(t.Context(), key, "r", time.Now().Add(reset).UnixMicro()).Err())
			} else if repaired {
				continue // it opens a window, and adds nothing
			}
			before, _ := fieldsOf(t, s, server, r)
			user("-" + command)
			st := store.Answers(t.Context(), s.Take, []store.Request{r})[0]
			user("+" + command)
			if !errors.Is(st.Err, store.ErrNotExecuted) {
				t.Errorf("without %s, a window of %v: %+v", command, reset, st)
			}
			if fields, _ := fieldsOf(t, s, server, r); maps.Equal(fields, before) == repaired {
				t.Errorf("without %s, a window of %v: the bucket is %v, was %v", command, reset, fields, before)
			}
			used(t, "the next take", store.Answers(t.Context(), s.Take, []store.Request{r})[0], 8)
		}
	}
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
		"local clock": {func(o *Options) { o.clock = time.Now }, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, shardOf(t, sh), test.change)
			ran := inTime(t, func(try int) int64 {
				r := plainRequest(3)
				r.ClientKey = fmt.Sprint(name, try)
				r.Until = openWindow(t, s, r)
				hearTime(t, s, "heard")
				must(t, store.Answers(t.Context(), s.Charge, []store.Request{r})[0].Err)
				if test.vanish {
					must(t, sh.Primary.Client().FlushAll(t.Context()).Err())
				}
				return scripts(t, sh.Primary, func() {
					switch st := store.Answers(t.Context(), s.Check, []store.Request{r})[0]; {
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

// TestAbsentClientsAskThePrimary checks that checks of clients that no replica knows go to the primary
// once most are so, but for a sample, and come back to the replica when most are known.
func TestAbsentClientsAskThePrimary(t *testing.T) {
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
			if st := store.Answers(t.Context(), s.Check, []store.Request{r})[0]; st.Err != nil || st.Reset == 0 {
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
	if n := visit("second", clients); n > clients/16+1 {
		t.Errorf("the replica was asked about %d of the next %d", n, clients)
	}
	eventually(t, "the replica is asked about clients that it knows", func() error {
		if n := visit("first", clients); n < clients {
			return fmt.Errorf("about %d of %d", n, clients)
		}
		return nil
	})
}
