package ledger

import (
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// noteAlone notes whether the primary's reply to a charge counts that charge on
// top of what was known, and nothing else.
func (e *entry) noteAlone(r *store.Request, word algorithm.Known, storeNow, now int64) {
	expected := e.debts.base
	expected.Charge(r, storeNow)
	switch {
	case word != expected:
		e.alone = 0
	case e.alone == 0:
		e.alone = now
	}
}

// fitsUnasked sets the state of a request that is admitted without a call, and
// holds its cost: what the primary said last is trusted still, for as long as
// that nobody else has charged the bucket, and at least half of it would be left.
// So a client whose requests all come to this process costs no checks, and where
// another process begins to serve it as well, that is seen within the time of
// trust and before the limit is near.
func (l *Ledger) fitsUnasked(e *entry, r *store.Request, st *store.State, now int64) bool {
	storeNow := now + e.clock
	switch {
	case e.alone == 0, now-e.alone < l.trust, !e.trusts(now, l.trust):
		return false
	case e.silent, e.doubted, e.refunds > 0, r.Primary:
		return false
	case !algorithm.Copies(r.Limit.Algorithm), !e.known.IsOpen(r.Limit, storeNow):
		return false
	}
	var known store.State
	if e.judge(r, &known, storeNow) != fits || 2*(known.Remaining-r.Cost) < known.Limit {
		return false
	}
	*st = known
	e.hold(r.Cost)
	e.page.counts.admissions++
	return true
}
