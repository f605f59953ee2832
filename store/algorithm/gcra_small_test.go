package algorithm_test

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// small is one history of a bucket whose events take little more than a
// microsecond to drain, so that the parts of one show: costs that are spent at
// 0, of which the second, and the third if it is 1, are refunded at instants,
// and one that is spent later.
type small struct {
	events, window            int64
	first, second, third      int64
	refund, again, last, when int64
}

// TestGCRARefundsCreateNothingInSmall goes through all of these.
func TestGCRARefundsCreateNothingInSmall(t *testing.T) {
	for _, rate := range [][2]int64{{1, 1}, {2, 3}, {3, 4}, {5, 7}, {4, 7}, {3, 8}} {
		for i := range int64(4 * 3 * 3 * 5 * 3 * 4 * 5) {
			next := func(n int64) int64 {
				digit := i % n
				i /= n
				return digit
			}
			h := small{events: rate[0], window: rate[1]}
			h.first, h.second, h.third = next(4), 1+next(3), next(3)
			h.refund, h.again, h.last, h.when = next(5), next(3), 2+next(4), next(5)
			if !h.holds(t) {
				return
			}
		}
	}
}

// holds tells whether what is refunded is never more than what was taken.
func (h small) holds(t *testing.T) bool {
	limit := store.Limit{Algorithm: store.GCRA, Window: micros(h.window)}
	with, without := algorithm.New(&limit), algorithm.New(&limit)
	spend := func(b algorithm.Bucket, cost, at int64) store.Request {
		r := store.Request{Limit: &limit, Events: h.events, Cost: cost}
		r.Receipt = charge.Run(b, &r, origin+at).Receipt
		return r
	}
	spend(with, h.first, 0)
	spend(without, h.first, 0)
	second := spend(with, h.second, 0)
	third := spend(with, h.third, 0)
	if h.third != 1 {
		spend(without, h.third, 0)
	}
	for at := range int64(30) {
		if at == h.refund+h.when {
			spend(with, h.last, at)
			spend(without, h.last, at)
		}
		if at == h.refund {
			refund.Run(with, &second, origin+at)
		}
		if at == h.refund+h.again && h.third == 1 {
			refund.Run(with, &third, origin+at)
		}
		if at < h.refund+h.again {
			continue // what is to be refunded is there still
		}
		r := store.Request{Limit: &limit, Events: h.events}
		if got, want := check.Run(with, &r, origin+at).Used, check.Run(without, &r, origin+at).Used; got < want {
			t.Errorf("%+v: %d used at %d with the refunds, %d without the takes", h, got, at, want)
			return false
		}
	}
	return true
}
