// Package core decides what this process makes of a bucket in a remote store. It is a
// pure function: of a [Bucket], which is what the process knows, an event and an instant
// it makes the next Bucket, what to do ([Do]), and what to answer (a [store.State]).
//
//	a request asks        Ask, AskTake, AskAhead, AskAlone
//	the store answers     Answered, TakeAnswered, AheadAnswered, Fetched
//	a response settles    Settle, SettleUnknown, Restore
//	a charge is sent      Send; its outcome: Delivered
//	a refund              RefundSent, RefundArrived
//	an operator           Penalize, ResetSent, ResetFailed, ResetDone
//	nobody                Surplus, GiveUp
//
// Nothing here waits, locks, reads a clock, or calls a store: package ledger does, and
// decides nothing. A copy ([Bucket.Copy]) answers what a request would be told.
//
// The core never compares two machines' clocks: an answer has the store's time, to which
// it adds durations of this process's clock. The package imports store and
// store/algorithm.
package core

import (
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// UsualTrust is how long an answer of the primary is relied upon by default.
const UsualTrust = time.Second

// Moment is when an event happens, and what the core needs to know of the process then.
// Instants and durations are in microseconds, unless they are of package time. After an
// event it has what the event brings about for other requests.
type Moment struct {
	// Now is the age of the process's registry, from 1 on, so that 0 is before everything.
	Now int64
	// Trust is how long an answer of the primary is relied upon; Shortened is set if that
	// is less than usual.
	Trust     int64
	Shortened bool
	// Delay is how long charges of a client far from its limit wait for others; 0 if
	// none waits.
	Delay int64
	// Delivery is how long charges commonly take until they are answered; 0 before the
	// first answer.
	Delivery int64
	// Processes is how many processes share a limit; 0 if that is unknown. Only batches
	// depend on it.
	Processes int64

	// Counts counts the event.
	Counts Counts
	// Turns are for requests that wait for what another one asks, Woken for takes that
	// wait for what comes back.
	Turns []Turn
	Woken []*Claim
}

// leastTrust is the trust, and no less than the usual one, however short the config makes
// it: so long replicas are not asked after a reset, because they may show the old bucket,
// and the primary is not after a failure.
func (m *Moment) leastTrust() int64 { return max(m.Trust, UsualTrust.Microseconds()) }

// Counts count decisions.
type Counts struct {
	// LocalRefusals are requests refused without a call, UnaskedAdmissions those
	// admitted without a check.
	LocalRefusals, UnaskedAdmissions int64
	// Fetches are the batches requested of the store. TokensFetched are the events that
	// the store gave, TokensReturned those given back to it, and TokensExpired those lost
	// with their window.
	Fetches, TokensFetched, TokensReturned, TokensExpired int64
}

// Add adds other counts.
func (c *Counts) Add(other Counts) {
	c.LocalRefusals += other.LocalRefusals
	c.UnaskedAdmissions += other.UnaskedAdmissions
	c.Fetches += other.Fetches
	c.TokensFetched += other.TokensFetched
	c.TokensReturned += other.TokensReturned
	c.TokensExpired += other.TokensExpired
}

// Do is what the driver has to do after an event.
type Do uint8

// What there is to do.
const (
	// Nothing is due, or the request has its answer.
	Nothing Do = iota
	// CheckReplica is to check at a replica. The answer goes to Answered.
	CheckReplica
	// CheckPrimary is to check at the primary. The answer goes to Answered.
	CheckPrimary
	// Wait is to wait for a [Turn].
	Wait
	// AwaitCharge is to ask again when the charge in flight is answered, which decides.
	AwaitCharge
	// Take is to take from the store. The answer goes to TakeAnswered.
	Take
	// Fetch is to take a batch from the store. The answer goes to Fetched.
	Fetch
	// Send is to send a charge. Its outcome goes to Delivered.
	Send
	// Hold is to send the bucket's charges at the next tick.
	Hold
	// Retry is to send a charge that did not run once its shard executes charges again.
	Retry
	// GiveUp is to report charges that are given up.
	GiveUp
)

// Bucket is what this process knows of one bucket. Instants are of the process's clock.
// The zero value is no bucket: see [New].
type Bucket struct {
	// known is the primary's last answer, raised by later answers of replicas.
	known algorithm.Known
	// clock is how far the store's clock is ahead of the process's.
	clock int64
	// trusted is when the primary was asked for its last answer, or 0 without one.
	trusted int64
	// disturbed is when something last happened that known may lack or have too much of,
	// until the primary is asked: a refund, a charge of unknown outcome, a reset.
	disturbed int64
	// written is when a write of this process (charge, refund, take) was last
	// answered: an answer asked for earlier may lack it.
	written int64
	// soleWriter is since when the primary has counted this process's charges
	// and nothing else, or 0.
	soleWriter int64
	// asked is when a request was last let through to check a bucket that is
	// known to be full.
	asked int64
	// until is when the bucket may be forgotten.
	until int64
	// flight is the cost that was admitted and is not settled; taking, that of takes in
	// flight.
	flight, taking int64
	// refunds is the number of refunds in flight.
	refunds int32
	// silent is set while the store does not answer, resets while an operator's reset
	// empties the bucket.
	silent, resets bool
	// usedUp is set once a request has relied on an old answer.
	usedUp bool
	// uncertain is set if a charge has an unknown outcome, until the primary is asked.
	uncertain bool
	// check is the coalesced check in flight, or nil.
	check *check
	// pending are the charges that the store has not confirmed, or nil.
	pending *pending
	// batch has events that were taken in advance, or is nil.
	batch *batch
	// extra is nil until one of its values is set.
	extra *extra
}

// extra is the part of a Bucket that few need: there are up to a million.
type extra struct {
	// refunded is when a refund of this process last arrived.
	refunded int64
	// failed is when the primary last failed to answer.
	failed int64
	// charged is when a charge was last in flight, and took, when a take was last
	// answered, if the algorithm's buckets cannot be copied.
	charged, took int64
	// loose is cost of unknown outcome that known lacks, because no window was
	// known to be open.
	loose int64
	// alone is when a request was last decided about without the store, and own, what this
	// process has admitted then and since.
	alone int64
	own   algorithm.Known
	// reset is when this process last reset the bucket.
	reset int64
	// returning is what is on its way back, or nil; back is what has come back, and no take
	// was repeated for it yet.
	returning *returning
	back      int64
}

// New returns a Bucket of which nothing is known. Until the store says what time it is,
// this machine's clock stands for its own, which is so far ahead of the process's.
func New(clock int64, m *Moment) Bucket { return Bucket{until: m.Now, clock: clock} }

// Copy returns a Bucket that shares nothing that an event changes, and for which nobody
// waits.
func (b *Bucket) Copy() Bucket {
	c := *b
	c.check = nil
	if b.pending != nil {
		p := *b.pending
		p.heard = nil
		c.pending = &p
	}
	if b.batch != nil {
		v := *b.batch
		v.waiters = nil
		c.batch = &v
	}
	if b.extra != nil {
		r := *b.extra
		r.returning = nil
		c.extra = &r
	}
	return c
}

// extras returns the extra values; changing what it returns changes nothing.
func (b *Bucket) extras() extra {
	if b.extra == nil {
		return extra{}
	}
	return *b.extra
}

// ensureExtra returns the extra values to set one of them.
func (b *Bucket) ensureExtra() *extra {
	if b.extra == nil {
		b.extra = new(extra)
	}
	return b.extra
}

// standing says how much can be made of what is known. Each is worse than the next one.
type standing uint8

const (
	// silent: the store does not answer.
	silent standing = iota
	// resetting: the bucket is being emptied.
	resetting
	// doubtful: known may lack something, or have too much.
	doubtful
	// old: the primary has not been asked for longer than it is trusted.
	old
	fresh
)

func (b *Bucket) standing(m *Moment) standing {
	switch {
	case b.silent:
		return silent
	case b.resets:
		return resetting
	case b.isDisturbed():
		return doubtful
	case !b.trusts(m):
		return old
	}
	return fresh
}

// isDisturbed reports whether the primary has not been asked since something happened that
// known may lack, or have too much of.
func (b *Bucket) isDisturbed() bool { return b.refunds > 0 || mayLack(b.trusted, b.disturbed) }

// trusts reports whether the primary's answer is recent enough to rely on.
func (b *Bucket) trusts(m *Moment) bool {
	return b.trusted != 0 && !b.usedUp && m.Now-b.trusted <= m.Trust
}

// canReach reports whether the primary is worth a call: after a failure it is
// called once for each time of trust.
func (b *Bucket) canReach(m *Moment) bool {
	failed := b.extras().failed
	return failed == 0 || m.Now-failed > m.leastTrust()
}

// wasReset reports whether this process has reset the bucket so recently that a replica may
// not show it.
func (b *Bucket) wasReset(m *Moment) bool {
	reset := b.extras().reset
	return reset != 0 && m.Now-reset <= m.leastTrust()
}

// predatesReset reports whether an answer asked for at that instant is from before this
// process's last reset of the bucket, and so says nothing about it.
func (b *Bucket) predatesReset(asked int64) bool { return mayLack(asked, b.extras().reset) }

// mayLack reports whether an answer asked for at that instant may lack what was answered at
// another. At equal instants it may: clocks stand still for up to 15 ms where Windows runs.
func mayLack(asked, answered int64) bool { return answered != 0 && asked <= answered }

// isDue reports whether trust has run out, and no request was let through to ask since.
func (b *Bucket) isDue(m *Moment) bool {
	return !b.trusts(m) && (b.asked == 0 || m.Now-b.asked > m.Trust)
}

// IsIdle reports whether forgetting the bucket loses knowledge and nothing else.
func (b *Bucket) IsIdle() bool { return b.isUnused() && b.pending == nil }

func (b *Bucket) isUnused() bool {
	return b.flight == 0 && b.taking == 0 && b.refunds == 0 && b.extras().returning == nil && b.check == nil && (b.batch == nil || b.batch.isEmpty())
}

// IsExpired reports whether the bucket is idle, and what is known of it counts no more.
func (b *Bucket) IsExpired(m *Moment) bool { return b.IsIdle() && b.until <= m.Now }

// CountsAlone reports whether the bucket counts something that the store does not know.
func (b *Bucket) CountsAlone(m *Moment) bool { return b.extras().alone != 0 && b.until > m.Now }

// CanGiveUp reports whether the bucket holds nothing but charges that wait for their shard.
func (b *Bucket) CanGiveUp() bool {
	return b.isUnused() && b.pending != nil && b.pending.phase == queued
}

// keepUntil sets when the bucket may be forgotten.
func (b *Bucket) keepUntil(r *store.Request, m *Moment) {
	if !algorithm.Of(r.Limit.Algorithm).Copies() {
		b.until = m.Now + r.Limit.Window.Microseconds()
		return
	}
	b.until = max(b.until, b.known.Expiry(r.Limit)-b.clock)
	if rare := b.extras(); rare.alone != 0 {
		b.until = max(b.until, rare.own.Expiry(r.Limit)-b.clock)
	}
}

// Gauges are what a Bucket adds to the figures of all.
type Gauges struct {
	// InFlight is the cost that was admitted and is not settled.
	InFlight int64
	// Unsent is the number of requests whose charges wait, except for the next tick.
	Unsent int64
	// Uncertain is 1 if a charge has an unknown outcome.
	Uncertain int64
	// Owing is what has to be delivered: 1 if charges are pending, and each refund in flight.
	Owing int64
	// Tokens is what is left of events that were taken in advance.
	Tokens int64
}

// Gauges returns those of the bucket.
func (b *Bucket) Gauges() Gauges {
	g := Gauges{InFlight: b.flight, Owing: int64(b.refunds)}
	if b.uncertain {
		g.Uncertain = 1
	}
	if p := b.pending; p != nil {
		g.Owing++
		if p.waiting != nil && p.phase != held {
			g.Unsent = p.waiting.requests
		}
	}
	if b.batch != nil {
		g.Tokens = b.batch.tokens
	}
	return g
}

// ForgetUncertainty drops the uncertainty about charges that count no more.
func (b *Bucket) ForgetUncertainty(m *Moment) {
	if b.until <= m.Now {
		b.uncertain = false
	}
}
