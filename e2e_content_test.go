package shardlimit_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// content is what Redis holds of one bucket, of whatever algorithm. That of a
// bucket which is not there is zero.
type content struct {
	// used is what was spent and still counts.
	used int64
	// spent describes what was spent: equal texts mean that it is the same.
	spent string
	// penalty is the instant at which the client's penalty ends, or 0.
	penalty int64
	// members are the instants of events, or those at which leases end, where
	// they are kept one by one.
	members map[string]int64
}

// content returns that of a client's bucket.
func (s shards) content(t *testing.T, zone, client string) content {
	t.Helper()
	var found []content
	for _, shard := range s {
		redis := shard.Primary.Client()
		keys, err := redis.Keys(t.Context(), "rl:1:"+zone+":*:"+client).Result()
		must(t, "find the bucket", err)
		for _, key := range keys {
			c, err := readContent(t, redis, key)
			if errors.Is(err, goredis.Nil) {
				continue // it has expired since
			}
			must(t, "read "+key, err)
			found = append(found, c)
		}
	}
	switch len(found) {
	case 0:
		return content{}
	case 1:
		return found[0]
	}
	t.Fatalf("client %s has %d buckets of zone %s", client, len(found), zone)
	return content{}
}

// awaitUsed waits until that much of a bucket is used, for charges and refunds
// arrive after their responses.
func (s shards) awaitUsed(t *testing.T, zone, client string, used int64) {
	t.Helper()
	eventually(t, "client "+client+" has settled", func() error {
		return want("what is used of zone "+zone, s.content(t, zone, client).used, used)
	})
}

// now is the time of the first primary, in microseconds.
func (s shards) now(t *testing.T) int64 {
	t.Helper()
	now, err := s[0].Primary.Client().Time(t.Context()).Result()
	must(t, "ask for the time", err)
	return now.UnixMicro()
}

func readContent(t *testing.T, redis *goredis.Client, key string) (content, error) {
	ctx := t.Context()
	rule := strings.Split(key, ":")[3]
	now, err := redis.Time(ctx).Result()
	if err != nil {
		return content{}, err
	}
	switch {
	case strings.HasPrefix(rule, "fw"):
		var b struct {
			Count   int64 `redis:"c"`
			Reset   int64 `redis:"r"`
			Penalty int64 `redis:"p"`
		}
		err := redis.HMGet(ctx, key, "c", "r", "p").Scan(&b)
		return content{used: b.Count, spent: fmt.Sprint(b.Count, " ", b.Reset), penalty: b.Penalty}, err
	case strings.HasPrefix(rule, "sw"):
		n, err := readNumbers(t, redis, key, 4)
		return content{used: n[1] + n[2], spent: fmt.Sprint(n[:3]), penalty: n[3]}, err
	case strings.HasPrefix(rule, "gcra"):
		n, err := readNumbers(t, redis, key, 6)
		if err != nil {
			return content{}, err
		}
		window, err := time.ParseDuration(rule[len("gcra"):])
		// What has not drained yet, in whole events.
		left, events := max(n[0]-now.UnixMicro(), 0), n[2]
		used := int64(math.Ceil(float64(left) * float64(events) / float64(window.Microseconds())))
		return content{used: used, spent: fmt.Sprint(n[:3]), penalty: n[5]}, err
	}
	// Events of the log keep for longer than any test; leases end.
	c := content{members: map[string]int64{}}
	members, err := redis.ZRangeWithScores(ctx, key, 0, -1).Result()
	for _, m := range members {
		if at := int64(m.Score); !strings.HasPrefix(rule, "cc") || at > now.UnixMicro() {
			c.members[m.Member.(string)] = at
		}
	}
	c.used, c.spent = int64(len(c.members)), fmt.Sprint(c.members)
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
