package simulation

import (
	"context"
	"errors"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// remote is the store of a process. Each client has a shard with its name, so the shard of a charge that is given up
// names the client. The shards share the servers.
type remote struct {
	// Remote is nil: a ledger calls no other methods.
	store.Remote
	*process
}

// exchange sends a message about each ask, and waits for the answers. If the client leaves before, the state of
// the ask is as it was.
func (r *remote) exchange(ctx context.Context, asks []*store.Ask, send func(i int, reply func(st store.State))) {
	answers := make(chan func(), len(asks))
	r.mu.Lock()
	for i, a := range asks {
		send(i, func(st store.State) { answers <- func() { a.State = st } })
	}
	r.mu.Unlock()
	for range asks {
		select {
		case answer := <-answers:
			answer()
		case <-ctx.Done():
			return
		}
	}
}

// looking marks the context of a request that waits behind others.
type looking struct{}

func (r *remote) Check(ctx context.Context, asks []*store.Ask) {
	for _, a := range asks {
		a.State = store.State{Err: context.Canceled}
	}
	if ctx.Err() != nil {
		return
	}
	r.exchange(ctx, asks, func(i int, reply func(st store.State)) {
		if ctx.Value(looking{}) != nil {
			r.looks(r.process, &asks[i].Request)
		}
		r.net.check(r.name, &asks[i].Request, reply)
	})
}

func (r *remote) Take(ctx context.Context, asks []*store.Ask) {
	if ctx.Err() != nil {
		for _, a := range asks {
			a.State = store.State{Err: errLeftBefore}
		}
		return
	}
	lates := make([]store.Late, len(asks))
	for _, a := range asks {
		a.State = store.State{Err: errLeftSince}
	}
	r.exchange(ctx, asks, func(i int, reply func(st store.State)) {
		r.net.write(r.name, opTake, &asks[i].Request, lates[i].End, reply)
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	v, _ := ctx.Value(asking{}).(*visit)
	for i, a := range asks {
		if errors.Is(a.Err, store.ErrUncertain) {
			a.Err = lates[i].Wrap(a.Err)
			r.doubted(&a.Request, &lates[i])
		}
		r.took(r.process, v, a)
	}
}

// Charge renews the lease by which processes count each other. It takes no time, and is never lost: there are too many.
func (r *remote) Charge(_ context.Context, asks []*store.Ask) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range asks {
		a.State = store.State{Allowed: true, Used: int64(len(r.caddys)), Now: r.net.clock()}
	}
}

// isLease reports whether r is of the lease by which processes count each other.
func isLease(r *store.Request) bool { return strings.HasPrefix(r.Limit.Zone, "*") }

// post sends messages for whose answers nobody waits.
func (r *remote) post(op algorithm.Operation, reqs []*store.Request, report func(i int, st store.State)) {
	go func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for i, req := range reqs {
			reply := func(st store.State) {
				if st.Err != nil && op == opRefund {
					r.client(keyOf(req)).kept += req.Cost
				}
				if report != nil {
					report(i, st)
				}
			}
			switch {
			case isLease(req):
			case r.dead:
				reply(store.State{Err: errDown})
			default:
				r.net.write(r.name, op, req, nil, reply)
			}
		}
	}()
}

func (r *remote) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	r.post(opCharge, reqs, report)
}

func (r *remote) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	r.post(opRefund, reqs, report)
}

func (r *remote) PenalizeDetached(reqs []*store.Request) { r.post(opPenalize, reqs, nil) }

func (r *remote) Reset(ctx context.Context, req store.Request) error {
	asks := store.Asks([]store.Request{req})
	r.exchange(ctx, asks, func(_ int, reply func(st store.State)) { r.net.empty(r.name, &req, reply) })
	return asks[0].Err
}

// shardPrefix begins the name of a shard, which ends with that of its client.
const shardPrefix = "shard of "

func (*remote) Owner(clientKey string) string { return shardPrefix + clientKey }

func (r *remote) Owners(clientKey string) []string { return []string{r.Owner(clientKey)} }

func (*remote) Hurry(string) {}
