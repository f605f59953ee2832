package limiter

import (
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap/zapcore"
)

const (
	placeholderPrefix = "http.rate_limit."
	// exceededName follows it in the placeholder of caddy-ratelimit.
	exceededName = "exceeded.name"
)

// zonePlaceholders follow the name of a zone or, for the zone that is reported, the
// prefix.
var zonePlaceholders = []string{"zone", "key", "limit", "remaining", "used", "reset", "wait", "cost", "outcome", "reason"}

// placeholders returns the values of {http.rate_limit.*} for a request. They are
// empty until a zone matches it.
func placeholders(r *http.Request) caddy.ReplacerFunc {
	return func(key string) (any, bool) {
		name, ok := strings.CutPrefix(key, placeholderPrefix)
		if !ok {
			return trailerPlaceholder(r, key)
		}
		if t := trackerOf(r); t != nil {
			return t.placeholder(name)
		}
		return nil, true
	}
}

// trailerPlaceholder returns the value of {http.response.trailer.*}.
func trailerPlaceholder(r *http.Request, key string) (any, bool) {
	name, ok := strings.CutPrefix(key, trailerPrefix)
	if !ok {
		return nil, false
	}
	t := trackerOf(r)
	if t == nil || t.response == nil || t.response.ended.IsZero() {
		return nil, true
	}
	return trailerOf(t.Header(), name), true
}

func (t *tracker) placeholder(rest string) (any, bool) {
	if name, ok := strings.CutPrefix(placeholderPrefix+rest, responsePrefix); ok {
		if value, known := t.response.value(name); known {
			return value, true
		}
	}
	name, of := rest, (*inZone)(nil)
	switch dot := strings.LastIndexByte(rest, '.'); {
	case rest == exceededName:
		if v := t.verdict(anyHandler); refuses(v.outcome) {
			return v.Name, true
		}
		return nil, true
	case dot < 0:
		of = t.verdict(anyHandler).inZone
	default:
		name, of = rest[dot+1:], t.zoneNamed(rest[:dot])
	}
	switch {
	case !slices.Contains(zonePlaceholders, name):
		return nil, false
	case of == nil:
		return nil, true
	default:
		return of.placeholder(name), true
	}
}

// placeholder returns a value about the zone, or nil if there is none.
func (z *inZone) placeholder(name string) any {
	st := &z.ask.State
	switch name {
	case "zone":
		return z.Name
	case "key":
		return z.shownKey()
	case "cost":
		return z.ask.Cost
	case "outcome":
		return z.outcome().String()
	case "reason":
		return z.reason().String()
	}
	if !z.hasAnswered() {
		return nil
	}
	switch name {
	case "limit":
		return st.Limit
	case "remaining":
		return st.Remaining
	case "used":
		return st.Used
	case "wait":
		if z.answer != hasNoRoom || wait(st) == 0 {
			return nil
		}
		return ceilSeconds(wait(st))
	default:
		if st.Reset == 0 {
			// Leases have no reset.
			return nil
		}
		return ceilSeconds(st.Reset)
	}
}

// zoneNamed returns the zone of that name where it decided about the request, or where it would
// have if it did not.
func (t *tracker) zoneNamed(name string) (of *inZone) {
	for _, e := range t.all() {
		for _, z := range e.zones {
			switch {
			case z.Name != name || !z.leads():
			case z.answer != notAsked:
				return z
			case of == nil:
				of = z
			}
		}
	}
	return of
}

// MarshalLogObject implements [zapcore.ObjectMarshaler]. The log calls it when the
// request is over.
func (t *tracker) MarshalLogObject(to zapcore.ObjectEncoder) error {
	v := t.verdict(anyHandler)
	if v.inZone == nil {
		return nil
	}
	for _, name := range zonePlaceholders {
		switch value := v.placeholder(name).(type) {
		case string:
			if value != "" {
				to.AddString(name, value)
			}
		case int64:
			to.AddInt64(name, value)
		}
	}
	return nil
}
