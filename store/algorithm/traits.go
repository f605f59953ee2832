package algorithm

import (
	"fmt"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Traits are what other packages have to know of an algorithm. They decide by these, and
// not by its name.
type Traits struct {
	// Aging is the way in which spent events stop counting.
	Aging Aging
	// Lease is set if requests count while they run: charged again meanwhile, and refunded
	// at their end, which is unknown before.
	Lease bool
	// NeedsID is set if events are kept one by one, by the request's ID.
	NeedsID bool
	// Penalties is set if a bucket can be kept refused.
	Penalties bool
	// Unbatched is why events cannot be taken in advance; empty if they can.
	Unbatched string
	// MostEvents is how many events it can count, and MostWords the same in words.
	MostEvents int64
	MostWords  string

	empty func() Bucket
	// view is [View] with so much more ahead of the request.
	view func(c store.Content, r store.Request, ahead, now int64, spent bool) store.State
	// copies is nil if buckets cannot be copied.
	copies *copies
}

// Aging is the way in which spent events stop counting. Arithmetic that depends on it has a case for
// each value, and panics with [Aging.Unknown] for any other.
type Aging uint8

const (
	// AtWindowEnd is all at once, at the end of a window. Unless windows are aligned, they are
	// opened: a state without a reset has none open.
	AtWindowEnd Aging = iota + 1
	// ByClock is in windows of the clock, of which the last one counts ever less. A receipt's
	// Period is the beginning of one.
	ByClock
	// Draining is in order, at the rate of the limit: Events in a Window.
	Draining
	// OneByOne is each event by itself, at the latest a Window later. Such buckets cannot be copied.
	OneByOne
)

// Unknown returns the message of a panic: a has no case in some arithmetic.
func (a Aging) Unknown() string { return fmt.Sprintf("aging %d has no case here", a) }

// Windowed reports whether events age [AtWindowEnd].
func (t *Traits) Windowed() bool { return t.Aging == AtWindowEnd }

// Clocked reports whether events age [ByClock].
func (t *Traits) Clocked() bool { return t.Aging == ByClock }

// Drains reports whether events age by [Draining].
func (t *Traits) Drains() bool { return t.Aging == Draining }

// copies has what [Known] does to a copy of a bucket. Contents and requests that callers
// have on their stack are passed by value: calls through variables let pointers escape.
type copies struct {
	// penalty is the place of the penalty in the content, or 0 without penalties.
	penalty int
	// busy, if it is not 0, is the place of the instant before which nothing drains.
	busy int
	// instants are the places of all instants.
	instants []int
	charge   func(c store.Content, r store.Request, cost, now int64) store.Content
	// believe is [Bucket.Believe].
	believe func(c store.Content, r store.Request, now int64) store.Content
	expiry  func(c store.Content, limit *store.Limit) int64
	// raise merges another copy into c, without the penalty.
	raise func(c, other store.Content, limit *store.Limit, now int64) (merged store.Content, less bool)
}

// mostWords is [store.MaxEvents] in words.
const mostWords = "2^52"

var table = [...]*Traits{
	store.FixedWindow:   &fixedWindow,
	store.SlidingWindow: &slidingWindow,
	store.SlidingLog:    &slidingLog,
	store.GCRA:          &gcra,
	store.Concurrency:   &concurrency,
}

// Without the last row this does not compile, and without another one tests fail.
const _ = uint(len(table) - int(store.Algorithms))

// Of returns the traits of an algorithm.
func Of(a store.Algorithm) *Traits { return table[a] }

// Copies reports whether buckets can be copied: whether a state's Content is all of one.
func (t *Traits) Copies() bool { return t.copies != nil }

// Names returns the names of those algorithms, as in "a, b or c".
func Names(which func(a store.Algorithm) bool) string {
	var names []string
	for a := range store.Algorithms {
		if which(a) {
			names = append(names, a.String())
		}
	}
	if last := len(names) - 1; last > 0 {
		names = append(names[:last-1], names[last-1]+" or "+names[last])
	}
	return strings.Join(names, ", ")
}
