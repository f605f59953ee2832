package storetest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// testLimitsHaveOwnBuckets uses limits and client keys whose concatenations are equal.
func testLimitsHaveOwnBuckets(f *fixture) {
	key := func(l *store.Limit, client string) store.Request {
		return store.Request{Limit: l, ClientKey: client, Events: 1000}
	}
	a := f.limit("a", time.Minute)
	longer := *a
	longer.Zone += "b"
	windows := *a
	windows.Window = 10 * time.Minute
	fraction := *a
	fraction.Window += time.Microsecond
	f.wantOwnBuckets([]store.Request{
		key(a, "bc"),
		key(&longer, "c"),
		key(a, "c"),
		key(a, "0"),
		key(&windows, "bc"),
		key(&windows, ""),
		key(&fraction, "bc"),
		key(a, "1"),
		key(a, ":fixed_window:60000000:bc"),
		key(a, "fixed_window"),
		key(&longer, "fixed_window"),
		key(f.limit("A", time.Minute), "bc"),
		key(f.limit("a", time.Hour), "bc"),
		key(f.limit("a", 24*time.Hour), "bc"),
	})
}

func testEqualLimitsShareBuckets(f *fixture) {
	r := f.request()
	f.charge(r)
	limit := *r.Limit
	limit.Zone = strings.Clone(limit.Zone)
	r.Limit = &limit
	f.wantUsed("charge under an equal limit", f.charge(r), 2)
}

// testClientKeysHaveOwnBuckets uses client keys that a client could send to hit another
// client's bucket.
func testClientKeysHaveOwnBuckets(f *fixture) {
	long := strings.Repeat("k", 10_000)
	keys := []string{
		"", "\x00", "\x00\x00", " ", "0", "a", "A", "a\x00", "a\x00b", "\x00a", "a ", " a", "a\n", "a\r\n",
		"{", "}", "{}", "{a}", "{a}b", "{a}c", "a{", "}a{", "a:b", "a:", ":a", ":", "::", "*", "?", "[a]", "\\", "%", "%00", "\"", "'",
		"\xff", "\xfe", "\xff\xff", "a\xff", "a\xfe", "\xc3\x28", "\xe2\x82", "\uFFFD", "\uFFFD\uFFFD",
		"\u00e9", "e\u0301", "\u00df", "ss", "\u0130", "i",
		"203.0.113.7", "::ffff:203.0.113.7", "2001:db8::1", "2001:db8:0::1", "nil", "null", "false", "-1", "1e3", "1000",
		long, long + "k", long[1:], long + "\x00", "\x00" + long, long[1:] + "l", "l" + long[1:],
		long[:5000] + "\xff" + long[5001:], long[:5000] + "\xfe" + long[5001:], long[:5000] + "{}" + long[5002:],
	}
	// Around the lengths at which keys are shortened, and at which a store could do so.
	for _, n := range []int{15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025} {
		keys = append(keys, long[:n], long[:n-1]+"x", "x"+long[:n-1])
	}
	limit := f.limit("zone", time.Minute)
	var reqs []store.Request
	for _, k := range keys {
		reqs = append(reqs, store.Request{Limit: limit, ClientKey: string(store.Shortened([]byte(k))), Events: 1000})
	}
	f.wantOwnBuckets(reqs)
}

// wantOwnBuckets charges each request a different cost, which identifies its bucket.
func (f *fixture) wantOwnBuckets(reqs []store.Request) {
	f.Helper()
	for i := range reqs {
		reqs[i].Cost = int64(i + 1)
		f.wantUsed("first charge of "+describe(reqs[i]), f.charge(reqs[i]), int64(i+1))
	}
	for i, s := range f.answer(f.store.Check, reqs) {
		f.wantUsed("check of "+describe(reqs[i]), s, int64(i+1))
	}
}

func describe(r store.Request) string {
	key := fmt.Sprintf("%q", r.ClientKey)
	if len(key) > 60 {
		key = fmt.Sprintf("%s… (%d bytes)", key[:60], len(r.ClientKey))
	}
	return fmt.Sprintf("zone %s, window %v, client key %s", r.Limit.Zone, r.Limit.Window, key)
}

// testAnswersInOrder asks about many buckets at once, of several limits and of
// clients that a sharded store spreads.
func testAnswersInOrder(f *fixture) {
	limits := []*store.Limit{
		f.limit("minute", time.Minute), f.limit("hour", time.Hour), f.limit("day", 24*time.Hour),
	}
	var reqs []store.Request
	for c := range 20 {
		for l, limit := range limits {
			reqs = append(reqs, store.Request{
				Limit: limit, ClientKey: fmt.Sprint("client ", c), Events: int64(30 + l), Cost: int64(len(reqs)),
			})
		}
	}
	want := func(i int, used, cost int64) store.State {
		r := reqs[i]
		s := store.State{
			Allowed: used+cost <= r.Events, Limit: r.Events, Used: used, Remaining: max(r.Events-used, 0),
			Reset: f.now() + micros(r.Limit.Window), Now: f.now(),
		}
		switch {
		case cost > r.Events:
			s.RetryAfter = store.Never
		case !s.Allowed:
			s.RetryAfter = r.Limit.Window
		}
		return s
	}
	for i, s := range f.answer(f.store.Check, reqs) {
		f.want(fmt.Sprint("check ", i), s, want(i, 0, reqs[i].Cost))
	}
	for i, s := range f.answer(f.store.Charge, reqs) {
		f.want(fmt.Sprint("charge ", i), s, want(i, reqs[i].Cost, 0))
	}
	for i, s := range f.answer(f.store.Check, reqs) {
		f.want(fmt.Sprint("second check ", i), s, want(i, reqs[i].Cost, reqs[i].Cost))
	}
}

func testSameBucketTwice(f *fixture) {
	r := f.request()
	other := r
	other.ClientKey = "another client"
	for i, s := range f.answer(f.store.Check, []store.Request{r, other, r}) {
		f.want(fmt.Sprint("check ", i), s, store.State{
			Allowed: true, Limit: 5, Remaining: 5, Reset: f.now() + micros(time.Minute), Now: f.now(),
		})
	}
	more := r
	more.Cost, more.Events = 3, 7
	states := f.answer(f.store.Charge, []store.Request{r, other, more, r, r})
	for i, used := range []int64{1, 1, 4, 5, 6} {
		f.wantUsed(fmt.Sprint("charge ", i), states[i], used)
		if fits := used <= 5; states[i].Allowed != fits {
			f.Errorf("charge %d: allowed %t, want %t", i, states[i].Allowed, fits)
		}
	}
	f.wantUsed("check", f.check(r), 6)
	f.wantUsed("check of the other client", f.check(other), 1)
}

func testRequestsAreReadOnly(f *fixture) {
	reqs := []store.Request{f.request(), f.request(), f.request()}
	reqs[1].ClientKey = "another client"
	reqs[2].Cost = 9
	before := slices.Clone(reqs)
	limit := *reqs[0].Limit
	f.answer(f.store.Check, reqs)
	f.answer(f.store.Charge, reqs)
	if !slices.Equal(reqs, before) || *reqs[0].Limit != limit {
		f.Errorf("requests were %+v and are %+v", before, reqs)
	}
}

// reset empties a bucket. A server that stands still for a moment is asked again.
func (f *fixture) reset(r store.Request) {
	f.Helper()
	err := f.store.Reset(f.Context(), r)
	for end := time.Now().Add(time.Minute); err != nil && time.Now().Before(end); {
		err = f.store.Reset(f.Context(), r)
	}
	if err != nil {
		f.Fatalf("%s: reset: %v", r.Limit.Algorithm, err)
	}
}

// testReset resets buckets of every algorithm and inspects them before and afterwards,
// if the store can.
func testReset(f *fixture) {
	operable, isOperable := f.store.(store.Operable)
	if !isOperable {
		f.Skip("the store cannot inspect")
	}
	for _, kind := range Limits {
		limit := kind
		limit.Zone, limit.Window = "reset."+f.id, time.Hour
		r := store.Request{Limit: &limit, ClientKey: client, Events: 5}
		other := r
		other.ClientKey = "another"
		spend := func(r store.Request, id int) store.State {
			r.Cost, r.ID = 1, "id"+strconv.Itoa(id)
			return f.answer(f.store.Take, []store.Request{r})[0]
		}
		look := func(what string, r store.Request, used int64) {
			f.Helper()
			found := operable.Inspect(f.Context(), r)
			// A server that stands still for a moment is asked again.
			for end := time.Now().Add(time.Minute); len(found.Copies) > 0 && found.Copies[0].State.Err != nil && time.Now().Before(end); {
				found = operable.Inspect(f.Context(), r)
			}
			if len(found.Copies) == 0 || found.Copies[0].Role != store.RolePrimary {
				f.Fatalf("%s, %s: no primary in %+v", limit.Algorithm, what, found)
			}
			st := found.Copies[0].State
			if st.Err != nil || found.Copies[0].Exists != (used > 0) || st.Used != used || st.Limit != 5 || st.Remaining != 5-used || st.Replica {
				f.Errorf("%s, %s: %+v, want %d used", limit.Algorithm, what, found.Copies[0], used)
			}
		}
		look("before anything was spent", r, 0)
		for round := range 2 {
			for id := range 5 {
				if st := spend(r, id); !st.Allowed {
					f.Errorf("%s, round %d: take %d is refused: %+v", limit.Algorithm, round, id, st)
				}
			}
			if st := spend(r, 5); st.Allowed {
				f.Errorf("%s, round %d: six of five are taken", limit.Algorithm, round)
			}
			spend(other, round)
			look("full", r, 5)
			f.reset(r)
			look("after the reset", r, 0)
			look("another client's", other, int64(round+1))
		}
		// A missing bucket can be reset as well.
		f.reset(r)
	}
}
