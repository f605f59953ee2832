package limiter

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/retryafter"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// provisional is the longest time for which one network's answer closes a bucket that all clients share:
// a client may be able to provoke an answer. It is also the time between probes.
const provisional = time.Minute

// pause is what the upstream of a zone has asked for the bucket that all clients share. A longer time is
// believed as far as it was said to two networks. Until it ends, or a probe finds the upstream open,
// one request a minute of all Caddys passes: that probe takes from a bucket of its own.
type pause struct {
	// doubted is until when requests have to be probes, in microseconds, or 0.
	doubted atomic.Int64

	mu sync.Mutex
	// told are the two networks of each family that were told to stay away for longest: one client may
	// have an address of each.
	told [2][2]toldNetwork
	// closed is when the last known penalty of the bucket ends, noted at since; until then the store refuses.
	since, closed time.Time
	// due is when the next probe is free, and asks when this process looks again: a probe that has found
	// the upstream open is given back.
	due, asks time.Time
}

type toldNetwork struct {
	network string
	until   time.Time
}

// probeInterval is how often a process looks for a free probe.
const probeInterval = time.Second

// believe returns for how much of the time that an answer to a network asks for the bucket is closed.
func (p *pause) believe(network string, wait time.Duration, now time.Time) (believed time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pair := &p.told[0]
	if strings.Contains(network, ":") {
		pair = &p.told[1]
	}
	own, other := &pair[0], &pair[1]
	if other.network == network || own.network != network && own.until.After(other.until) {
		own, other = other, own
	}
	believed = min(wait, max(provisional, other.until.Sub(now)))
	until := now.Add(wait)
	if until.After(own.until) {
		*own = toldNetwork{network, until}
	}
	closed := now.Add(believed)
	if now.Before(p.closed) {
		closed = p.closed // The store keeps the penalty that it has.
		until = time.UnixMicro(max(p.doubted.Load(), until.UnixMicro()))
	}
	p.doubt(now, closed, until)
	return believed
}

// doubt makes requests be probes from when the bucket is open again.
func (p *pause) doubt(now, closed, until time.Time) {
	p.since, p.closed, p.due, p.asks = now, closed, closed, closed
	if p.doubted.Store(until.UnixMicro()); !closed.Before(until) {
		p.doubted.Store(0)
	}
}

// saw notes a penalty that another process may have written, and so doubt.
func (p *pause) saw(now, until time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if until.After(p.closed) {
		p.doubt(now, until, time.UnixMicro(max(p.doubted.Load(), until.Add(provisional).UnixMicro())))
	}
}

// turn returns how long requests wait for the next probe, or 0 if they need none or the caller
// should ask for it.
func (p *pause) turn(now time.Time) (wait time.Duration, asks bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case now.UnixMicro() >= p.doubted.Load():
		p.doubted.Store(0)
		return 0, false
	case now.Before(p.closed):
		return 0, false
	case now.Before(p.asks):
		return max(p.due.Sub(now), p.asks.Sub(now)), false
	}
	p.asks = now.Add(probeInterval)
	return 0, true
}

// isTaken notes when a probe is free that another request has.
func (p *pause) isTaken(until time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.due = until
}

// gaveBack notes that a probe is free, or that none could be asked for.
func (p *pause) gaveBack() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asks = p.closed
}

// end ends the pause: the upstream is open, or an operator has reset the bucket.
func (p *pause) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told, p.closed, p.asks = [2][2]toldNetwork{}, time.Time{}, time.Time{}
	p.doubted.Store(0)
}

// answered notes that the upstream served a request that was admitted at a time. If that was while
// the bucket was closed, somebody has reset it; those just before the penalty arrived say nothing.
func (p *pause) answered(admitted time.Time) {
	p.mu.Lock()
	isReset := p.doubted.Load() != 0 && admitted.After(p.since.Add(probeInterval)) && admitted.Before(p.closed)
	p.mu.Unlock()
	if isReset {
		p.end()
	}
}

// isForAll reports whether all clients share the bucket of the request, because its key names none.
func (z *inZone) isForAll() bool { return z.isKeyForAll(z.resolvedKey()) }

func (z *Zone) isKeyForAll(key string) bool {
	return slices.ContainsFunc(z.templates, func(t keyTemplate) bool {
		return t.isConstant && strings.HasPrefix(key, t.tag) && strings.HasPrefix(key[len(t.tag):], ":")
	})
}

// isConstant reports whether a placeholder has one value for all requests.
func isConstant(name string) bool {
	return slices.ContainsFunc([]string{"env.", "file.", "system."}, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// awaitsProbe reports whether a zone refuses the request because its upstream may be closed and another
// request finds out.
func (e *evaluation) awaitsProbe(r *http.Request) bool {
	isDoubted := func(z *inZone) bool { return z.ObeyUpstream && z.pause.doubted.Load() != 0 }
	if !slices.ContainsFunc(e.zones, isDoubted) {
		return false
	}
	// A request that others refuse needs no probe.
	return e.refuseKnown(e.where(func(z *inZone) bool { return z.isAskedAsEnforced() && !z.isUncertain() && !isDoubted(z) })) ||
		slices.ContainsFunc(e.zones, func(z *inZone) bool { return isDoubted(z) && !z.passesPause(r) })
}

// passesPause reports whether the request needs no probe in the zone, or is it.
func (z *inZone) passesPause(r *http.Request) bool {
	e := z.of
	if z.role != enforces || z.bucket != ownBucket || e.open == nil || e.limiter.simulation != nil || !z.isForAll() ||
		z.rare != nil && z.rare.probe != nil {
		return true
	}
	if z.rare != nil {
		z.rare.awaitsProbe = false
	}
	now := e.limiter.Now()
	wait, asks := z.pause.turn(now)
	if asks {
		// The store itself: this process must not refuse by an answer from before the last probe ended.
		ask := store.Ask{Request: z.probeRequest()}
		e.open.Base.Take(context.WithoutCancel(r.Context()), []*store.Ask{&ask})
		switch {
		case ask.Err != nil:
			// The zone's own question and on_error decide. A take that may run late is given back.
			if z.pause.gaveBack(); errors.Is(ask.Err, store.ErrUncertain) {
				z.ensureRare().probe = &ask.Request
			}
			return true
		case ask.Allowed:
			ask.Request.Receipt = ask.State.Receipt
			z.ensureRare().probe = &ask.Request
			return true
		}
		wait = ask.RetryAfter
		z.pause.isTaken(now.Add(wait))
	}
	if wait == 0 {
		return true
	}
	z.ensureRare().awaitsProbe = true
	until := now.Add(wait).UnixMicro()
	z.learn(store.State{Now: now.UnixMicro(), Limit: max(z.ask.Capacity(), 0), Penalty: until, Reset: until, RetryAfter: wait})
	return false
}

// probeRequest asks to be the one probe of a minute, where the bucket is.
func (z *inZone) probeRequest() store.Request {
	return store.Request{Limit: &z.probes, ClientKey: z.ask.ClientKey, ID: identity.NewRequestID(), Cost: 1, Events: 1}
}

// notePause notes the penalty of a bucket that all clients share: those of the zone itself are no longer than its own.
func (z *inZone) notePause() {
	st := &z.ask.State
	left := time.Duration(st.Penalty-st.Now) * time.Microsecond
	if z.ObeyUpstream && st.Penalty != 0 && left > z.Penalty && z.of.limiter.simulation == nil && (z.rare == nil || !z.rare.awaitsProbe) && z.isForAll() {
		now := z.of.limiter.Now()
		z.pause.saw(now, now.Add(left))
	}
}

// keepProbe keeps a probe from others that has found the upstream closed.
func (z *inZone) keepProbe() {
	if z.rare != nil {
		z.rare.probe = nil
	}
}

// endProbes gives back probes whose answers show that the upstream is open, or that got none. Those of
// others, such as a 429 or a 502, stay taken.
func (e *evaluation) endProbes(t *tracker, status int) {
	isOpen := status != statusLeft && status < http.StatusInternalServerError && !retryafter.Refuses(status)
	for _, z := range e.zones {
		if !z.ObeyUpstream || z.pause.doubted.Load() == 0 && (z.rare == nil || z.rare.probe == nil) {
			continue
		}
		if z.rare == nil || z.rare.probe == nil {
			if isOpen && z.role == enforces && z.answer == hasRoom && z.isForAll() {
				z.pause.answered(e.limiter.Now().Add(-t.took(e.limiter)))
			}
			continue
		}
		if isOpen {
			z.pause.end()
		} else if status == statusLeft {
			z.pause.gaveBack()
		}
		if e.open != nil && (isOpen || status == statusLeft) {
			e.open.Refund([]*store.Request{z.rare.probe})
		}
		z.rare.probe = nil
	}
}

// networkOf returns the network of the request's client: its /24, or /48 of IPv6.
func networkOf(r *http.Request) string {
	if r == nil {
		return ""
	}
	return string(clientkey.Append(nil, clientIP(r), clientkey.Exact, clientkey.Networks{IPv4: 24, IPv6: 48}))
}

// probesOf is the limit of a zone's probes, whose takes have IDs: to give back what was never taken does no harm.
func probesOf(zone string) store.Limit {
	return store.Limit{Zone: zone, Algorithm: store.SlidingLog, Window: provisional}
}
