package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

const (
	// backendTime is how long an admitted request runs.
	backendTime = 2 * time.Millisecond
	// severalClients is the number of clients that take turns.
	severalClients = 500
	// attackRate is how many requests of a client come in a second that is over
	// its limit.
	attackRate = 10_000
	// acquaintance is how long clients come before anything is counted: a second
	// later it is known whether they come to this process alone.
	acquaintance = 2 * ledger.DefaultTrust
	// roomy is a limit that is not reached.
	roomy = 1_000_000_000
)

// singleCase is traffic through one process, or two, without batches.
type singleCase struct {
	name string
	// before is set for charge before.
	before bool
	// clients is how many take turns; 0 means that no client comes twice.
	clients int64
	callers int
	// refused makes the client be over its limit.
	refused bool
	// shared makes another process serve every other request of a client.
	shared bool
}

var singleCases = []singleCase{
	{name: "charge after, no client comes twice", callers: 64},
	{name: "charge after, 500 clients in turn", clients: severalClients, callers: 64},
	{name: "charge after, 500 clients in turn, each at two Caddys", clients: severalClients, callers: 64, shared: true},
	{name: "charge after, one client, 1 at a time", clients: 1, callers: 1},
	{name: "charge after, one client, 16 at a time", clients: 1, callers: 16},
	{name: "charge after, one client, 64 at a time", clients: 1, callers: 64},
	{name: "charge after, one client, refused", clients: 1, callers: 64, refused: true},
	{name: "charge before, 500 clients in turn", before: true, clients: severalClients, callers: 64},
	{name: "charge before, one client, 64 at a time", before: true, clients: 1, callers: 64},
	{name: "charge before, one client, refused", before: true, clients: 1, callers: 64, refused: true},
}

// single is what a case needed.
type single struct {
	singleCase
	requests int64
	seconds  float64
	calls
}

func (s single) perRequest(n int64) float64 { return float64(n) / float64(s.requests) }
func (s single) perSecond(n int64) float64  { return float64(n) / s.seconds }

// isGenerated tells whether the load was what it should be.
func (s single) isGenerated() bool {
	return !s.refused || s.perSecond(s.requests) > 0.9*attackRate
}

// measureSingles runs each of the cases for a time.
func measureSingles(ctx context.Context, cases []singleCase, span time.Duration) (list []single, err error) {
	servers, err := redistest.LaunchShard(1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, servers.Stop()) }()
	for _, c := range cases {
		var s single
		for range attempts {
			if s, err = c.measure(ctx, servers, span); err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			if s.isGenerated() {
				break
			}
		}
		list = append(list, s)
	}
	return list, nil
}

func (c singleCase) measure(ctx context.Context, servers *redistest.Shard, span time.Duration) (_ single, err error) {
	p := newProcess(servers)
	defer func() { err = errors.Join(err, p.close()) }()
	other := p
	if c.shared {
		other = newProcess(servers)
		defer func() { err = errors.Join(err, other.close()) }()
	}
	var number atomic.Int64
	send := func(ctx context.Context) store.State {
		n := number.Add(1)
		if c.clients > 0 && n/c.clients%2 == 1 {
			return c.send(ctx, other, n)
		}
		return c.send(ctx, p, n)
	}
	// Opening a window and filling it is not what is measured, nor are the first
	// checks of a client, unless those are all there is.
	if c.refused {
		r := c.request(0)
		r.Cost = roomy
		p.ledger.Charge(ctx, []store.Request{r})
	}
	if c.clients > 0 && !c.before && !c.refused {
		l := load{callers: c.callers, until: time.Now().Add(acquaintance), request: func(ctx context.Context, _, _ int) store.State { return send(ctx) }}
		l.run(ctx)
	}
	for range c.clients {
		send(ctx)
	}
	p.settle()
	other.settle()

	before, err := countCalls(servers)
	if err != nil {
		return single{}, err
	}
	start := time.Now()
	l := load{callers: c.callers, until: start.Add(span), request: func(ctx context.Context, _, _ int) store.State { return send(ctx) }}
	if c.refused {
		l.rate = attackRate
	}
	total := l.run(ctx)
	seconds := time.Since(start).Seconds()
	p.settle()
	other.settle()
	after, err := countCalls(servers)
	switch {
	case err != nil:
		return single{}, err
	case total.err != nil:
		return single{}, total.err
	case c.refused && total.allowed > 0:
		return single{}, fmt.Errorf("%d of %d requests were allowed", total.allowed, total.requests)
	case !c.refused && total.allowed < total.requests:
		return single{}, fmt.Errorf("%d of %d requests were refused", total.requests-total.allowed, total.requests)
	}
	return single{c, total.requests, seconds, after.since(before)}, nil
}

// request is the n-th of all.
func (c singleCase) request(n int64) store.Request {
	if c.clients > 0 {
		n %= c.clients
	}
	return store.Request{
		Limit:     &store.Limit{Zone: c.name, Algorithm: store.FixedWindow, Window: time.Hour},
		ClientKey: strconv.FormatInt(n, 10), Events: roomy, Cost: 1,
	}
}

func (c singleCase) send(ctx context.Context, p *process, n int64) store.State {
	if c.before {
		return p.take(ctx, c.request(n))
	}
	return p.serve(ctx, c.request(n), backendTime)
}
