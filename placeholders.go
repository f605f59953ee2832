package shardlimit

import (
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const placeholderPrefix = "http.rate_limit."

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
	if rest == "exceeded.name" {
		if t.refusedBy == nil {
			return nil, true
		}
		return t.refusedBy.Name, true
	}
	dot := strings.LastIndexByte(rest, '.')
	if dot < 0 {
		return nil, false
	}
	st := t.state(rest[:dot])
	if st == nil {
		return nil, true
	}
	switch rest[dot+1:] {
	case "limit":
		return st.Limit, true
	case "remaining":
		return st.Remaining, true
	case "used":
		return st.Used, true
	case "reset":
		if st.Reset == 0 {
			// Requests that run at the same time know none.
			return nil, true
		}
		return ceilSeconds(st.Reset), true
	default:
		return nil, false
	}
}

// state returns what is known of a zone, or nil.
func (t *tracker) state(zone string) *store.State {
	for _, p := range t.parts {
		for i, z := range p.zones {
			if z.Name == zone && i < len(p.states) && p.states[i].Err == nil && p.wasAsked(i) {
				return &p.states[i]
			}
		}
	}
	return nil
}
