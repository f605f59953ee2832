package lint

import (
	"iter"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/routes"
)

// The nearest handlers on each side of a limiter are looked at: as many as suffice for any site, and fewer in
// configs with many limiters, so that these load as fast.
const (
	mostMet   = 1000
	leastMet  = 20
	mostPairs = 200_000
)

func reachFor(limiters int) int {
	return min(max(mostPairs/max(limiters, 1), leastMet), mostMet)
}

// meeting collects the handlers that a request can pass beside a limiter.
type meeting struct {
	// way are the limiter's routes below the list that both are in.
	way []*route
	met []*Handler
	// limits is set if one of them was a limiter, which met leaves out.
	limits bool
	// left is how many more routes and handlers are looked at.
	left int
}

func (m *meeting) isFull() bool { return m.left <= 0 }

// before returns the handlers that a request can have passed when it comes to h, in their order.
func (h *Handler) before(reach int) []*Handler { return h.passedBefore(reach).met }

// isLimited reports whether a request can have passed a limiter when it comes to h.
func (h *Handler) isLimited(reach int) bool { return h.passedBefore(reach).limits }

func (h *Handler) passedBefore(reach int) *meeting {
	m := &meeting{left: reach}
	for at := h; at != nil; at = at.route.list.parent {
		own := at.route
		m.way = append(m.way, own)
		for k := at.index - 1; k >= 0 && !m.isFull(); k-- {
			m.passedIn(own.handlers[k])
		}
		for i := own.index - 1; i >= 0 && !m.isFull(); i-- {
			other := own.list.routes[i]
			if !other.terminal && !other.excludes(own) {
				m.passed(other)
			}
		}
		if own.list.phase != onTheWay {
			break
		}
	}
	slices.Reverse(m.met)
	return m
}

// passed adds the handlers of a route that a request can have left, the last ones first.
func (m *meeting) passed(r *route) {
	if m.isApart(r) || r.answers() {
		return
	}
	for _, h := range slices.Backward(r.handlers) {
		m.passedIn(h)
	}
}

func (m *meeting) passedIn(h *Handler) {
	for _, l := range slices.Backward(h.lists) {
		if l.phase != onTheWay {
			continue
		}
		for _, r := range slices.Backward(l.routes) {
			m.passed(r)
		}
	}
	m.add(h)
}

// after returns the handlers that a request can pass when it has left h, in their order, and whether these are
// all.
func (h *Handler) after(reach int) (met []*Handler, isAll bool) {
	m := &meeting{left: reach}
	for at := h; at != nil; at = at.route.list.parent {
		own := at.route
		m.way = append(m.way, own)
		for _, next := range own.handlers[at.index+1:] {
			m.comesIn(next)
			if next.answers() {
				return m.met, !m.isFull()
			}
		}
		if own.terminal {
			break
		}
		for _, other := range own.list.routes[own.index+1:] {
			if m.isFull() {
				return m.met, false
			}
			if own.excludes(other) {
				continue
			}
			m.comes(other)
			if other.answers() && len(other.match()) == 0 {
				return m.met, !m.isFull()
			}
		}
	}
	return m.met, !m.isFull()
}

func (m *meeting) comes(r *route) {
	if m.isApart(r) {
		return
	}
	for _, h := range r.handlers {
		m.comesIn(h)
	}
}

func (m *meeting) comesIn(h *Handler) {
	m.add(h)
	for _, l := range h.lists {
		if l.phase != onTheWay {
			continue
		}
		for _, r := range l.routes {
			m.comes(r)
		}
	}
}

func (m *meeting) add(h *Handler) {
	switch m.left--; {
	case h.Module == "rate_limit":
		m.limits = true
	case m.left >= 0:
		m.met = append(m.met, h)
	}
}

// excludes reports whether a request that matches one route does not come to the other.
func (r *route) excludes(other *route) bool { return r.group != "" && r.group == other.group }

// answers reports whether the route surely answers the requests that match it.
func (r *route) answers() bool {
	if !r.isKnown {
		r.isKnown, r.isAnswer = true, slices.ContainsFunc(r.handlers, (*Handler).answers)
	}
	return r.isAnswer
}

func (h *Handler) answers() bool {
	if h.Module == "subroute" || h.Module == "invoke" {
		return slices.ContainsFunc(h.lists, func(l *list) bool {
			return l.phase == onTheWay && slices.ContainsFunc(l.routes, func(r *route) bool { return len(r.match()) == 0 && r.answers() })
		})
	}
	unless, isLast := routes.Answers(h.Module)
	if !isLast || unless == "" {
		return isLast
	}
	switch set := h.Fields()[unless].(type) {
	case nil:
		return true
	case bool:
		return !set
	default:
		return false
	}
}

// isApart reports whether no request matches both the limiter's way and a route.
func (m *meeting) isApart(r *route) bool {
	m.left--
	return r.where().isApartFrom(slices.Values(m.way))
}

// region is what matchers ask of a request, as far as it is simple: a field is empty where anything may match.
type region struct {
	hosts, paths, methods patterns
}

// patterns are texts in lower case, and those of them in which a part may be any text.
type patterns struct {
	exact map[string]bool
	open  []string
}

func (r *route) where() *region {
	if r.region == nil {
		r.region = regionOf(r.match())
	}
	return r.region
}

func regionOf(sets []Fields) *region {
	return &region{alternatives(sets, "host"), alternatives(sets, "path"), alternatives(sets, "method")}
}

// alternatives returns the patterns of a matcher, if all sets have it.
func alternatives(sets []Fields, matcher string) patterns {
	all := patterns{exact: map[string]bool{}}
	for _, set := range sets {
		asked := texts(set[matcher])
		if len(asked) == 0 {
			return patterns{}
		}
		for _, text := range asked {
			if text = strings.ToLower(text); strings.ContainsAny(text, "*{") {
				all.open = append(all.open, text)
			} else {
				all.exact[text] = true
			}
		}
	}
	return all
}

// isApartFrom reports whether no request that comes by a way is in the region.
func (a *region) isApartFrom(way iter.Seq[*route]) bool {
	for r := range way {
		if a.isApart(r.where()) {
			return true
		}
	}
	return false
}

func (a *region) isApart(b *region) bool {
	return areApart(a.hosts, b.hosts) || areApart(a.methods, b.methods) || areApart(a.paths, b.paths)
}

func (p patterns) isEmpty() bool { return len(p.exact)+len(p.open) == 0 }

// areApart reports whether no text fits patterns of both.
func areApart(a, b patterns) bool {
	if a.isEmpty() || b.isEmpty() {
		return false
	}
	if len(a.exact) > len(b.exact) {
		a, b = b, a
	}
	for text := range a.exact {
		if b.exact[text] {
			return false
		}
	}
	return !a.mayFit(b.open) && !patterns{exact: b.exact}.mayFit(a.open)
}

// mayFit reports whether a text may fit one of the patterns and one of some others.
func (p patterns) mayFit(others []string) bool {
	for _, other := range others {
		for text := range p.exact {
			if mayFit(text, other) {
				return true
			}
		}
		if slices.ContainsFunc(p.open, func(text string) bool { return mayFit(text, other) }) {
			return true
		}
	}
	return false
}

// mayFit reports whether a text may fit two patterns.
func mayFit(a, b string) bool {
	prefix, isPrefix := strings.CutSuffix(a, "*")
	other, isOther := strings.CutSuffix(b, "*")
	switch {
	case strings.ContainsAny(prefix+other, "*{"):
		return true
	case isPrefix && isOther:
		return strings.HasPrefix(prefix, other) || strings.HasPrefix(other, prefix)
	case isPrefix:
		return strings.HasPrefix(b, prefix)
	case isOther:
		return strings.HasPrefix(a, other)
	}
	return a == b
}
