package adversary

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"time"
)

// Change is a call of the admin API below /rate_limit/, and how it changes the model.
type Change struct {
	Method, Path string
	Do           func(now Span)
}

// DrawChange returns a random change for one of the clients or a zone.
func (m *Model) DrawChange(rng *rand.Rand, keys ...string) Change {
	z, key, n := pick(rng, m.Zones...), pick(rng, keys...), pick[int64](rng, 1, 3, 6)
	own, of := m.override(z.Name, key), m.override(z.Name, "")
	who := z.Name + "?key=" + url.QueryEscape(key)
	post, remove := http.MethodPost, http.MethodDelete
	changes := []Change{{post, "blocks/" + who + "&for=1h", func(now Span) { own.block = now.plus(time.Hour) }}}
	add := func(c Change, sensible bool) {
		if sensible {
			changes = append(changes, c)
		}
	}
	events := z.Algorithm != GCRA // another rate drains what was spent at a mean of both
	add(Change{remove, "blocks/" + who, func(Span) { own.block = Span{} }}, own.block != Span{})
	add(Change{post, fmt.Sprintf("grants/%s&events=%d", who, n), func(Span) { own.grant = &n }}, own.grant == nil && z.Window > time.Minute)
	add(Change{remove, "grants/" + who, func(Span) { own.grant = nil }}, own.grant != nil)
	add(Change{post, fmt.Sprintf("limits/%s&events=%d", who, n), func(Span) { own.events = &n }}, events)
	add(Change{remove, "limits/" + who, func(Span) { own.events = nil }}, own.events != nil)
	add(Change{post, fmt.Sprintf("zones/%s?events=%d", z.Name, n), func(Span) { of.events = &n }}, events)
	add(Change{remove, "zones/" + z.Name + "?settings=events", func(Span) { of.events = nil }}, of.events != nil)
	enforced, percent := rng.IntN(2) == 0, 0
	if enforced {
		percent = 100
	}
	add(Change{post, fmt.Sprintf("zones/%s?enforce=%d", z.Name, percent), func(Span) { of.enforced = &enforced }}, true)
	add(Change{remove, "zones/" + z.Name + "?settings=enforce", func(Span) { of.enforced = nil }}, of.enforced != nil)
	return pick(rng, changes...)
}

// DrawReset returns the reset of a bucket.
func (m *Model) DrawReset(rng *rand.Rand, keys ...string) (c Change, ok bool) {
	z, key := pick(rng, m.Zones...), pick(rng, keys...)
	b := m.bucket(z, key)
	for _, h := range b.running {
		if z.Before && h.cost > 0 {
			return c, false
		}
	}
	return Change{http.MethodDelete, "buckets/" + z.Name + "?key=" + url.QueryEscape(key), func(Span) { b.empty() }}, true
}

// Spent returns what a bucket has, without what is in flight, what a Caddy has in flight there, and whether the
// client is penalized.
func (m *Model) Spent(z *Zone, key string, caddy int, now Span) (spent Count, flight int64, penalized bool) {
	b := m.bucket(z, key)
	if !b.pass(now) {
		m.Doubt = "a look at zone " + z.Name + " was near the end of a window or penalty"
	}
	for _, h := range b.running {
		if !z.Before && h.caddy == caddy {
			flight += h.cost
		}
	}
	return b.spent(now), flight, b.penalty != Span{}
}

// Takes returns how many running requests of a client have taken what may come back.
func (m *Model) Takes(z *Zone, key string) (n int64) {
	for _, h := range m.bucket(z, key).running {
		if z.Before && z.Algorithm != Concurrency && h.cost > 0 {
			n++
		}
	}
	return n
}

// Near returns the clients that have used at least 80 percent of the limit of a zone but not all, and how
// many have used all. It returns false if the limit depends on more than the config.
func (m *Model) Near(z *Zone, now Span) (near map[string]int64, full int64, ok bool) {
	near, limit := map[string]int64{}, z.Events
	if z.Burst != 0 {
		limit = z.Burst
	}
	if z.Dynamic || z.Algorithm == Concurrency || z.Algorithm == SlidingLog {
		return nil, 0, false
	}
	for id, o := range m.overrides {
		if id.zone == z.Name && *o != (overrides{}) {
			return nil, 0, false
		}
	}
	for id, b := range m.buckets {
		if id.zone != z.Name {
			continue
		}
		n := b.spent(now)
		switch {
		case n.Lo != n.Hi:
			return nil, 0, false
		case n.Lo >= limit:
			full++
		case 5*n.Lo >= 4*limit:
			near[id.key] = n.Lo
		}
	}
	return near, full, true
}

// Clear returns the first instant from now on at which no window or penalty of a client ends soon.
func (m *Model) Clear(key string, now, soon int64) int64 {
	var ends []Span
	for _, z := range m.Zones {
		b := m.bucket(z, key)
		if ends = append(ends, b.penalty); b.open && z.hasWindows() {
			ends = append(ends, b.end())
		}
		if z.byClock() {
			ends = append(ends, edge(z, now), edge(z, now-margin))
		}
	}
	slices.SortFunc(ends, func(a, b Span) int { return int(a.Lo - b.Lo) })
	for _, end := range ends {
		if now > end.Lo-soon && now <= end.Hi+margin {
			now = end.Hi + margin + 1
		}
	}
	return now
}
