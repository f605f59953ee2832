package caddytest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// Bucket is what Redis holds under a key.
type Bucket struct {
	Count int64 `redis:"c"`
	Reset int64 `redis:"r"`
}

// ReadBuckets returns all buckets that a client can see, by key, without what takes hold of them.
func ReadBuckets(t *testing.T, client *goredis.Client) map[string]Bucket {
	t.Helper()
	ctx := t.Context()
	keys, err := client.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	found, pipe := map[string]*goredis.SliceCmd{}, client.Pipeline()
	for _, key := range keys {
		if strings.Contains(key, ":3:") && !strings.Contains(key, " ") { // no other key is a bucket
			found[key] = pipe.HMGet(ctx, key, "c", "r")
		}
	}
	_, _ = pipe.Exec(ctx) // each command has its error
	read := map[string]Bucket{}
	for key, fields := range found {
		if fields.Err() == nil && fields.Val()[0] == nil {
			continue // it has expired since
		}
		var b Bucket
		if err := fields.Scan(&b); err != nil {
			t.Fatalf("bucket %s: %v", key, err)
		}
		read[key] = b
	}
	return read
}

// BucketsOf returns the buckets of a zone on one server by client: what comes after
// the last colon of a key, and so its value where it is one placeholder's.
func BucketsOf(t *testing.T, server *redistest.Server, zone string) map[string]Bucket {
	t.Helper()
	found := map[string]Bucket{}
	for key, b := range ReadBuckets(t, server.Client()) {
		if strings.Contains(key, ":"+zone+":") {
			found[key[strings.LastIndexByte(key, ':')+1:]] = b
		}
	}
	return found
}

// Buckets returns the buckets of a zone on all primaries by client. A client
// that has buckets on two of them fails the test.
func (s Shards) Buckets(t *testing.T, zone string) map[string]Bucket {
	t.Helper()
	all := map[string]Bucket{}
	for _, shard := range s {
		for client, b := range BucketsOf(t, shard.Primary, zone) {
			if _, ok := all[client]; ok {
				t.Fatalf("client %s has a bucket of zone %s on two shards", client, zone)
			}
			all[client] = b
		}
	}
	return all
}

// Counts returns the counts of a zone by client, without those of zero.
func (s Shards) Counts(t *testing.T, zone string) map[string]int64 {
	t.Helper()
	counts := map[string]int64{}
	for client, b := range s.Buckets(t, zone) {
		if b.Count != 0 {
			counts[client] = b.Count
		}
	}
	return counts
}

// AwaitCounts waits until the counts of a zone are the wanted ones, because charges
// arrive after their responses.
func (s Shards) AwaitCounts(t *testing.T, zone string, wanted map[string]int64) {
	t.Helper()
	Eventually(t, "zone "+zone+" is charged", func() error {
		if got := s.Counts(t, zone); !maps.Equal(got, wanted) {
			return fmt.Errorf("counts are %v, want %v", got, wanted)
		}
		return nil
	})
}

// AwaitCount is AwaitCounts for one client.
func (s Shards) AwaitCount(t *testing.T, zone, client string, wanted int64) {
	t.Helper()
	Eventually(t, "client "+client+" is charged", func() error {
		return Want("its count in zone "+zone, s.Counts(t, zone)[client], wanted)
	})
}

// AwaitSum waits until the counts of all buckets whose keys begin with prefix
// add up to the wanted number.
func (s Shards) AwaitSum(t *testing.T, prefix string, wanted int64) {
	t.Helper()
	Eventually(t, "all requests are charged", func() error { return Want("sum of the counts", s.Sum(t, prefix), wanted) })
}

// Sum returns the sum of the counts of all buckets whose keys begin with prefix.
func (s Shards) Sum(t *testing.T, prefix string) (sum int64) {
	t.Helper()
	for _, shard := range s {
		for key, b := range ReadBuckets(t, shard.Primary.Client()) {
			if strings.HasPrefix(key, prefix) {
				sum += b.Count
			}
		}
	}
	return sum
}

// Owner returns the index of the shard that holds the client's bucket.
func (s Shards) Owner(t *testing.T, zone, client string) int {
	t.Helper()
	for i, shard := range s {
		if _, ok := BucketsOf(t, shard.Primary, zone)[client]; ok {
			return i
		}
	}
	t.Fatalf("no shard has client %s of zone %s", client, zone)
	return -1
}

// Now is the time of the first primary, in microseconds.
func (s Shards) Now(t *testing.T) int64 {
	t.Helper()
	now, err := s[0].Primary.Client().Time(t.Context()).Result()
	Must(t, "ask for the time", err)
	return now.UnixMicro()
}

// Content is what Redis holds of one bucket of any algorithm, and zero for a
// bucket that does not exist.
type Content struct {
	// Used is the cost that was spent and still counts.
	Used int64
	// Spent describes the spent cost: equal texts mean that it is the same.
	Spent string
	// Penalty is the instant at which the client's penalty ends, or 0.
	Penalty int64
	// Members are the instants of events, or those at which leases end, where
	// they are kept one by one.
	Members map[string]int64
}

// Content returns the content of a client's bucket.
func (s Shards) Content(t *testing.T, zone, client string) Content {
	t.Helper()
	var found []Content
	for _, shard := range s {
		redis := shard.Primary.Client()
		pipe := redis.Pipeline()
		keys, now := pipe.Keys(t.Context(), "rl:3:"+zone+":*:"+client), pipe.Time(t.Context())
		_, err := pipe.Exec(t.Context())
		Must(t, "find the bucket", err)
		for _, key := range keys.Val() {
			c, err := readContent(t, redis, key, now.Val())
			if errors.Is(err, goredis.Nil) {
				continue // it has expired since
			}
			Must(t, "read "+key, err)
			found = append(found, c)
		}
	}
	switch len(found) {
	case 0:
		return Content{}
	case 1:
		return found[0]
	}
	t.Fatalf("client %s has %d buckets of zone %s", client, len(found), zone)
	return Content{}
}

// AwaitUsed waits until that much of a bucket is used, because charges and
// refunds arrive after their responses.
func (s Shards) AwaitUsed(t *testing.T, zone, client string, used int64) {
	t.Helper()
	Eventually(t, "client "+client+" has settled", func() error {
		return Want("the used cost of zone "+zone, s.Content(t, zone, client).Used, used)
	})
}

// readContent reads a bucket at that time. Where it has expired the error is [goredis.Nil].
func readContent(t *testing.T, redis *goredis.Client, key string, now time.Time) (Content, error) {
	ctx := t.Context()
	rule := strings.Split(key, ":")[3]
	switch {
	case strings.HasPrefix(rule, "fw"):
		var b struct {
			Count   int64 `redis:"c"`
			Reset   int64 `redis:"r"`
			Penalty int64 `redis:"p"`
		}
		err := redis.HMGet(ctx, key, "c", "r", "p").Scan(&b)
		return Content{Used: b.Count, Spent: fmt.Sprint(b.Count, " ", b.Reset), Penalty: b.Penalty}, err
	case strings.HasPrefix(rule, "sw"):
		n, err := readNumbers(t, redis, key, 5)
		return Content{Used: n[1] + n[2], Spent: fmt.Sprint(n[:3]), Penalty: n[3]}, err
	case strings.HasPrefix(rule, "gcra"):
		n, err := readNumbers(t, redis, key, 7)
		if err != nil {
			return Content{}, err
		}
		// What has not drained yet, in whole events; a mean of rates is not exact.
		left, events, span := max(n[0]-now.UnixMicro(), 0), n[2], n[5]
		used := int64(math.Ceil(float64(left)*float64(events)/float64(max(span, 1)) - 1e-6))
		return Content{Used: used, Spent: fmt.Sprint(n[:3]), Penalty: n[6]}, err
	}
	// Events of the log keep for longer than any test; leases end.
	c := Content{Members: map[string]int64{}}
	members, err := redis.ZRangeWithScores(ctx, key, 0, -1).Result()
	for _, m := range members {
		// The member of the digit k of a request's cost has its instant times 2^(53k).
		_, exponent := math.Frexp(m.Score)
		digit := (exponent - 1) / 53
		if at := int64(math.Ldexp(m.Score, -53*digit)); !strings.HasPrefix(rule, "cc") || at > now.UnixMicro() {
			c.Members[m.Member.(string)] = at
			c.Used += 1 << digit
		}
	}
	c.Spent = fmt.Sprint(c.Members)
	return c, err
}

// readNumbers reads packed doubles.
func readNumbers(t *testing.T, redis *goredis.Client, key string, count int) ([]int64, error) {
	numbers := make([]int64, count)
	packed, err := redis.Get(t.Context(), key).Bytes()
	if err != nil {
		return numbers, err
	}
	if len(packed) != 8*count {
		return numbers, fmt.Errorf("%d bytes, want %d numbers", len(packed), count)
	}
	for i := range numbers {
		numbers[i] = int64(math.Float64frombits(binary.LittleEndian.Uint64(packed[8*i:])))
	}
	return numbers, nil
}
