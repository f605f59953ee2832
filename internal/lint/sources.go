package lint

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
)

// setting is a placeholder to which a handler gives a value.
type setting struct {
	// name ends in a dot if it begins the names of several.
	name string
	// inputs are the placeholders of which the value is made.
	inputs []string
	// removes is set if the placeholder is made empty.
	removes bool
}

func (s *setting) sets(name string) bool {
	return s.name == name || strings.HasSuffix(s.name, ".") && strings.HasPrefix(name, s.name)
}

// settings returns what a handler sets of a request.
func (h *Handler) settings() []setting {
	if h.isRead {
		return h.set
	}
	h.isRead = true
	add := func(name string, inputs ...string) {
		s := setting{name: plain(name)}
		for _, input := range inputs {
			s.inputs = append(s.inputs, placeholdersIn(input)...)
		}
		// What is made of itself, such as a longer form, is what was there.
		if !slices.Contains(s.inputs, s.name) {
			h.set = append(h.set, s)
		}
	}
	switch fields := h.Fields(); h.Module {
	case "headers":
		ops := object(fields["request"])
		for _, op := range []string{"set", "add"} {
			for header, values := range object(ops[op]) {
				add(clientkey.HeaderPrefix+header, texts(values)...)
			}
		}
		for _, header := range texts(ops["delete"]) {
			h.set = append(h.set, setting{name: plain(clientkey.HeaderPrefix + header), removes: true})
		}
	case "map":
		inputs := append([]string{text(fields["source"])}, texts(fields["defaults"])...)
		for _, m := range objects(fields["mappings"]) {
			inputs = append(inputs, texts(m["outputs"])...)
		}
		for _, destination := range texts(fields["destinations"]) {
			add(strings.Trim(destination, "{}"), inputs...)
		}
	case "vars":
		for name, value := range fields {
			if name != "handler" {
				add("http.vars."+name, texts(value)...)
			}
		}
	case "authentication":
		add("http.auth.")
	case "reverse_proxy":
		add("http.reverse_proxy.")
	}
	return h.set
}

// plain returns the name of a placeholder, that of a header in lower case.
func plain(name string) string {
	if len(name) > len(clientkey.HeaderPrefix) && strings.EqualFold(name[:len(clientkey.HeaderPrefix)], clientkey.HeaderPrefix) {
		return strings.ToLower(name)
	}
	return name
}

// shown returns the name of a placeholder as it is usually written.
func shown(name string) string {
	if header, is := strings.CutPrefix(name, clientkey.HeaderPrefix); is {
		return clientkey.HeaderPrefix + http.CanonicalHeaderKey(header)
	}
	return name
}

func placeholdersIn(text string) (names []string) {
	for _, name := range limiter.PlaceholdersIn(text) {
		names = append(names, plain(name))
	}
	return names
}

// source is a placeholder on which an option of a zone depends.
type source struct {
	name string
	// via are the handlers before the limiter that hand the value on.
	via []*Handler
	// later is the first handler that sets it only when it has been read, or nil.
	later *Handler
}

// sourcesOf returns what the value of a placeholder comes from, where it is not known to be set before it is read.
// isPart reports whether a handler can meet the requests that are looked at.
func (s *Subject) sourcesOf(name string, isPart func(*Handler) bool) (found []source) {
	type reading struct {
		source
		// at is how many of the handlers before have run when it is read.
		at int
	}
	seen := map[string]bool{}
	for waiting := []reading{{source{name: name}, len(s.Before)}}; len(waiting) > 0; waiting = waiting[1:] {
		r := waiting[0]
		key := fmt.Sprint(r.name, " ", r.at)
		if seen[key] {
			continue
		}
		seen[key] = true
		isSet := false
		for i := r.at - 1; i >= 0 && !isSet; i-- {
			h := s.Before[i]
			for _, set := range h.settings() {
				if !set.sets(r.name) {
					continue
				}
				isSet = true
				at := i
				if h.Module == "map" {
					at = r.at // it reads when it is read
				}
				for _, input := range set.inputs {
					waiting = append(waiting, reading{source{name: input, via: append(slices.Clip(r.via), h)}, at})
				}
			}
		}
		if isSet {
			continue
		}
		for _, h := range slices.Concat(s.Before[r.at:], s.After) {
			sets := func(set setting) bool { return !set.removes && set.sets(r.name) }
			if isPart(h) && slices.ContainsFunc(h.settings(), sets) {
				r.later = h
				break
			}
		}
		found = append(found, r.source)
	}
	return found
}

// isPart returns a func that reports whether a handler can meet the requests of a zone.
func (z *Zone) isPart() func(*Handler) bool {
	own := regionOf(objects(z.Fields["match"]))
	return func(h *Handler) bool { return !own.isApartFrom(h.way()) }
}

// credentials are headers that identify a client, and that handlers behind the limiter replace for the backend.
var credentials = []string{
	"authorization", "proxy-authorization", "cookie", "api-key", "apikey", "x-api-key", "x-apikey", "x-api-token", "x-auth-token", "x-access-token",
}

// lateSource finds options that read a value before a handler sets it, so that the value is empty, or the client's.
func lateSource(s *Subject) {
	for _, z := range s.Zones {
		isPart := z.isPart()
		for _, option := range []string{"key", "events", "burst", "cost"} {
			for _, name := range placeholdersIn(strings.Join(texts(z.Fields[option]), " ")) {
				for _, source := range s.sourcesOf(name, isPart) {
					header, isHeader := strings.CutPrefix(source.name, clientkey.HeaderPrefix)
					// A cost is read again when the response begins; but with a header's 0 any request fits.
					if source.later == nil || slices.Contains(credentials, header) || option == "cost" && !isHeader {
						continue
					}
					value := "it is empty"
					if isHeader {
						value = "its value is the client's"
					}
					order := []string{source.later.directive()}
					for _, h := range slices.Backward(source.via) {
						order = append(order, h.directive())
					}
					from := ""
					if source.name != name {
						from = fmt.Sprintf(" through {%s}", name)
					}
					s.Report(z.Name, fmt.Sprintf("%s reads {%s}%s before %s sets it, so %s", option, shown(source.name), from, source.later.directive(), value),
						fmt.Sprintf("write them in a route block, in the order %s, rate_limit", strings.Join(slices.Compact(order), ", ")))
				}
			}
		}
	}
}

// directive returns what a Caddyfile calls the handler.
func (h *Handler) directive() string {
	for at := h; at.route.list.parent != nil; at = at.route.list.parent {
		if at.route.list.parent.Module == "reverse_proxy" {
			return "forward_auth"
		}
	}
	switch h.Module {
	case "headers":
		return "request_header"
	case "authentication":
		return "basic_auth"
	}
	return h.Module
}

// forwarded are headers that a proxy fills with an address, and a client with what it likes.
var forwarded = []string{
	"x-forwarded-for", "x-real-ip", "forwarded", "true-client-ip", "cf-connecting-ip", "cf-connecting-ipv6", "x-client-ip", "client-ip",
	"x-cluster-client-ip", "x-original-forwarded-for", "fastly-client-ip", "fly-client-ip",
}

// forwardedKey finds keys with an address that clients can make up.
func forwardedKey(s *Subject) {
	// Who is known by its connection may be a proxy that can be believed.
	if s.isAsked("remote_ip") {
		return
	}
	for _, z := range s.Zones {
		if asksFor(objects(z.Fields["match"]), "remote_ip") {
			continue
		}
		for _, name := range placeholdersIn(strings.Join(texts(z.Fields["key"]), " ")) {
			for _, source := range s.sourcesOf(name, z.isPart()) {
				header, _ := strings.CutPrefix(source.name, clientkey.HeaderPrefix)
				if !slices.Contains(forwarded, header) {
					continue
				}
				also := ""
				if header != "x-forwarded-for" && header != "forwarded" {
					also = " and client_ip_headers " + http.CanonicalHeaderKey(header)
				}
				s.Report(z.Name, fmt.Sprintf("key reads {%s}, where clients can write another address with each request", shown(source.name)),
					fmt.Sprintf("write {client_ip} in its place, and trusted_proxies static with the proxy's address%s in the global option servers", also))
			}
		}
	}
}

// isAsked reports whether a route of the limiter has a matcher.
func (s *Subject) isAsked(matcher string) bool {
	for r := range s.Limiter.way() {
		if asksFor(r.match(), matcher) {
			return true
		}
	}
	return false
}

func asksFor(sets []Fields, matcher string) bool {
	return slices.ContainsFunc(sets, func(set Fields) bool { return set[matcher] != nil })
}
