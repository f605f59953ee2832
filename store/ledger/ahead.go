package ledger

import (
	"context"
	"errors"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// CheckAhead is Check of one request that waits behind others, but asks about its
// bucket no more than once for the time of trust: in between, what is known
// answers. Of buckets that cannot be copied only the last refusal is known. It is
// the answer where it is about as much as r needs, or says that r has to wait for
// longer than patience.
func (l *Ledger) CheckAhead(ctx context.Context, r store.Request, patience time.Duration) store.State {
	asked := l.books.now()
	e := l.enter(&r, asked)
	if st, isKnown := l.knowsAhead(e, &r, patience, asked); isKnown {
		if !st.Allowed && st.RetryAfter > patience {
			e.page.counts.refusals++
		}
		e.page.mu.Unlock()
		return st
	}
	was := e.asked
	e.asked = asked
	e.page.mu.Unlock()
	r.Primary = true
	st := l.store.Check(ctx, []store.Request{r})[0]
	now := l.books.now()
	e = l.enter(&r, now)
	defer e.page.mu.Unlock()
	switch {
	case st.Err == nil:
		e.hear(&r, &st, asked, now)
		if e.failed = 0; st.Replica {
			e.failed = now
		}
		e.judge(&r, &st, st.Now)
	case errors.Is(st.Err, context.Canceled):
		// A client has left, which says nothing about the store.
		e.asked = was
	default:
		e.silent = true
	}
	return st
}

// knowsAhead returns what is known of a bucket, unless the store is to be asked.
func (l *Ledger) knowsAhead(e *entry, r *store.Request, patience time.Duration, now int64) (st store.State, isKnown bool) {
	isDue := !e.trusts(now, l.trust) && (e.asked == 0 || now-e.asked > l.trust)
	switch {
	case isDue || e.silent || e.doubted:
		return st, false
	case !algorithm.Copies(r.Limit.Algorithm):
		c := &e.known.Content
		isSame := r.Need() == c[refusalCost] && r.Capacity() == c[refusalCapacity]
		isKnown = e.refusesAsBefore(r, &st, now+e.clock) && (isSame || st.RetryAfter > patience)
		return st, isKnown
	}
	// Where a charge on its way decides, nothing is set.
	e.judge(r, &st, now+e.clock)
	return st, true
}
