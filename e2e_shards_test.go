package shardlimit_test

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// shards are real Redis shards, which configs call a, b, c and so on.
type shards []*redistest.Shard

// startShards starts n primaries, each with as many replicas as asked for.
func startShards(t *testing.T, n, replicas int) shards {
	t.Helper()
	s := make(shards, n)
	together(t, n, func(i int) (err error) {
		if s[i], err = redistest.LaunchShard(replicas); err == nil {
			t.Cleanup(func() {
				if err := s[i].Stop(); err != nil {
					t.Error(err)
				}
			})
		}
		return err
	})
	return s
}

// shardName is what configs call the shard with that index.
func shardName(i int) string { return string(rune('a' + i)) }

// patient are timeouts that even a busy machine keeps, for tests that are
// about something else.
var patient = []string{"check_timeout 1m", "charge_timeout 1m", "dial_timeout 1m"}

// store is the global option for a Redis store on the shards. Options are lines
// such as "db 1".
func (s shards) store(options ...string) string {
	var lines []string
	for i, shard := range s {
		lines = append(lines, shardOf(shardName(i), shard))
	}
	return redisStore(append(lines, options...)...)
}

// redisStore is the global option for a Redis store with these lines; those of
// patient hold where there is no other.
func redisStore(lines ...string) string {
	given := map[string]bool{}
	for _, line := range lines {
		name, _, _ := strings.Cut(line, " ")
		given[name] = true
	}
	for _, line := range patient {
		if name, _, _ := strings.Cut(line, " "); !given[name] {
			lines = append(lines[:len(lines):len(lines)], line)
		}
	}
	return "rate_limit {\n\t\tstore redis {\n" + strings.Join(lines, "\n") + "\n\t\t}\n\t}"
}

// shardWith is a shard with these lines.
func shardWith(name string, lines ...string) string {
	return "shard " + name + " {\n" + strings.Join(lines, "\n") + "\n}"
}

// shardOf is a shard of given servers, with more lines.
func shardOf(name string, shard *redistest.Shard, more ...string) string {
	lines := []string{"primary " + shard.Primary.Addr()}
	for _, replica := range shard.Replicas {
		lines = append(lines, "replica "+replica.Addr())
	}
	return shardWith(name, append(lines, more...)...)
}

// bucket is what Redis holds under a key.
type bucket struct {
	Count int64 `redis:"c"`
	Reset int64 `redis:"r"`
}

// readBuckets returns all buckets that a client can see, by key.
func readBuckets(t *testing.T, client *goredis.Client) map[string]bucket {
	t.Helper()
	ctx := t.Context()
	keys, err := client.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	read := map[string]bucket{}
	for _, key := range keys {
		fields := client.HMGet(ctx, key, "c", "r")
		if fields.Err() == nil && fields.Val()[0] == nil {
			continue // it has expired since
		}
		var b bucket
		if err := fields.Scan(&b); err != nil {
			t.Fatalf("bucket %s: %v", key, err)
		}
		read[key] = b
	}
	return read
}

// find returns the buckets of a zone on one server by client: what comes after
// the last colon of a key, and so its value where it is one placeholder's.
func find(t *testing.T, server *redistest.Server, zone string) map[string]bucket {
	t.Helper()
	found := map[string]bucket{}
	for key, b := range readBuckets(t, server.Client()) {
		if strings.Contains(key, ":"+zone+":") {
			found[key[strings.LastIndexByte(key, ':')+1:]] = b
		}
	}
	return found
}

// buckets returns the buckets of a zone on all primaries by client. A client
// that has buckets on two of them fails the test.
func (s shards) buckets(t *testing.T, zone string) map[string]bucket {
	t.Helper()
	all := map[string]bucket{}
	for _, shard := range s {
		for client, b := range find(t, shard.Primary, zone) {
			if _, ok := all[client]; ok {
				t.Fatalf("client %s has a bucket of zone %s on two shards", client, zone)
			}
			all[client] = b
		}
	}
	return all
}

// counts returns the counts of a zone by client, without those of zero.
func (s shards) counts(t *testing.T, zone string) map[string]int64 {
	t.Helper()
	counts := map[string]int64{}
	for client, b := range s.buckets(t, zone) {
		if b.Count != 0 {
			counts[client] = b.Count
		}
	}
	return counts
}

// awaitCounts waits until the counts of a zone are the wanted ones, for charges
// arrive after their responses.
func (s shards) awaitCounts(t *testing.T, zone string, wanted map[string]int64) {
	t.Helper()
	eventually(t, "zone "+zone+" is charged", func() error {
		if got := s.counts(t, zone); !maps.Equal(got, wanted) {
			return fmt.Errorf("counts are %v, want %v", got, wanted)
		}
		return nil
	})
}

// awaitCount is awaitCounts for one client.
func (s shards) awaitCount(t *testing.T, zone, client string, wanted int64) {
	t.Helper()
	eventually(t, "client "+client+" is charged", func() error {
		return want("its count in zone "+zone, s.counts(t, zone)[client], wanted)
	})
}

// awaitSum waits until the counts of all buckets whose keys begin with prefix
// add up to the wanted number.
func (s shards) awaitSum(t *testing.T, prefix string, wanted int64) {
	t.Helper()
	eventually(t, "all requests are charged", func() error {
		sum := int64(0)
		for _, shard := range s {
			for key, b := range readBuckets(t, shard.Primary.Client()) {
				if strings.HasPrefix(key, prefix) {
					sum += b.Count
				}
			}
		}
		return want("sum of the counts", sum, wanted)
	})
}

// awaitReplicas waits until the replicas have what the primaries have.
func (s shards) awaitReplicas(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	for _, shard := range s {
		must(t, "replicate", shard.WaitReplicated(ctx))
	}
}

// owner returns the index of the shard that holds the client's bucket.
func (s shards) owner(t *testing.T, zone, client string) int {
	t.Helper()
	for i, shard := range s {
		if _, ok := find(t, shard.Primary, zone)[client]; ok {
			return i
		}
	}
	t.Fatalf("no shard has client %s of zone %s", client, zone)
	return -1
}

// replicas are those of all shards.
func (s shards) replicas() (all []*redistest.Server) {
	for _, shard := range s {
		all = append(all, shard.Replicas...)
	}
	return all
}

// tally counts by client.
type tally struct {
	mu sync.Mutex
	n  map[string]int64
}

func (c *tally) add(client string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int64{}
	}
	c.n[client]++
}

func (c *tally) total() (sum int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.n {
		sum += n
	}
	return sum
}

// clients is how many clients c has counted.
func (c *tally) clients() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.n)
}

// awaitGrowth waits until c has counted n more.
func (c *tally) awaitGrowth(t *testing.T, n int64) {
	t.Helper()
	wanted := c.total() + n
	eventually(t, "requests are answered", func() error {
		if got := c.total(); got < wanted {
			return fmt.Errorf("%d were, want %d", got, wanted)
		}
		return nil
	})
}
