package algorithm

import "github.com/shardlimit/caddy-shardlimit/store"

// Operation is what a store is asked to do to a bucket.
type Operation uint8

// The operations.
const (
	Check Operation = iota
	Charge
	Take
	Refund
	Penalize
	// Peek is Check, but opens no window.
	Peek
)

// String returns the operation's name.
func (op Operation) String() string {
	return [...]string{"check", "charge", "take", "refund", "penalize", "peek"}[op]
}

// Run does the operation to b, and returns what b then looks like to r.
func (op Operation) Run(b Bucket, r *store.Request, now int64) store.State {
	spent := false
	switch op {
	case Check:
		b.Open(r, now)
	case Charge:
		b.Charge(r, now)
		spent = true
	case Take:
		spent = b.Take(r, now)
	case Refund:
		b.Refund(r, now)
	case Penalize:
		b.Penalize(r, now)
	case Peek:
	}
	return b.View(r, now, spent)
}
