package limit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// lines are those who wait, by client key, in order of arrival. The first of a line alone asks the
// store, so a full bucket costs one call for each wait, however many wait for it. Without a line, the
// store is asked directly.
type lines struct {
	mu    sync.Mutex
	byKey map[string]*line
}

type line struct {
	waiting []*waiter
	// until is before when the first one does not fit; zero if that is not known.
	until time.Time
}

// waiter is one place in a line.
type waiter struct {
	deadline time.Time
	// turn gets nil when the waiter is the first, or should ask again, and an error if it has lost
	// its place.
	turn chan error
}

// Wait spends n events of the bucket of key as soon as they fit. Those who wait in this process for
// the same bucket are served in order of arrival. It returns [ErrNever] at once if n exceeds the
// limit, [ErrDeadline] as soon as what counts now leaves no room before the deadline of ctx, but for what running
// requests and reservations hold and others would give back until then, the error of ctx if that ends, [ErrUnavailable] if the store
// does not answer, also to those behind in the line, and [ErrClosed] once the store is closed. After an
// error nothing was spent, unless it is [ErrUncertain].
func (l *Limit) Wait(ctx context.Context, key string, n int64) error {
	if err := l.mayTake(n); err != nil {
		return err
	}
	r, err := l.request(key, n)
	if err != nil {
		return err
	}
	_, err = l.await(ctx, &r)
	return err
}

// await takes what r costs as soon as it fits.
func (l *Limit) await(ctx context.Context, r *store.Request) (store.State, error) {
	if r.Cost > r.Capacity() {
		return store.State{}, ErrNever
	}
	if err := ctx.Err(); err != nil {
		return store.State{}, err
	}
	w, err := l.lines.join(ctx, r.ClientKey, false)
	defer func() { l.lines.leave(r.ClientKey, w) }()
	if err == nil && w != nil {
		err = w.await(ctx, l.store.done, nil)
	}
	for err == nil {
		var st store.State
		st, err = l.take(ctx, r)
		switch {
		case err != nil && w != nil && errors.Is(err, ErrUnavailable):
			l.lines.fail(r.ClientKey, w, err)
			return st, err
		case err != nil || st.Allowed:
			return st, err
		case st.RetryAfter == store.Never:
			return store.State{}, ErrNever
		case w == nil:
			// The first of a new line asks again: what was given back before it stood there woke nobody.
			if w, err = l.lines.join(ctx, r.ClientKey, true); err == nil {
				err = w.await(ctx, l.store.done, nil)
			}
			continue
		}
		// When a slot becomes free, or what is held comes back, is a guess.
		var until time.Time
		if !st.InFlight && !algorithm.Of(l.config.Algorithm).Lease {
			until = time.Now().Add(st.RetryAfter)
		}
		if !l.lines.postpone(r.ClientKey, w, until) {
			return store.State{}, ErrDeadline
		}
		wait := min(st.RetryAfter, maxSleep)
		timer := time.NewTimer(wait + jitter(wait))
		err = w.await(ctx, l.store.done, timer.C)
		timer.Stop()
	}
	return store.State{}, err
}

// maxSleep is the longest time until the first of a line asks again: another process may give something
// back earlier than what counts leaves.
const maxSleep = 5 * time.Second

// maxJitter bounds what is added to a wait, so that the processes which wait for one bucket do not ask at
// the same instant.
const maxJitter = 100 * time.Millisecond

func jitter(wait time.Duration) time.Duration {
	return rand.N(min(wait/10, maxJitter) + 1)
}

// join adds a place at the end of the line of a key. Where there is none, it begins one, or returns nil.
func (l *lines) join(ctx context.Context, key string, begins bool) (*waiter, error) {
	w := &waiter{turn: make(chan error, 1)}
	w.deadline, _ = ctx.Deadline()
	l.mu.Lock()
	defer l.mu.Unlock()
	in := l.byKey[key]
	switch {
	case in == nil && !begins:
		return nil, nil
	case in == nil:
		in = new(line)
		if l.byKey == nil {
			l.byKey = map[string]*line{}
		}
		l.byKey[key] = in
	}
	if w.isBefore(in.until) {
		return nil, ErrDeadline
	}
	if in.waiting = append(in.waiting, w); len(in.waiting) == 1 {
		w.wake(nil)
	}
	return w, nil
}

// isBefore reports whether the waiter does not wait until an instant.
func (w *waiter) isBefore(until time.Time) bool {
	return !w.deadline.IsZero() && w.deadline.Before(until)
}

// wake gives w its turn, unless that waits for it already. The lines are locked.
func (w *waiter) wake(err error) {
	select {
	case w.turn <- err:
	default:
	}
}

// await waits for the turn, or until a timer fires. A store that is closed ends it.
func (w *waiter) await(ctx context.Context, closed <-chan struct{}, timer <-chan time.Time) error {
	select {
	case err := <-w.turn:
		return err
	case <-timer:
		return nil
	case <-closed:
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// leave gives up a place, and gives the next one its turn if it was the first.
func (l *lines) leave(key string, w *waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	in := l.byKey[key]
	i := -1
	if in != nil {
		i = slices.Index(in.waiting, w)
	}
	if i < 0 {
		return
	}
	in.waiting = slices.Delete(in.waiting, i, i+1)
	switch {
	case len(in.waiting) == 0:
		delete(l.byKey, key)
	case i == 0:
		in.until = time.Time{}
		in.waiting[0].wake(nil)
	}
}

// postpone notes until when the first of a line does not fit, if that is known. Those who do not wait for so long lose
// their places; it reports whether the first one keeps its own.
func (l *lines) postpone(key string, first *waiter, until time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	in := l.byKey[key]
	in.waiting = slices.DeleteFunc(in.waiting, func(w *waiter) bool {
		if w == first || !w.isBefore(until) {
			return false
		}
		w.wake(ErrDeadline)
		return true
	})
	if first.isBefore(until) {
		return false
	}
	in.until = until
	return true
}

// fail passes an error that the first of a line got from the store on to those behind. They have sent
// nothing, so to them it is certain.
func (l *lines) fail(key string, first *waiter, err error) {
	err = fmt.Errorf("%w: asked for the first of the line: %s", ErrUnavailable, err.Error())
	l.mu.Lock()
	defer l.mu.Unlock()
	in := l.byKey[key]
	for _, w := range in.waiting {
		if w != first {
			w.wake(err)
		}
	}
	in.waiting = []*waiter{first}
}

// wake makes the first of a line ask again: something was given back.
func (l *lines) wake(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if in := l.byKey[key]; in != nil {
		in.until = time.Time{}
		in.waiting[0].wake(nil)
	}
}
