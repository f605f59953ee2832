package core

import (
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// heldPause is how long, in microseconds, the primary is not asked again about a bucket in which something is held.
const heldPause = 50_000

// heldAnswer is what the store last said is held in the bucket.
type heldAnswer struct {
	amount int64
	// now is the store's instant of the answer, and asked is when it was asked for.
	now, asked int64
}

// hearHeld takes in what an answer of the primary, asked for then, says is held. Answers need not arrive in order.
func (b *Bucket) hearHeld(r *store.Request, st *store.State, asked int64) {
	isNews := st.Remaining < r.LeastUnheld() || b.extra != nil
	if r.Hold == 0 || st.Err != nil || st.Replica || !isNews || st.Now < b.extras().held.now || b.predatesReset(asked) {
		return
	}
	b.ensureExtra().held = heldAnswer{int64(st.Held), st.Now, max(asked, b.extra.held.asked)}
}

// heldFrom is what may come back and is in the way of r. Where what is known is more recent than what the store
// has said of that, it may be anything.
func (b *Bucket) heldFrom(r *store.Request) int64 {
	switch last := b.extras().held; {
	case r.Hold == 0:
		return 0
	case last.asked < b.trusted:
		return algorithm.MostHeld
	default:
		return last.amount
	}
}

// mayAskForHeld reports whether the primary is to be asked whether what is held has come back: by one request at a
// time.
func (b *Bucket) mayAskForHeld(r *store.Request, m *Moment) bool {
	return b.taking == 0 && m.Now-max(b.asked, b.extras().held.asked) > heldPause && b.heldFrom(r) > 0
}

// AwaitsEnd reports whether a take, which is known to be refused, waits until this process's takes that have settled are
// held no more.
func (b *Bucket) AwaitsEnd(r *store.Request, m *Moment) bool {
	return r.Hold != 0 && b.ending() > 0 && b.IsFull(r, m)
}

// showHeld makes a refusal that this process repeats show what is held.
func (b *Bucket) showHeld(r *store.Request, st *store.State) {
	if !st.InFlight {
		algorithm.ShowHeld(st, r, b.heldFrom(r))
	}
}
