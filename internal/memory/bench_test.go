package memory_test

import (
	"context"
	"math"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

var benchLimit = limit("api", time.Hour)

// clientKey has 33 bytes, as long as a bucket's key in Redis is measured with.
func clientKey(i int) string {
	n := strconv.Itoa(i)
	return "client:0000000000000000000000000"[:33-1-len(n)] + "/" + n
}

// requests are the requests of n clients.
func requests(n int) []store.Request {
	reqs := make([]store.Request, n)
	for i := range reqs {
		reqs[i] = store.Request{Limit: benchLimit, ClientKey: clientKey(i), Events: 5000, Cost: 1}
	}
	return reqs
}

// BenchmarkTake takes as the limiter does, with room of its own for the answer.
func BenchmarkTake(b *testing.B) {
	s := memory.New(memory.NewBuckets(), memory.Options{})
	keys := []string{clientKey(0), clientKey(1), clientKey(2), clientKey(3)}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		asked := store.Ask{Request: store.Request{Limit: benchLimit, ClientKey: keys[i%len(keys)], Events: 1 << 40, Cost: 1}}
		if s.Take(context.Background(), []*store.Ask{&asked}); !asked.Allowed {
			b.Fatal("refused")
		}
		i++
	}
}

type operation = func(context.Context, []*store.Ask)

func BenchmarkCheck(b *testing.B) {
	benchmarkExisting(b, func(s *memory.Store) operation { return s.Check })
}

func BenchmarkCharge(b *testing.B) {
	benchmarkExisting(b, func(s *memory.Store) operation { return s.Charge })
}

func benchmarkExisting(b *testing.B, of func(*memory.Store) operation) {
	for _, n := range []int{1, 100_000} {
		s := memory.New(memory.NewBuckets(), memory.Options{})
		reqs := requests(n)
		store.Answers(b.Context(), s.Charge, reqs)
		do := of(s)

		b.Run("keys="+strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				store.Answers(context.Background(), do, reqs[i:i+1])
				if i++; i == n {
					i = 0
				}
			}
		})
		b.Run("keys="+strconv.Itoa(n)+"/parallel", func(b *testing.B) {
			b.ReportAllocs()
			var start atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				i := int(start.Add(7919)) % n
				for pb.Next() {
					store.Answers(context.Background(), do, reqs[i:i+1])
					if i++; i == n {
						i = 0
					}
				}
			})
		})
	}
}

// BenchmarkInsert charges clients that were never seen before: while there is
// room, in the place of live buckets, and in the place of expired ones.
func BenchmarkInsert(b *testing.B) {
	const bound = 100_000
	for _, c := range []struct {
		name       string
		maxBuckets int
		window     time.Duration
	}{
		{"room", math.MaxInt, time.Hour},
		{"live", bound, time.Hour},
		{"expired", bound, time.Microsecond},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := memory.New(memory.NewBuckets(), memory.Options{MaxBuckets: c.maxBuckets})
			reqs := requests(bound)
			for i := range reqs {
				reqs[i].Limit = limit("api", c.window)
			}
			store.Answers(b.Context(), s.Charge, reqs)

			req := reqs[:1]
			b.ReportAllocs()
			i := bound
			for b.Loop() {
				req[0].ClientKey = clientKey(i)
				store.Answers(context.Background(), s.Charge, req)
				i++
			}
		})
	}
}

// BenchmarkMemory reports the heap that each of a million buckets takes.
func BenchmarkMemory(b *testing.B) {
	for b.Loop() {
		b.ReportMetric(bytesPerBucket(1_000_000), "B/bucket")
	}
}

func bytesPerBucket(n int) float64 {
	buckets := memory.NewBuckets()
	s := memory.New(buckets, memory.Options{MaxBuckets: n})
	req := []store.Request{{Limit: benchLimit, Events: 5000, Cost: 1}}

	before := heap()
	for i := range n {
		req[0].ClientKey = clientKey(i)
		store.Answers(context.Background(), s.Charge, req)
	}
	after := heap()
	runtime.KeepAlive(buckets)
	return float64(after-before) / float64(n)
}

// heap returns the bytes in use.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
