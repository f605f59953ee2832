package shardlimit

import (
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

const placeholderPrefix = "http.rate_limit."

// zonePlaceholders are the names of what is told of a zone, which follow its
// name or, for the zone that is reported, the prefix.
var zonePlaceholders = []string{"zone", "key", "limit", "remaining", "used", "reset", "wait", "cost", "outcome", "reason"}

// placeholders yields the values of {http.rate_limit.*} for a request. They are
// empty as long as no zone matched it.
func placeholders(r *http.Request) caddy.ReplacerFunc {
	return func(key string) (any, bool) {
		name, ok := strings.CutPrefix(key, placeholderPrefix)
		if !ok {
			return nil, false
		}
		if t := trackerOf(r); t != nil {
			return t.placeholder(name)
		}
		return nil, true
	}
}

func (t *tracker) placeholder(rest string) (any, bool) {
	var p *part
	var i int
	name := rest
	switch dot := strings.LastIndexByte(rest, '.'); {
	case rest == "exceeded.name":
		if t.refusedBy == nil {
			return nil, true
		}
		return t.refusedBy.Name, true
	case dot < 0:
		p, i = t.reported()
	default:
		p, i = t.partOf(rest[:dot])
		name = rest[dot+1:]
	}
	for _, known := range zonePlaceholders {
		if name == known {
			if p == nil {
				return nil, true
			}
			return p.placeholder(i, name), true
		}
	}
	return nil, false
}

// placeholder is what is told of zone i; nil where there is nothing to tell.
func (p *part) placeholder(i int, name string) any {
	switch name {
	case "zone":
		return p.zones[i].Name
	case "key":
		return p.shownKey(i)
	case "cost":
		if m := p.has(i); m.settled {
			return m.cost
		}
		return p.reqs[i].Cost
	case "outcome":
		return p.outcome(i).String()
	case "reason":
		return p.reason(i)
	}
	if i >= len(p.states) || p.states[i].Err != nil || !p.wasAsked(i) {
		return nil
	}
	st := &p.states[i]
	switch name {
	case "limit":
		return st.Limit
	case "remaining":
		return st.Remaining
	case "used":
		return st.Used
	case "wait":
		if !p.declines(i) || wait(st) == 0 {
			return nil
		}
		return ceilSeconds(wait(st))
	default:
		if st.Reset == 0 {
			// Requests that run at the same time know no reset.
			return nil
		}
		return ceilSeconds(st.Reset)
	}
}

// partOf returns where the zone of that name decided about the request or, if
// it did not, where it would have.
func (t *tracker) partOf(zone string) (where *part, at int) {
	for _, p := range t.parts {
		for i, z := range p.zones {
			if z.Name != zone || where != nil && p.outcome(i) == undecided {
				continue
			}
			if where, at = p, i; p.outcome(i) != undecided {
				return where, at
			}
		}
	}
	return where, at
}

// reported returns the zone that the response tells of: the one that refused
// the request, or else would have, or else has the least left, or else could
// not answer. It returns nil if there is none.
func (t *tracker) reported() (*part, int) {
	var best *part
	var at, rank int
	for _, p := range t.parts {
		for i, z := range p.zones {
			if t.refusedBy != nil && (t.refusal != p || t.refusedBy != z.compiledZone) {
				continue
			}
			r := p.rank(i)
			if best == nil && r > 0 || r > rank ||
				r == rank && r == rankAllowed && p.states[i].Remaining < best.states[at].Remaining {
				best, at, rank = p, i, r
			}
		}
	}
	return best, at
}

const (
	rankError = iota + 1
	rankAllowed
	rankWouldRefuse
	rankRefused
)

// rank is how much zone i tells of what became of the request; 0 if nothing.
func (p *part) rank(i int) int {
	switch p.outcome(i) {
	case refused, errorRefused:
		return rankRefused
	case wouldRefuse:
		return rankWouldRefuse
	case allowed:
		return rankAllowed
	case errorAllowed:
		return rankError
	default:
		return 0
	}
}
