package redis

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// unsound are numbers that no bucket has.
var unsound = map[string]float64{
	"NaN": math.NaN(), "infinite": math.Inf(1), "-5": -5, "1.5": 1.5, "2^53": 1 << 53, "1e300": 1e300,
}

// otherTexts are those that no field of a bucket has, though Lua reads most as numbers.
var otherTexts = []string{"abc", "2.0", "02", "+2", " 2", "2 ", "0x2", "2e0", "-0", "0.0", "9007199254740999", "99999999999999999999"}

// damaged returns what puts one unsound number after the other in place of those of a bucket.
func damaged(t *testing.T, limit *store.Limit, client *goredis.Client, key string) (all map[string]func()) {
	t.Helper()
	all = map[string]func(){}
	if limit.Algorithm == store.FixedWindow {
		for _, field := range []string{"c", "r", "p"} {
			put := func(value any) {
				all[fmt.Sprintf("%s %q", field, value)] = func() { must(t, client.HSet(t.Context(), key, field, value).Err()) }
			}
			for _, n := range unsound {
				put(fmt.Sprint(n))
			}
			for _, text := range otherTexts {
				put(text)
			}
		}
		return all
	}
	for name, n := range unsound {
		content, err := client.Get(t.Context(), key).Bytes()
		must(t, err)
		for i := 0; i < len(content); i += 8 {
			all[fmt.Sprint(i/8, " ", name)] = func() {
				binary.LittleEndian.PutUint64(content[i:], math.Float64bits(n))
				must(t, client.SetArgs(t.Context(), key, content, goredis.SetArgs{KeepTTL: true}).Err())
			}
		}
	}
	return all
}

// TestUnsoundNumbersAreNotBelieved: a bucket with a number that none has is an empty one, at a replica
// too, and the next write makes it sound. Without that its clients get errors for as long as they come.
func TestUnsoundNumbersAreNotBelieved(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	client := sh.Primary.Client()
	for n, limit := range append([]store.Limit{storetest.Days}, storetest.Limits...) {
		if !algorithm.Of(limit.Algorithm).Copies() {
			continue
		}
		limit.Zone = fmt.Sprint("unsound", n)
		if limit.Calendar.Unit == "" {
			limit.Window = 10 * time.Hour
		}
		r := store.Request{Limit: &limit, ClientKey: "k", Events: 10, Cost: 10, ID: "first"}
		key := s.asker.Keys.Key(&limit, r.ClientKey)
		spend := func() { must(t, store.Answers(t.Context(), s.Charge, []store.Request{r})[0].Err) }
		spend()
		all := slices.Sorted(maps.Keys(damaged(t, &limit, client, key)))
		for _, what := range sweep.Of(t, all, 12) {
			for _, op := range []algorithm.Operation{algorithm.Check, algorithm.Take, algorithm.Charge, algorithm.Peek, algorithm.Penalize} {
				must(t, client.Del(t.Context(), key).Err())
				spend()
				damaged(t, &limit, client, key)[what]()
				must(t, sh.WaitReplicated(t.Context()))
				again := r
				again.Cost, again.ID = 1, "second"
				if op == algorithm.Penalize {
					again.Until = time.Now().Add(time.Minute).UnixMicro()
				}
				run := map[algorithm.Operation]func(context.Context, []*store.Ask){
					algorithm.Check: s.Check, algorithm.Take: s.Take, algorithm.Charge: s.Charge, algorithm.Peek: s.Peek, algorithm.Penalize: s.Penalize,
				}[op]
				st := store.Answers(t.Context(), run, []store.Request{again})[0]
				want := int64(0)
				if op == algorithm.Take || op == algorithm.Charge {
					want = 1
				}
				if st.Err != nil || st.Used != want || (st.Penalty != 0) != (op == algorithm.Penalize) {
					t.Errorf("%s of %v with %s: %+v", op, limit, what, st)
				}
				if op == algorithm.Take || op == algorithm.Charge {
					st := store.Answers(t.Context(), s.Take, []store.Request{again})[0]
					if st.Err != nil || st.Used != 2 {
						t.Errorf("after a %s of %v with %s: %+v", op, limit, what, st)
					}
				}
			}
		}
	}
}

// TestScoresThatCannotBeCountForNothing, and lift no limit: writes remove them.
func TestScoresThatCannotBeCountForNothing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client()
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for _, a := range []store.Algorithm{store.SlidingLog, store.Concurrency} {
		limit := &store.Limit{Zone: "scores", Algorithm: a, Window: time.Hour}
		for _, cost := range []int64{1, 3} {
			for _, score := range []float64{math.Inf(1), 1e300, 1 << 53 * 0.75, math.Exp2(900), math.Exp2(901), -1, -1e300, 0, math.Inf(-1), 0.25} {
				r := store.Request{Limit: limit, ClientKey: fmt.Sprint(score, cost), Events: 3 * cost, Cost: cost}
				key := s.asker.Keys.Key(limit, r.ClientKey)
				take := func(id int) store.State {
					r.ID = fmt.Sprint(id)
					return store.Answers(t.Context(), s.Take, []store.Request{r})[0]
				}
				must(t, take(0).Err)
				for i := range 3 {
					must(t, client.ZAdd(t.Context(), key, goredis.Z{Score: score, Member: fmt.Sprint("foreign", i)}).Err())
				}
				if st := store.Answers(t.Context(), s.Check, []store.Request{r})[0]; st.Err != nil || st.Used != cost {
					t.Errorf("%s with %v: a check %+v", a, score, st)
				}
				for i := 1; i < 5; i++ {
					st, want := take(i), min(int64(i+1), 3)*cost
					if st.Err != nil || st.Used != want || st.Allowed != (i < 3) || st.Reset > time.Now().Add(limit.Window+time.Minute).UnixMicro() {
						t.Errorf("%s with %v: take %d: %+v", a, score, i, st)
					}
				}
				members, err := client.ZRangeArgs(t.Context(), goredis.ZRangeArgs{Key: key, Start: score, Stop: score, ByScore: true}).Result()
				if err != nil || len(members) > 0 {
					t.Errorf("%s with %v: %q stay, %v", a, score, members, err)
				}
			}
		}
	}
}

// TestFractionOfAMicrosecond is the instant before it.
func TestFractionOfAMicrosecond(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	limit := &store.Limit{Zone: "scores", Algorithm: store.SlidingLog, Window: time.Hour}
	r := store.Request{Limit: limit, ClientKey: "fraction", Events: 1, Cost: 1, ID: "own"}
	now := time.Now().UnixMicro()
	must(t, server.Client().ZAdd(t.Context(), s.asker.Keys.Key(limit, r.ClientKey), goredis.Z{Score: float64(now) + 0.5, Member: "foreign"}).Err())
	if st := store.Answers(t.Context(), s.Check, []store.Request{r})[0]; st.Err != nil || st.Used != 1 || st.Reset != now+time.Hour.Microseconds() {
		t.Errorf("%+v", st)
	}
}

// TestPlainChargeOfAnUnsoundBucketCounts, once, in the window that the script opens.
func TestPlainChargeOfAnUnsoundBucketCounts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client()
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.ReadPrimary = true })
	for _, field := range []string{"c", "r", "p"} {
		for n, text := range append([]string{"-5", "9223372036854775807"}, otherTexts...) {
			r := plainRequest(3)
			r.ClientKey = fmt.Sprint(field, n)
			key := s.asker.Keys.Key(r.Limit, r.ClientKey)
			r.Until = openWindow(t, s, r)
			hearTime(t, s, "heard")
			must(t, client.HSet(t.Context(), key, field, text).Err())
			used(t, fmt.Sprintf("the first charge with %s %q", field, text), reported(t, s, r)[0], 3)
			used(t, fmt.Sprintf("the next one after %s %q", field, text), reported(t, s, r)[0], 6)
		}
	}
}

// TestEmptyFieldIsLikeAMissingOne, and the next write repairs it.
func TestEmptyFieldIsLikeAMissingOne(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client()
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), func(o *Options) { o.ReadPrimary = true })
	for field, was := range map[string]int64{"c": 0, "r": 5, "p": 5} {
		for op, run := range map[string]func(context.Context, []*store.Ask){
			"check": s.Check, "take": s.Take, "charge": s.Charge,
			"plain charge": func(_ context.Context, asks []*store.Ask) {
				r := asks[0].Request
				r.Until = openWindow(t, s, r)
				hearTime(t, s, "heard")
				must(t, client.HSet(t.Context(), s.asker.Keys.Key(r.Limit, r.ClientKey), "c", 5, field, "").Err())
				asks[0].State = reported(t, s, r)[0]
			},
		} {
			r := plainRequest(3)
			r.ClientKey = field + op
			must(t, store.Answers(t.Context(), s.Check, []store.Request{r})[0].Err)
			must(t, client.HSet(t.Context(), s.asker.Keys.Key(r.Limit, r.ClientKey), "c", 5, field, "").Err())
			want := was
			if op != "check" {
				want += 3
			}
			used(t, fmt.Sprintf("a %s with an empty %s", op, field), store.Answers(t.Context(), run, []store.Request{r})[0], want)
			used(t, fmt.Sprintf("a take after a %s with an empty %s", op, field), store.Answers(t.Context(), s.Take, []store.Request{r})[0], want+3)
		}
	}
}

// TestCountThatLostItsWindowIsAdopted, though it expires: nothing else is there.
func TestCountThatLostItsWindowIsAdopted(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := server.Client()
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
	for _, count := range []int64{0, 5} {
		for op, run := range map[algorithm.Operation]func(context.Context, []*store.Ask){
			algorithm.Check: s.Check, algorithm.Take: s.Take, algorithm.Charge: s.Charge,
		} {
			r := plainRequest(3)
			r.ClientKey = fmt.Sprint(op, count)
			key := s.asker.Keys.Key(r.Limit, r.ClientKey)
			must(t, client.HSet(t.Context(), key, "c", count).Err())
			must(t, client.Expire(t.Context(), key, time.Minute).Err())
			want := count
			if op != algorithm.Check {
				want += 3
			}
			used(t, fmt.Sprint(op, " of ", count), store.Answers(t.Context(), run, []store.Request{r})[0], want)
		}
	}
}

// TestOperatorsSeeForeignDataAsRequestsDo, at each server.
func TestOperatorsSeeForeignDataAsRequestsDo(t *testing.T) {
	t.Parallel()
	sh := redistest.StartShard(t, 1)
	s := newStore(t, shardOf(t, sh), nil)
	for name, put := range intruders {
		for n, limit := range storetest.Limits {
			limit.Zone = fmt.Sprint("foreign", n)
			r := store.Request{Limit: &limit, ClientKey: name, Events: 10}
			must(t, put(t.Context(), sh.Primary.Client(), s.asker.Keys.Key(&limit, name)))
			must(t, sh.WaitReplicated(t.Context()))
			for _, copied := range inspected(t, s, r).Copies {
				if store.KindOf(copied.State.Err) != store.KindForeignData || copied.Exists {
					t.Errorf("%s under %v: %+v", name, limit, copied)
				}
			}
		}
	}
}
