package main

import (
	"slices"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	seed   = 2017
	events = 12
	window = time.Hour
)

// score is how an algorithm decided, against the exact log.
type score struct {
	requests int
	// over is how many the log refused.
	over int
	// refused and admitted are how many decisions were wrong that way, each
	// side remembering what it admitted itself.
	refused, admitted int
	// differ is how many decisions differ if both remember what the log
	// admitted.
	differ int
	// most is the most that was admitted to one client in one window, or at
	// the same time.
	most int
}

func (s *score) add(o score) {
	s.requests += o.requests
	s.over += o.over
	s.refused += o.refused
	s.admitted += o.admitted
	s.differ += o.differ
	s.most = max(s.most, o.most)
}

// scores are those of each way, by traffic; the last is all together.
type scores [][]score

// of returns the scores of an algorithm's first way.
func (s scores) of(a store.Algorithm) []score {
	return s[slices.IndexFunc(ways, func(w way) bool { return w.algorithm == a })]
}

// worst is the most that was admitted, relative to what should be.
func (s score) worst(w way) float64 {
	if w.algorithm == store.Concurrency {
		return float64(s.most) / slots
	}
	return float64(s.most) / events
}

// simulate sends requests through every way of counting.
func simulate(requests int) scores {
	result := make(scores, len(ways))
	for i := range result {
		result[i] = make([]score, len(traffics)+1)
	}
	for number, c := range clients(seed, requests) {
		for i, w := range ways {
			var s score
			if w.algorithm == store.Concurrency {
				s = countRunning(w, uint64(number), c.times)
			} else {
				s = compare(w, c.times)
			}
			result[i][c.traffic].add(s)
			result[i][len(traffics)].add(s)
		}
	}
	return result
}

// compare sends one client's requests through an algorithm and the exact log.
func compare(w way, times []int64) score {
	s := score{requests: len(times)}
	limit := w.limit(window)
	exact := newCounter(&store.Limit{Algorithm: store.SlidingLog, Window: window}, events, 0)
	own := newCounter(limit, events, w.burst)
	same := newCounter(limit, events, w.burst)
	var taken []int64
	for i, now := range times {
		id := strconv.Itoa(i)
		fits := exact.do(algorithm.Take, id, now).Allowed
		took := own.do(algorithm.Take, id, now).Allowed
		switch {
		case fits && !took:
			s.refused++
		case took && !fits:
			s.admitted++
		}
		if !fits {
			s.over++
		}
		if took {
			taken = append(taken, now)
		}
		if same.do(algorithm.Check, id, now).Allowed != fits {
			s.differ++
		}
		if fits {
			same.do(algorithm.Charge, id, now)
		}
	}
	s.most = most(taken, window.Microseconds())
	return s
}
