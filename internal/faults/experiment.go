package main

import (
	"context"
	"fmt"
	"maps"
	"time"
)

// experiment is a cell while it is tried.
type experiment struct {
	cell
	settings
	broken, other *shard
	site          *site
	traffic       *traffic

	// begin and end are those of the fault, start is when all was well before.
	start, begin, end time.Time
	// samples were taken from the end on.
	samples []sample
	// buckets are what both shards hold, by client.
	buckets map[string]bucket
	metrics metrics
}

// sample is how many of the requests that had been let through at an instant were
// not counted a little later.
type sample struct {
	at   time.Time
	owed int64
}

func isLate(r role) bool      { return r == late }
func isNotLate(r role) bool   { return r != late }
func isBystander(r role) bool { return r == bystander }
func isConcerned(r role) bool { return r != bystander }
func isAny(role) bool         { return true }

// run does everything.
func (e *experiment) run(ctx context.Context) error {
	e.traffic.start(isNotLate)
	if err := e.awaitNormal(ctx, time.Now(), isNotLate); err != nil {
		return fmt.Errorf("before the fault: %w", err)
	}
	e.start = time.Now()
	if err := pause(ctx, e.before); err != nil {
		return err
	}
	if err := e.bring(ctx); err != nil {
		return fmt.Errorf("bring the fault on: %w", err)
	}
	sampling, stop := context.WithCancel(ctx)
	sampled := make(chan struct{})
	go func() {
		defer close(sampled)
		e.sample(sampling)
	}()
	err := e.recover(ctx)
	stop()
	<-sampled
	if err != nil {
		return err
	}
	e.site.Stop()
	// Caddy delivers what waits before it ends.
	return e.count(ctx)
}

// bring brings the fault on and ends it, with clients that come for the first
// time meanwhile.
func (e *experiment) bring(ctx context.Context) error {
	late := time.AfterFunc(e.during/4, func() { e.traffic.start(isLate) })
	e.begin = time.Now()
	err := e.fault.bring(ctx, e.broken, e.during)
	e.end = time.Now()
	if late.Stop() {
		// The fault was shorter than it should be.
		e.traffic.start(isLate)
	}
	return err
}

// recover waits until all is as it was, and until no charge is on its way.
func (e *experiment) recover(ctx context.Context) error {
	err := e.awaitNormal(ctx, e.end, isAny)
	if err == nil {
		err = pause(ctx, time.Until(e.end.Add(e.after)))
	}
	e.traffic.stop()
	if err != nil {
		return fmt.Errorf("after the fault: %w", err)
	}
	return e.settle(ctx)
}

// normalPatience is how long it may take until all is as it was.
const normalPatience = time.Minute

// awaitNormal waits until some clients have been answered by the store for a
// while, since then.
func (e *experiment) awaitNormal(ctx context.Context, then time.Time, isOne func(role) bool) error {
	return poll(ctx, normalPatience, func() error {
		if err := e.count(ctx); err != nil {
			return err
		}
		for _, c := range e.traffic.only(isOne) {
			isRight := func(r *response) bool { return r.isNormal() && !e.isLocal(e.buckets, c, r) }
			if !c.isSettledSince(then, isRight) {
				return fmt.Errorf("responses to %s are not normal: %s", c, describe(last(c.responses())))
			}
		}
		return nil
	})
}

const (
	// settlePatience bounds the time until all charges have arrived.
	settlePatience = time.Minute
	// quiet is how long nothing has arrived when nothing more is on its way: what
	// waits for a shard is tried once a second.
	quiet = 2500 * time.Millisecond
)

// settle waits until everything is charged that was served, but for what is
// known to be missing, or until nothing has been charged for a while.
func (e *experiment) settle(ctx context.Context) error {
	since := time.Now()
	return poll(ctx, settlePatience, func() (err error) {
		known := e.buckets
		if err := e.count(ctx); err != nil {
			return err
		}
		if !maps.Equal(e.buckets, known) {
			since = time.Now()
		}
		if e.metrics, err = e.site.metrics(); err != nil {
			return err
		}
		owed := missing(e.traffic.only(isConcerned), e.buckets)
		isOwed := owed > e.metrics.failed(faulty) || missing(e.traffic.only(isBystander), e.buckets) > 0
		if isOwed && time.Since(since) < quiet {
			return fmt.Errorf("%d charges are missing", owed)
		}
		return nil
	})
}

// sample takes samples until ctx ends.
func (e *experiment) sample(ctx context.Context) {
	const period = 25 * time.Millisecond
	for {
		// What is served meanwhile cannot be counted yet.
		s := sample{at: time.Now(), owed: served(e.traffic.only(isConcerned))}
		if buckets, err := e.broken.buckets(ctx, zone); err == nil {
			for _, b := range buckets {
				s.owed -= b.count
			}
			e.samples = append(e.samples, s)
		}
		if pause(ctx, period) != nil {
			return
		}
	}
}

// count reads what both shards hold.
func (e *experiment) count(ctx context.Context) error {
	mine, err := e.broken.buckets(ctx, zone)
	if err != nil {
		return err
	}
	others, err := e.other.buckets(ctx, zone)
	maps.Copy(mine, others)
	e.buckets = mine
	return err
}
