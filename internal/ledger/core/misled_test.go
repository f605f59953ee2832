package core

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// running is a request that was served.
type running struct {
	store.Request
	ends   int64
	isFree bool
}

// server is a primary that answers at once, and holds takes.
type server struct {
	bucket algorithm.Bucket
	held   *algorithm.Held
}

func (s *server) run(op algorithm.Operation, r *store.Request, now int64) store.State {
	st := op.Run(s.bucket, r, now)
	s.held = s.held.After(op, r, &st)
	return st
}

// TestRefusalsDoNotMislead: nobody is told to come again at the end of the window although something comes back before,
// where all takes are held, and few are elsewhere.
func TestRefusalsDoNotMislead(t *testing.T) {
	for _, c := range []struct {
		events                     int64
		rate, seconds, free, share float64
	}{{5, 1, 0.5, 0.9, 0}, {5, 5, 2, 0.5, 0}, {16, 5, 1, 0.3, 0}, {5, 20, 0.2, 0, 0}, {100, 20, 10, 0.3, 0.1}} {
		refused, misled, hasty := 0, 0, 0
		for seed := range uint64(5) {
			rng := rand.New(rand.NewPCG(seed, 1))
			after := func(mean float64) int64 { return int64(rng.ExpFloat64()*mean*1e6) + 1 }
			r := requestOf("alice", c.events)
			s, m := server{bucket: algorithm.New(r.Limit)}, &Moment{Now: 1, Trust: 1_000_000}
			b := New(0, m)
			var open []running
			var finals, room []int64
			refusedAt, returned := int64(0), int64(0)
			for end := m.Now + r.Limit.Window.Microseconds(); ; {
				arrival := m.Now + after(1/c.rate)
				for len(open) > 0 && open[0].ends <= arrival {
					ended := open[0]
					open, m.Now = open[1:], ended.ends
					if ended.isFree {
						room = append(room, m.Now)
					} else if ended.Cost = 0; !ended.MayHold() {
						continue
					}
					b.RefundSent(&ended.Request, m)
					st := s.run(algorithm.Refund, &ended.Request, m.Now)
					b.RefundArrived(&ended.Request, &st, m.Now, m)
					returned = m.Now
				}
				if m.Now = arrival; arrival >= end {
					break
				}
				r.Hold, r.Receipt = store.NewHold(), store.Receipt{}
				var st store.State
				if do, _ := b.AskTake(&r, &st, m); do == Take {
					sent := r
					mark := b.TakeSent(&sent, m)
					st = s.run(algorithm.Take, &sent, m.Now)
					b.TakeAnswered(&sent, &st, m.Now, mark, m)
					if isHasty := m.Now-refusedAt <= heldPause && refusedAt > returned; !st.Allowed {
						refusedAt = m.Now
						if isHasty {
							hasty++
						}
					}
				}
				if !st.Allowed {
					if refused++; st.RetryAfter > time.Second {
						finals = append(finals, m.Now)
					}
					continue
				}
				served := running{r, m.Now + after(c.seconds), rng.Float64() < c.free}
				served.NoteHold(&st)
				served.Receipt = st.Receipt
				open = append(open, served)
				slices.SortFunc(open, func(a, b running) int { return int(a.ends - b.ends) })
			}
			for _, at := range finals {
				if slices.ContainsFunc(room, func(came int64) bool { return came > at }) {
					misled++
				}
			}
		}
		if refused == 0 || float64(misled) > c.share*float64(refused) {
			t.Errorf("%+v: %d of %d refusals misled", c, misled, refused)
		}
		if hasty > 0 {
			t.Errorf("%+v: %d calls are refused within 50 ms of another", c, hasty)
		}
	}
}
