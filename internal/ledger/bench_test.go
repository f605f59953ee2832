package ledger

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// instant is a store that answers at once, so that benchmarks measure the ledger alone.
type instant struct{ simulation }

func (*instant) view(r *store.Request) store.State {
	now := time.Now().UnixMicro()
	b := &algorithm.FixedWindow{Used: 1, Reset: now + time.Hour.Microseconds()}
	return b.View(r, now, false)
}

func (s *instant) answer(asks []*store.Ask) {
	for _, a := range asks {
		a.State = s.view(&a.Request)
	}
}

func (s *instant) Check(_ context.Context, asks []*store.Ask) {
	s.answer(asks)
}

func (s *instant) Take(_ context.Context, asks []*store.Ask) {
	s.answer(asks)
}

func (s *instant) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	for i := range reqs {
		report(i, s.view(reqs[i]))
	}
}

// BenchmarkLedger measures what the ledger adds to a request.
func BenchmarkLedger(b *testing.B) {
	requests := make([]store.Request, 10_000)
	for i := range requests {
		requests[i] = requestOf("client-"+strconv.Itoa(i), 1_000_000)
	}
	for _, c := range []struct {
		name string
		run  func(l *Ledger, reqs []store.Request, asks []*store.Ask)
	}{
		{"store alone", func(l *Ledger, reqs []store.Request, _ []*store.Ask) {
			store.Answers(context.Background(), l.Check, reqs)
			l.ChargeReported(storetest.Posts(reqs), func(int, store.State) {})
		}},
		{"charge after", func(l *Ledger, reqs []store.Request, asks []*store.Ask) {
			l.Admit(context.Background(), asks)
			l.Settle(storetest.Posts(reqs), nil)
		}},
		{"charge before", func(l *Ledger, reqs []store.Request, _ []*store.Ask) {
			store.Answers(context.Background(), l.Take, reqs)
		}},
		{"batch", func(l *Ledger, reqs []store.Request, _ []*store.Ask) {
			reqs[0].Batch = 1000
			store.Answers(context.Background(), l.Take, reqs)
		}},
		{"refused", func(l *Ledger, _ []store.Request, asks []*store.Ask) {
			asks[0].Events = 1
			l.Admit(context.Background(), asks)
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			l := New(NewRegistry(nil), new(instant), Options{})
			defer l.Leave()
			b.ReportAllocs()
			// Callers have room for what they ask.
			asked := new(store.Ask)
			asks := []*store.Ask{asked}
			for i := 0; b.Loop(); i++ {
				*asked = store.Ask{Request: requests[i%len(requests)]}
				c.run(l, []store.Request{asked.Request}, asks)
			}
		})
	}
}

// BenchmarkRedis measures a check and a charge by 64 callers on 500 clients, with the
// ledger and without; cpu-µs/op is this process's time.
func BenchmarkRedis(b *testing.B) {
	sh := redistest.StartShard(b, 1)
	shard := redis.NewShard(redis.ShardOptions{Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()}})
	b.Cleanup(func() { shard.Close(context.Background()) })
	s := redis.New(redis.Options{Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: 5 * time.Second, ChargeTimeout: 5 * time.Second})
	l := New(NewRegistry(nil), s, Options{})
	b.Cleanup(l.Leave)
	limit := store.Limit{Zone: "bench", Algorithm: store.FixedWindow, Window: time.Hour}
	reqs := make([][]store.Request, 500)
	for i := range reqs {
		reqs[i] = []store.Request{{Limit: &limit, ClientKey: "client-" + strconv.Itoa(i), Events: 1 << 40, Cost: 1}}
	}
	for _, c := range []struct {
		name string
		do   func(r []store.Request) store.State
	}{
		{"store alone", func(r []store.Request) store.State {
			st := store.Answers(context.Background(), s.Check, r)[0]
			s.ChargeReported(storetest.Posts(r), nil)
			return st
		}},
		{"ledger", func(r []store.Request) store.State {
			asked := store.Ask{Request: r[0]}
			l.Admit(context.Background(), []*store.Ask{&asked})
			l.Settle(storetest.Posts(r), nil)
			return asked.State
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(32)
			before := cpu()
			var n atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if st := c.do(reqs[n.Add(1)%int64(len(reqs))]); st.Err != nil {
						b.Error(st.Err)
						return
					}
				}
			})
			b.ReportMetric(float64((cpu()-before).Nanoseconds())/1e3/float64(b.N), "cpu-µs/op")
		})
	}
}

// cpu returns the processor time that this process has used.
func cpu() time.Duration {
	used, _ := process.CPUTime()
	return used
}

// BenchmarkWalk visits a million buckets; µs/chunk is how long a stripe is locked for
// [walkSize] entries, on average.
func BenchmarkWalk(b *testing.B) {
	const clients = 1_000_000
	l := New(NewRegistry(nil), new(instant), Options{})
	defer l.Leave()
	limit := store.Limit{Zone: "bench", Algorithm: store.FixedWindow, Window: time.Hour}
	for i := range clients {
		r := []store.Request{{Limit: &limit, ClientKey: "client-" + strconv.Itoa(i), Events: 100, Cost: 1}}
		l.Admit(context.Background(), store.Asks(r))
		l.Settle(storetest.Posts(r), nil)
	}
	visited := 0
	b.ReportAllocs()
	for b.Loop() {
		l.Walk([]store.Request{{Limit: &limit, Events: 100}}, hasLimit, func(int, string, *store.State) { visited++ })
	}
	b.ReportMetric(b.Elapsed().Seconds()*1e6*walkSize/float64(visited), "µs/chunk")
	if visited != b.N*clients {
		b.Errorf("%d walks visited %d buckets", b.N, visited)
	}
}
