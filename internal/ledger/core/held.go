package core

import (
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// heldPause is how long, in microseconds, the primary is not asked again about a bucket in which something is held.
const heldPause = 50_000

// heldAnswer is what the store last said is held in the bucket. It is zero if that was nothing.
type heldAnswer struct {
	amount int64
	// now is the store's instant of the answer, and asked is when it was asked for.
	now, asked int64
}

// hearHeld takes in what an answer of the primary, asked for then, says is held. Answers need not arrive in order;
// one that was asked for later stands although the store's clock has been set back.
func (b *Bucket) hearHeld(r *store.Request, st *store.State, asked int64) {
	last := b.extras().held
	isOlder := st.Now < last.now && (last.now-st.Now <= clockSlack || asked < last.asked)
	if r.Hold == 0 || st.Err != nil || st.Replica || isOlder || b.predatesReset(asked) {
		return
	}
	b.unheld = st.Held == 0 && (b.unheld || asked >= b.trusted)
	switch {
	case st.Held > 0:
		b.ensureExtra().held = heldAnswer{int64(st.Held), st.Now, max(asked, last.asked)}
	case b.extra != nil:
		b.extra.held = heldAnswer{}
	}
}

// heldFrom is what may come back and is in the way of r. Where what is known is more recent than what the store
// has said of that, it may be anything.
func (b *Bucket) heldFrom(r *store.Request) int64 {
	switch last := b.extras().held; {
	case r.Hold == 0, b.unheld:
		return 0
	case last.asked < b.trusted:
		return algorithm.MostHeld
	default:
		return last.amount
	}
}

// mayAskForHeld reports whether the primary is to be asked whether what is held, and is in the way, has come back: by
// one request at a time.
func (b *Bucket) mayAskForHeld(m *Moment) bool {
	return b.taking == 0 && m.Now-max(b.asked, b.extras().held.asked) > heldPause
}

// AwaitsEnd reports whether a take, which is known to be refused for what is held, waits until this process's takes that
// have settled are held no more.
func (b *Bucket) AwaitsEnd(r *store.Request, m *Moment) bool {
	if r.Hold == 0 || b.ending() == 0 {
		return false
	}
	var refusal store.State
	rest, isServed := b.Rest(r, m)
	return !isServed && b.refuses(&rest, &refusal, m) && b.showHeld(&rest, &refusal)
}

// showHeld makes a refusal that this process repeats show what is held, and reports whether that alone is in the way.
func (b *Bucket) showHeld(r *store.Request, st *store.State) bool {
	return !st.InFlight && algorithm.ShowHeld(st, r, b.heldFrom(r))
}

// forgoHold makes a take that leaves twice the least that is not held, by what is known, neither held nor hear what is:
// it then costs the store no more than one whose cost never comes back.
func (b *Bucket) forgoHold(r *store.Request, m *Moment) {
	if r.Hold == 0 || b.standing(m) != fresh {
		return
	}
	if left := r.Capacity() - b.usedOf(r, m) - b.unheard(m) - b.taking - r.Cost; left >= 2*r.LeastUnheld() {
		r.Hold = 0
	}
}

// IsUnheard reports whether st refuses the take of r that was sent, which did not hear what is held: r takes again.
func IsUnheard(r, sent *store.Request, st *store.State) bool {
	return r.Hold != sent.Hold && st.Err == nil && !st.Allowed && !st.InFlight
}
