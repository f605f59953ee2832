package storetest

import (
	"fmt"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// testLimitsHaveOwnBuckets uses limits and client keys that would be one if
// their texts were only put side by side.
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

// testClientKeysHaveOwnBuckets uses client keys as clients could send them to
// hit somebody else's bucket.
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
	// Around the lengths at which a store could begin to shorten keys.
	for _, n := range []int{15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025} {
		keys = append(keys, long[:n], long[:n-1]+"x", "x"+long[:n-1])
	}
	limit := f.limit("zone", time.Minute)
	var reqs []store.Request
	for _, k := range keys {
		reqs = append(reqs, store.Request{Limit: limit, ClientKey: k, Events: 1000})
	}
	f.wantOwnBuckets(reqs)
}

// wantOwnBuckets charges each request another cost, which is thereby its
// bucket's name.
func (f *fixture) wantOwnBuckets(reqs []store.Request) {
	f.Helper()
	for i := range reqs {
		reqs[i].Cost = int64(i + 1)
		f.wantUsed("first charge of "+describe(reqs[i]), f.charge(reqs[i]), int64(i+1))
	}
	for i, s := range f.answer(f.store.Check(f.Context(), reqs), len(reqs)) {
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
