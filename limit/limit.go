package limit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Algorithm is a way of counting events: docs/algorithms.md compares them.
type Algorithm = store.Algorithm

// The algorithms.
const (
	// FixedWindow counts in windows that begin with a client's first event. It is the zero value.
	FixedWindow = store.FixedWindow
	// SlidingWindow counts over the last window of time, estimated from two counters.
	SlidingWindow = store.SlidingWindow
	// SlidingLog counts over the last window of time exactly, and stores each event.
	SlidingLog = store.SlidingLog
	// GCRA spreads events evenly, with bursts.
	GCRA = store.GCRA
	// Concurrency counts what runs at the same time: only [Limit.Reserve] and [Limit.WaitReserve]
	// take its slots, and the end of the reservation gives them back.
	Concurrency = store.Concurrency
)

// Calendar makes windows those of a calendar.
type Calendar = store.Calendar

// Never is the RetryAfter of what no waiting helps, because it costs more than ever fits.
const Never = store.Never

// Errors, possibly wrapped.
var (
	// ErrUnavailable: the store did not answer, and nothing is decided.
	ErrUnavailable = errors.New("limit: the store cannot answer")
	// ErrUncertain is the error, beside ErrUnavailable or that of the context, of a call that may have
	// taken effect. What SlidingLog and Concurrency may have taken is given back.
	ErrUncertain = store.ErrUncertain
	// ErrNever: it costs more than the limit ever admits.
	ErrNever = errors.New("limit: it costs more than the limit ever admits: raise Events or Burst, or ask for less")
	// ErrDeadline wraps [context.DeadlineExceeded]: by what counts now, the limit admits it only after the
	// deadline of the context.
	ErrDeadline = fmt.Errorf("limit: there is no room before the deadline of the context: %w", context.DeadlineExceeded)
	// ErrEnded: the reservation has ended, by Commit, Release or its deadline.
	ErrEnded = errors.New("limit: the reservation has ended")
	// ErrClosed: the store was closed during the wait.
	ErrClosed = errors.New("limit: the store is closed: open another")
	// ErrEmptyKey: the key of the call is empty, but the text of Config.Key has a placeholder.
	ErrEmptyKey = errors.New("limit: the key is empty: Caddy then counts by the next text of the zone's key, or by the client's address; give a key, or make a Limit with that text")
	// ErrTooMany: the store has 100,000 open reservations in this process.
	ErrTooMany = errors.New("limit: too many open reservations: end them by Commit or Release, or give them an earlier deadline by Config.ReserveFor")
)

// Config describes a limit, as a zone of a Caddyfile does.
type Config struct {
	// Name is the name of the zone: letters, digits, _ . and -. Required.
	Name string
	// Key is the text of the zone's key with one placeholder, such as "{header.X-Api-Key}", whose
	// values the keys of calls then are; they are spelled in one way, as Caddy does. A text without a
	// placeholder has one bucket, whatever the keys of calls are. Empty means "{key}", which no zone has.
	Key string
	// Algorithm is how events are counted. The zero value is FixedWindow.
	Algorithm Algorithm
	// Events are how many a window admits or, with Concurrency, run at the same time: from 1 to
	// 2^52, and at most 2^32-1 with SlidingWindow, and 100,000 with SlidingLog and Concurrency. Required.
	Events int64
	// Window is the length of the window, from 1ms to 100 years, in whole microseconds. With Concurrency:
	// how long a slot is held at most, at least 1s. Required without a Calendar; with Concurrency 0 means
	// 1m.
	Window time.Duration
	// Align, with FixedWindow, makes windows begin at multiples of their length since 1970 in UTC,
	// and not with a client's first event.
	Align bool
	// Calendar, with FixedWindow, replaces Window. The zero value is none.
	Calendar Calendar
	// Burst, with GCRA, is how many events are admitted at once. 0 means Events.
	Burst int64
	// ReserveFor is the time after which an open reservation is released, up to 24h. 0 means 10m.
	// With Concurrency it is Window at most, because the slot ends then.
	ReserveFor time.Duration
}

// Limit is a named limit. It is safe for concurrent use. Make one for each name: those who wait for
// it stand in one line.
type Limit struct {
	store  *Store
	config Config
	limit  store.Limit
	key    clientkey.Template
	lines  lines
	// closures are those of [Transport].
	closures closures
}

// Result is what a bucket looked like when it decided.
type Result struct {
	// Allowed is set if the events fit, and were spent.
	Allowed bool
	// Limit is how many events fit at once, Used how many count, and Remaining how many are left.
	Limit, Used, Remaining int64
	// Reset is when nothing counts any more unless more is spent; zero with Concurrency.
	Reset time.Time
	// RetryAfter is how long to wait until the events fit, or [Never]; 0 if they were allowed.
	RetryAfter time.Duration
	// ClosedUntil is until when the bucket is closed, by a penalty in Caddy or by [Limit.Penalize];
	// zero if it is not.
	ClosedUntil time.Time
}

// Limit returns the limit that c describes. It calls no server. The error names the field that is wrong.
func (s *Store) Limit(c Config) (*Limit, error) {
	if err := c.complete(); err != nil {
		return nil, fmt.Errorf("limit: limit %q: %w", c.Name, err)
	}
	l := &Limit{store: s, config: c, limit: c.limit()}
	l.key, _ = clientkey.ParseTemplate(c.Key) // checked
	return l, nil
}

const (
	defaultLease                     = time.Minute
	defaultReserveFor, maxReserveFor = 10 * time.Minute, 24 * time.Hour
	defaultKey                       = "{key}"
)

// complete sets defaults, and returns what is wrong.
func (c *Config) complete() error {
	if !isName(c.Name, "") {
		return errors.New("field Name: use letters, digits and the characters _ . -")
	}
	if c.Algorithm >= store.Algorithms {
		return fmt.Errorf("field Algorithm %d: it must be one of the constants", c.Algorithm)
	}
	if c.Key == "" {
		c.Key = defaultKey
	}
	if _, err := clientkey.ParseTemplate(c.Key); err != nil {
		return fmt.Errorf("field Key %q: %w", c.Key, err)
	}
	if err := c.completeWindow(); err != nil {
		return err
	}
	l := c.limit()
	if invalid := algorithm.CheckLimit(&l); invalid != nil {
		return fmt.Errorf("field %w", invalid)
	}
	if err := algorithm.CheckEvents(c.Algorithm, c.Events); err != nil {
		return fmt.Errorf("field Events %w", err)
	}
	if err := algorithm.CheckBurst(&l, c.Events, c.Burst); err != nil {
		return fmt.Errorf("field Burst %w", err)
	}
	if c.ReserveFor < 0 || c.ReserveFor > maxReserveFor {
		return fmt.Errorf("field ReserveFor %s: it must be up to 24h", c.ReserveFor)
	}
	if c.ReserveFor == 0 {
		c.ReserveFor = defaultReserveFor
	}
	if algorithm.Of(c.Algorithm).Lease {
		c.ReserveFor = min(c.ReserveFor, c.Window)
	}
	return nil
}

// completeWindow sets the defaults of the window.
func (c *Config) completeWindow() error {
	hasCalendar := c.Calendar != Calendar{}
	switch {
	case hasCalendar && c.Window != 0:
		return errors.New("field Window does not go with Calendar: set one")
	case hasCalendar:
		if c.Calendar.Unit != "" && c.Calendar.TimeZone == "UTC" {
			c.Calendar.TimeZone = ""
		}
		c.Window, c.Align = c.Calendar.Window(), true
	case algorithm.Of(c.Algorithm).Lease && c.Window == 0:
		c.Window = defaultLease
	}
	return nil
}

// limit returns the limit as the stores know it.
func (c *Config) limit() store.Limit {
	return store.Limit{Zone: c.Name, Algorithm: c.Algorithm, Window: c.Window, Align: c.Align, Calendar: c.Calendar}
}

// request returns what the bucket of a key is asked.
func (l *Limit) request(key string, n int64) (store.Request, error) {
	clientKey, ok := l.key.Key(key)
	if !ok {
		return store.Request{}, fmt.Errorf("%w: limit %q, key %q", ErrEmptyKey, l.config.Name, l.config.Key)
	}
	r := store.Request{
		Limit: &l.limit, ClientKey: clientKey, Events: l.config.Events, Burst: l.config.Burst, Cost: n,
	}
	if algorithm.Of(l.config.Algorithm).NeedsID {
		r.ID = identity.NewRequestID()
	}
	if !algorithm.Of(l.config.Algorithm).Lease {
		r.Hold = store.HearsHeld
	}
	return r, nil
}

// Allow spends an event of the bucket of key, and reports whether it fit. If the error is
// [ErrUnavailable], it says nothing.
func (l *Limit) Allow(ctx context.Context, key string) (bool, error) {
	result, err := l.Take(ctx, key, 1)
	return result.Allowed, err
}

// Take spends n events of the bucket of key if they fit, and nothing if they do not. With n of 0 it shows
// the bucket.
func (l *Limit) Take(ctx context.Context, key string, n int64) (Result, error) {
	if err := l.mayTake(n); err != nil {
		return Result{}, err
	}
	r, err := l.request(key, n)
	if err != nil {
		return Result{}, err
	}
	st, err := l.take(ctx, &r)
	return resultOf(&st), err
}

// mayTake returns what is wrong with taking n events for good.
func (l *Limit) mayTake(n int64) error {
	if algorithm.Of(l.config.Algorithm).Lease {
		return fmt.Errorf("limit: limit %q counts what runs at the same time: call Reserve, and end the reservation", l.config.Name)
	}
	return mayAsk(n)
}

func mayAsk(n int64) error {
	if n < 0 || n > store.MaxEvents {
		return fmt.Errorf("limit: %d events: it must be from 0 to 2^52", n)
	}
	return nil
}

// take takes from the store. What it may have taken, and has an ID, is given back: the refund waits for
// the take, and does no harm if that did not run.
func (l *Limit) take(ctx context.Context, r *store.Request) (store.State, error) {
	st, err := l.call(ctx, l.store.buckets.Take, r)
	if !errors.Is(err, ErrUncertain) {
		return st, err
	}
	if back := *r; r.ID == "" {
		store.LateOf(err).Then(func(error) { l.endHold(back) })
		return st, err
	}
	l.store.remote.RefundReported(*r, func(st store.State) {
		if st.Err == nil {
			l.lines.wake(r.ClientKey)
		}
	})
	return st, err
}

// endHold makes what r has taken count for good, without waiting.
func (l *Limit) endHold(r store.Request) {
	switch r.Cost = 0; {
	case !r.MayHold():
	case l.store.remote != nil:
		l.store.remote.RefundDetached([]*store.Request{&r})
	default:
		l.store.buckets.Refund(context.Background(), []*store.Ask{{Request: r}})
	}
}

// call makes an operation on one bucket. If ctx has ended, the error is that of ctx, whatever the store
// says.
func (l *Limit) call(ctx context.Context, op func(context.Context, []*store.Ask), r *store.Request) (store.State, error) {
	asked := store.Ask{Request: *r}
	op(ctx, []*store.Ask{&asked})
	switch err := asked.Err; {
	case err == nil:
		return asked.State, nil
	case ctx.Err() != nil && errors.Is(err, ErrUncertain):
		return store.State{}, fmt.Errorf("limit: limit %q: %w: %w", l.config.Name, err, ctx.Err())
	case ctx.Err() != nil:
		return store.State{}, ctx.Err()
	default:
		return store.State{}, fmt.Errorf("%w: limit %q: %w", ErrUnavailable, l.config.Name, err)
	}
}

func resultOf(st *store.State) Result {
	return Result{
		Allowed: st.Allowed, Limit: st.Limit, Used: st.Used, Remaining: st.Remaining,
		Reset: instant(st.Reset), RetryAfter: st.RetryAfter, ClosedUntil: instant(st.Penalty),
	}
}

func instant(microseconds int64) time.Time {
	if microseconds == 0 {
		return time.Time{}
	}
	return time.UnixMicro(microseconds)
}

// maxPenalty is the longest that all stores believe of a penalty they know nothing else of.
const maxPenalty = 24 * time.Hour

// Penalize closes the bucket of key for d, up to 24h, for all processes and for Caddy: nothing fits until
// then. A bucket that is closed already stays closed until that ends, and no longer. It is an error with
// SlidingLog and Concurrency, whose buckets cannot be closed.
func (l *Limit) Penalize(ctx context.Context, key string, d time.Duration) error {
	if err := l.mayPenalize(); err != nil {
		return err
	}
	if d <= 0 || d > maxPenalty {
		return fmt.Errorf("limit: a penalty of %s: it must be up to 24h", d)
	}
	r, err := l.request(key, 0)
	if err != nil {
		return err
	}
	// The penalty ends by the clock of the store.
	st, err := l.call(ctx, l.store.buckets.Peek, &r)
	if err != nil {
		return err
	}
	r.Until = st.Now + max(d.Microseconds(), 1)
	_, err = l.call(ctx, l.store.buckets.Penalize, &r)
	return err
}

func (l *Limit) mayPenalize() error {
	if !algorithm.Of(l.config.Algorithm).Penalties {
		return fmt.Errorf("limit: limit %q: a bucket of %s cannot be closed: use another Algorithm", l.config.Name, l.config.Algorithm)
	}
	return nil
}
