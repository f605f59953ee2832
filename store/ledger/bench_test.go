package ledger

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// instant is a store that answers at once, so that what is measured is the
// ledger.
type instant struct{ simulation }

func (*instant) answer(reqs []store.Request) []store.State {
	now := time.Now().UnixMicro()
	states := make([]store.State, len(reqs))
	for i := range reqs {
		b := algorithm.NewFixedWindow(1, now+time.Hour.Microseconds(), 0)
		states[i] = b.View(&reqs[i], now, false)
	}
	return states
}

func (s *instant) Check(_ context.Context, reqs []store.Request) []store.State { return s.answer(reqs) }

func (s *instant) Take(_ context.Context, reqs []store.Request) []store.State { return s.answer(reqs) }

func (s *instant) ChargeReported(reqs []store.Request, report func(i int, st store.State)) {
	for i, st := range s.answer(reqs) {
		report(i, st)
	}
}

// BenchmarkLedger is what the ledger adds to a request, beside the store.
func BenchmarkLedger(b *testing.B) {
	requests := make([]store.Request, 10_000)
	for i := range requests {
		requests[i] = requestOf("client-"+strconv.Itoa(i), 1_000_000)
	}
	for _, c := range []struct {
		name string
		run  func(l *Ledger, reqs []store.Request, states []store.State)
	}{
		{"store alone", func(l *Ledger, reqs []store.Request, _ []store.State) {
			l.store.Check(context.Background(), reqs)
			l.store.ChargeReported(reqs, func(int, store.State) {})
		}},
		{"charge after", func(l *Ledger, reqs []store.Request, states []store.State) {
			l.Admit(context.Background(), reqs, states)
			l.Settle(reqs, nil)
		}},
		{"charge before", func(l *Ledger, reqs []store.Request, _ []store.State) { l.Take(context.Background(), reqs) }},
		{"batch", func(l *Ledger, reqs []store.Request, _ []store.State) {
			reqs[0].Batch = 1000
			l.Take(context.Background(), reqs)
		}},
		{"refused", func(l *Ledger, reqs []store.Request, states []store.State) {
			reqs[0].Events = 1
			l.Admit(context.Background(), reqs, states)
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			l := New(NewBooks(nil), new(instant), Options{})
			defer l.Leave()
			b.ReportAllocs()
			// The caller has room for them.
			states := make([]store.State, 1)
			for i := 0; b.Loop(); i++ {
				clear(states)
				c.run(l, []store.Request{requests[i%len(requests)]}, states)
			}
		})
	}
}
