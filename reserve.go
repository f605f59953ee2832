package shardlimit

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Reserve is a part of a zone's capacity that is kept for important requests.
type Reserve struct {
	// How much of the zone's `events`, or `burst`, is kept, in percent from 1
	// to 100, rounded up to whole events. Required.
	Percent int `json:"percent,omitempty"`

	// The requests for which it is kept; those that match any of the sets.
	// They may use what is kept for those after them as well. Required.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`
}

func (z *Zone) validateReserves() error {
	sum := 0
	for _, r := range z.Reserves {
		switch {
		case r == nil:
			return badOption("reserve", "is null: define or remove it")
		case r.Percent < 1 || r.Percent > 100:
			return badOption("reserve", "%d: it must be from 1 to 100 percent", r.Percent)
		case len(r.MatcherSetsRaw) == 0:
			return badOption("reserve", "%d has no matchers: say for which requests it is kept", r.Percent)
		}
		if sum += r.Percent; sum > 100 {
			return badOption("reserve", "%d makes it %d percent together: it must be at most 100", r.Percent, sum)
		}
	}
	return nil
}
