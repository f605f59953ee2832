package algorithm

import (
	"github.com/shardlimit/caddy-shardlimit/store"
)

// SlidingLog is the content of a bucket of [store.SlidingLog].
type SlidingLog struct {
	noWindow
	noPenalty
	members members
}

// LogSummary is what a request needs to know of a log.
type LogSummary struct {
	// Used is how many events it holds.
	Used int64
	// Newest is the instant of the newest event, or 0.
	Newest int64
	// Other is the instant of the newest event of another request, or 0.
	Other int64
	// Blocking is the instant of the newest event that has to go for the
	// request to fit, or 0 if it fits.
	Blocking int64
}

func (b *SlidingLog) live(r *store.Request, now int64) members {
	return b.members.after(now - r.Limit.Window.Microseconds())
}

// Charge implements [Bucket]. Only the newest events are kept: older ones decide
// nothing.
func (b *SlidingLog) Charge(r *store.Request, now int64) {
	if r.Cost == 0 {
		return
	}
	b.members.keep(b.live(r, now))
	b.members.put(now, r.ID, count(r))
	if excess := int64(len(b.members)) - Kept(r); excess > 0 {
		b.members.keep(b.members[excess:])
	}
}

// Take implements [Bucket].
func (b *SlidingLog) Take(r *store.Request, now int64) bool {
	if int64(len(b.live(r, now)))+r.Need() > r.Capacity() {
		return false
	}
	b.Charge(r, now)
	return true
}

// Refund implements [Bucket].
func (b *SlidingLog) Refund(r *store.Request, _ int64) { b.members.remove(r.ID, count(r)) }

// View implements [Bucket].
func (b *SlidingLog) View(r *store.Request, now int64, spent bool) store.State {
	live := b.live(r, now)
	l := LogSummary{Used: int64(len(live)), Newest: live.newest(), Other: live.without(r.ID).newest()}
	need := int64(0)
	if !spent {
		need = r.Need()
	}
	if excess := l.Used + need - r.Capacity(); excess > 0 && l.Used > 0 {
		l.Blocking = live[min(excess, l.Used)-1].at
	}
	return l.View(r, now, spent)
}

// View is [Bucket.View] of the log that l describes.
func (l LogSummary) View(r *store.Request, now int64, spent bool) store.State {
	window := r.Limit.Window.Microseconds()
	s := newState(r, now, l.Used, spent)
	s.Reset = logReset(l.Newest, now, window)
	switch {
	case spent:
		s.ResetOtherwise = logReset(l.Other, now, window)
	case r.Cost > 0:
		s.ResetOtherwise = logReset(max(l.Newest, now), now, window)
	default:
		s.ResetOtherwise = s.Reset
	}
	wait(&s, r, max(l.Blocking+window, add(now, othersTurn(r, l.Used, spent))), spent)
	return s
}

func logReset(newest, now, window int64) int64 {
	if newest == 0 {
		return now
	}
	return newest + window
}

// Expiry implements [Bucket].
func (b *SlidingLog) Expiry(limit *store.Limit) int64 {
	return b.members.newest() + limit.Window.Microseconds()
}

// Weight implements [Bucket].
func (b *SlidingLog) Weight(*store.Limit) int64 { return int64(len(b.members)) }
