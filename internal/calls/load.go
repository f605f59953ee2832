package main

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// tally is what became of requests.
type tally struct {
	requests, allowed int64
	// windows are how many were allowed, by the end of the window in which they
	// were charged.
	windows map[int64]int64
	// err is the first failure.
	err error
}

func (t *tally) count(st *store.State) {
	t.requests++
	switch {
	case st.Err != nil:
		if t.err == nil {
			t.err = st.Err
		}
	case st.Allowed:
		t.allowed++
		t.windows[st.Receipt.Period]++
	}
}

func (t *tally) add(o *tally) {
	t.requests += o.requests
	t.allowed += o.allowed
	for end, n := range o.windows {
		t.windows[end] += n
	}
	if t.err == nil {
		t.err = o.err
	}
}

// load is requests that come for some time.
type load struct {
	// callers is how many requests run at the same time at most.
	callers int
	// rate is how many come in a second, at random instants; 0 means that each
	// caller sends one after the other.
	rate float64
	// until is when no more come.
	until time.Time
	// request is the n-th of a caller.
	request func(ctx context.Context, caller, n int) store.State
}

// slack is how much too early a request may come: a caller that sleeps before
// each would need more time for that than for the request.
const slack = 2 * time.Millisecond

// run sends the requests.
func (l *load) run(ctx context.Context) *tally {
	tallies := make([]*tally, l.callers)
	var wg sync.WaitGroup
	for caller := range l.callers {
		tallies[caller] = &tally{windows: map[int64]int64{}}
		wg.Go(func() { l.call(ctx, caller, tallies[caller]) })
	}
	wg.Wait()
	total := &tally{windows: map[int64]int64{}}
	for _, t := range tallies {
		total.add(t)
	}
	if total.err == nil && ctx.Err() != nil {
		total.err = errEnded
	}
	return total
}

// call is one caller, who makes up for the time that he waited.
func (l *load) call(ctx context.Context, caller int, t *tally) {
	at := time.Now()
	for n := 0; ctx.Err() == nil; n++ {
		now := time.Now()
		if l.rate > 0 {
			pause := rand.ExpFloat64() * float64(l.callers) / l.rate * float64(time.Second)
			at = at.Add(time.Duration(pause))
			if !at.Before(l.until) {
				return
			}
			if at.Sub(now) > slack {
				time.Sleep(at.Sub(now))
				now = at
			}
		}
		if !now.Before(l.until) {
			return
		}
		st := l.request(ctx, caller, n)
		t.count(&st)
	}
}
