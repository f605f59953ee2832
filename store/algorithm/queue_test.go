package algorithm_test

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestForeseenWaitIsNoLongerThanTheWait lets requests wait in line, each taking
// as soon as it fits: none is told at its arrival that it takes longer than it
// then does, nor that it takes much less.
func TestForeseenWaitIsNoLongerThanTheWait(t *testing.T) {
	const start, waiting = 1_800_000_030_000_000, 25
	for _, a := range []store.Algorithm{store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA} {
		for _, events := range []int64{1, 3, 10} {
			for _, used := range []int64{0, 1, events, 3 * events} {
				limit := &store.Limit{Zone: "zone", Algorithm: a, Window: time.Minute}
				b := algorithm.New(limit)
				if used > 0 {
					b.Charge(&store.Request{Limit: limit, Events: events, Cost: used, ID: "before"}, start-int64(1e6))
				}
				var foreseen [waiting]int64
				for i := range foreseen {
					r := &store.Request{Limit: limit, Events: events, Cost: 1, Ahead: int64(i)}
					foreseen[i] = b.View(r, start, false).RetryAfter.Microseconds()
				}
				now := int64(start)
				for i := range foreseen {
					r := &store.Request{Limit: limit, Events: events, Cost: 1, ID: string(rune('a' + i))}
					for !b.Take(r, now) {
						now += b.View(r, now, false).RetryAfter.Microseconds()
					}
					waited := now - start
					if foreseen[i] > waited {
						t.Errorf("%s, %d events, %d used: number %d was told %d µs and waited %d", a, events, used, i, foreseen[i], waited)
					}
					// Two windows less is near enough to turn away whoever waits in
					// vain; the sliding window is slower than any bound tells.
					if floor := waited - 2*limit.Window.Microseconds(); foreseen[i] < floor && a != store.SlidingWindow {
						t.Errorf("%s, %d events, %d used: number %d was told %d µs only, and waited %d", a, events, used, i, foreseen[i], waited)
					}
				}
			}
		}
	}
}

// TestBusyTimeOfGCRAEndsBeforeItsSumsAreTooLarge: a bucket that is never empty
// and sees many refunds goes on as before.
func TestBusyTimeOfGCRAEndsBeforeItsSumsAreTooLarge(t *testing.T) {
	const now = 1_800_000_000_000_000
	limit := &store.Limit{Zone: "zone", Algorithm: store.GCRA, Window: 720 * time.Hour}
	b := new(algorithm.GCRA)
	r := &store.Request{Limit: limit, Events: 100, Cost: 1}
	b.Charge(r, now)
	first := b.View(r, now, true)
	r.Cost = 99
	for i := range 4000 {
		if !b.Take(r, now) {
			t.Fatalf("take %d is refused", i)
		}
		r.Receipt = b.View(r, now, true).Receipt
		b.Refund(r, now)
		if b.Refunded < 0 || b.Refunded > store.MaxInteger || b.Busy > store.MaxInteger || r.Receipt.Position > store.MaxInteger {
			t.Fatalf("after %d refunds: %+v", i+1, *b)
		}
	}
	if s := b.View(r, now, false); s.Used != first.Used || s.Reset != first.Reset {
		t.Errorf("after all refunds: %+v, want what it was: %+v", s, first)
	}
}
