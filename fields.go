package shardlimit

import (
	"net/http"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// The fields of draft-ietf-httpapi-ratelimit-headers-10, in canonical form.
const (
	policyField = "Ratelimit-Policy"
	limitField  = "Ratelimit"
)

// maxFieldInteger is the largest integer of a structured field (RFC 9651).
const maxFieldInteger = 999_999_999_999_999

// setFields sets the draft's fields: the policies of all zones that match the
// request, in the order of the config, and where the client stands in those
// that were asked. They replace a backend's own.
func (t *tracker) setFields(h http.Header) {
	var policies, limits httpsfv.List
	for _, p := range t.parts {
		if !p.limiter.setsIETF() {
			continue
		}
		for i, z := range p.zones {
			policies = append(policies, policyItem(z.Name, &p.reqs[i]))
			if o := p.outcome(i); o != undecided && p.states[i].Err == nil {
				limits = append(limits, limitItem(z.Name, &p.states[i], p.declines(i)))
			}
		}
	}
	setField(h, policyField, policies)
	setField(h, limitField, limits)
}

func setField(h http.Header, name string, list httpsfv.List) {
	delete(h, name)
	if len(list) == 0 {
		return
	}
	// Names of zones and small integers are always fit for a structured field.
	if text, err := httpsfv.Marshal(list); err == nil {
		h[name] = []string{text}
	}
}

// policyItem tells what a zone admits.
func policyItem(zone string, req *store.Request) httpsfv.Item {
	item := httpsfv.NewItem(zone)
	item.Params.Add("q", min(max(req.Capacity(), 0), maxFieldInteger))
	if req.Limit.Algorithm == store.Concurrency {
		item.Params.Add("qu", "concurrent-requests")
		return item
	}
	if window := policyWindow(req); window >= time.Second {
		// Rounded up: who believes it does not come too often.
		item.Params.Add("w", ceilSeconds(window.Microseconds()))
	}
	return item
}

// policyWindow is the time in which a client gets its capacity again.
func policyWindow(req *store.Request) time.Duration {
	if req.Limit.Algorithm != store.GCRA || req.Burst == 0 {
		return req.Limit.Window
	}
	microseconds, _ := algorithm.DrainTime(req, req.Burst)
	return time.Duration(microseconds) * time.Microsecond
}

// limitItem tells what is left, and how long it takes until there is more or,
// where there are windows, until they end.
func limitItem(zone string, st *store.State, declined bool) httpsfv.Item {
	item := httpsfv.NewItem(zone)
	item.Params.Add("r", min(st.Remaining, maxFieldInteger))
	switch {
	case declined && wait(st) > 0:
		item.Params.Add("t", ceilSeconds(wait(st)))
	case !declined && st.Reset > st.Now:
		item.Params.Add("t", ceilSeconds(st.Reset-st.Now))
	}
	return item
}
