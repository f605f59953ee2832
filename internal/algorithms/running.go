package main

import (
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	slots    = 2
	lease    = 30 * time.Second
	renewal  = 10 * time.Second
	duration = 2 * time.Minute // on average
)

// running is what one client has running, and its leases.
type running struct {
	leases *counter
	tasks  []task
}

// task is an admitted request.
type task struct {
	id         string
	end, renew int64
}

// countRunning sends one client's requests, which take their time, through
// leases that are renewed, and counts what runs.
func countRunning(w way, number uint64, times []int64) score {
	s := score{requests: len(times)}
	random := rand.New(rand.NewPCG(seed, number))
	r := running{leases: newCounter(w.limit(lease), slots, 0)}
	for i, now := range times {
		r.advance(now)
		id := strconv.Itoa(i)
		fits := len(r.tasks) < slots
		took := r.leases.do(algorithm.Take, id, now).Allowed
		if !fits {
			s.over++
		}
		if took {
			end := now + int64(random.ExpFloat64()*float64(duration.Microseconds()))
			r.tasks = append(r.tasks, task{id, end, now + renewal.Microseconds()})
		}
		switch {
		case fits && !took:
			s.refused++
			s.differ++
		case took && !fits:
			s.admitted++
			s.differ++
		}
		s.most = max(s.most, len(r.tasks))
	}
	return s
}

// advance lets the requests run until an instant.
func (r *running) advance(until int64) {
	for {
		next, at := -1, until
		for i, t := range r.tasks {
			if first := min(t.end, t.renew); first <= at {
				next, at = i, first
			}
		}
		if next < 0 {
			return
		}
		t := &r.tasks[next]
		if t.end > t.renew {
			r.leases.do(algorithm.Charge, t.id, at)
			t.renew += renewal.Microseconds()
			continue
		}
		r.leases.do(algorithm.Refund, t.id, at)
		r.tasks[next] = r.tasks[len(r.tasks)-1]
		r.tasks = r.tasks[:len(r.tasks)-1]
	}
}
