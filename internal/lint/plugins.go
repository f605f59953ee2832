package lint

import (
	"fmt"
	"slices"
	"strings"
)

// caches are handlers that answer with what they have stored, to whomever asks.
var caches = []string{"cache", "http_cache"}

// behindCache finds limiters behind a cache.
func behindCache(s *Subject) {
	i := slices.IndexFunc(s.Before, func(h *Handler) bool { return slices.Contains(caches, h.Module) })
	if i < 0 || s.InErrors {
		return
	}
	name := s.Before[i].Module
	s.Report("", name+" comes before it, so stored answers are free and show another client's limit, and a refusal may be given to others",
		fmt.Sprintf("write the global option order %s after rate_limit, or in a route put rate_limit before %s", name, name))
}

// refusers are handlers that answer requests without a valid login, or requests that look like attacks, and the
// statuses with which they do.
var refusers = map[string][]string{
	"authentication": {"401", "403"}, "authenticator": {"401", "403"},
	"appsec": {"403"}, "crowdsec": {"403"}, "waf": {"403"},
}

// unseenRefusal finds zones that should limit failed logins or attacks, behind a handler that answers these itself.
func unseenRefusal(s *Subject) {
	if s.InErrors {
		return
	}
	for _, z := range s.Zones {
		for _, h := range s.Before {
			if problem, remedy := s.unseenBehind(h, &z); problem != "" {
				s.Report(z.Name, problem, remedy)
				break
			}
		}
	}
}

// unseenBehind returns the problem of a zone behind a handler and its remedy, or empty texts.
func (s *Subject) unseenBehind(h *Handler, z *Zone) (problem, remedy string) {
	name, statuses := h.refuses()
	if statuses == nil || z.readsIdentity(name) || h.isLimited(s.reach) || !z.isPart()(h) {
		return "", ""
	}
	remedy = fmt.Sprintf("write its rate_limit before %s, in a route", name)
	counted := z.refusals()
	countsWhatRefuses := func(h *Handler) bool {
		_, statuses := h.refuses()
		return slices.ContainsFunc(statuses, func(status string) bool { return slices.Contains(counted, status) })
	}
	switch {
	case countsWhatRefuses(h) && !slices.ContainsFunc(s.After, countsWhatRefuses):
		return fmt.Sprintf("it counts the status %s, but %s comes before it and answers so itself, which is not counted", strings.Join(counted, " "), name), remedy
	case slices.Contains(logins, name) && z.isOfAddresses() && !slices.ContainsFunc(s.Zones, func(z Zone) bool { return z.readsIdentity(name) }):
		return fmt.Sprintf("%s comes before it, and no limit before that, so nothing limits failed logins", name),
			remedy + "; a zone with the user as its key belongs behind"
	}
	return "", ""
}

// refuses returns what the handler is called, and the statuses with which it refuses requests.
func (h *Handler) refuses() (name string, statuses []string) {
	if h.Module == "reverse_proxy" && h.Fields()["handle_response"] != nil {
		return "forward_auth", refusers["authentication"]
	}
	return h.Module, refusers[h.Module]
}

// logins are the refusers that ask for a password or a token themselves.
var logins = []string{"authentication", "authenticator"}

// refusals returns the statuses that the zone counts, if refusers answer with all of them.
func (z *Zone) refusals() (counted []string) {
	for _, status := range array(z.Fields["count_status"]) {
		counted = append(counted, fmt.Sprint(status))
	}
	if slices.ContainsFunc(counted, func(status string) bool { return status != "401" && status != "403" }) {
		return nil
	}
	return counted
}

// readsIdentity reports whether the key has what a handler finds out about the client.
func (z *Zone) readsIdentity(handler string) bool {
	return slices.ContainsFunc(texts(z.Fields["key"]), func(text string) bool {
		return strings.Contains(text, "{http.auth.") || handler == "forward_auth" && strings.Contains(text, "{http.request.header.")
	})
}

// isOfAddresses reports whether the zone limits all requests of an address.
func (z *Zone) isOfAddresses() bool {
	for _, field := range []string{"count_status", "count_status_not", "match", "cost"} {
		if z.Fields[field] != nil {
			return false
		}
	}
	key := texts(z.Fields["key"])
	return len(key) == 1 && slices.Contains([]string{"{http.vars.client_ip}", "{http.request.remote.host}"}, key[0])
}
