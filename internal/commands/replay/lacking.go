package replay

import (
	"cmp"
	"encoding/json"
	"net/textproto"
	"net/url"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/retryafter"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// needs are what deciding about a request takes: names of placeholders, "matcher " with the name of one
// that reads something else, and what is no placeholder.
type needs []string

const (
	headerPrefix   = "http.request.header."
	cookiePrefix   = "http.request.cookie."
	responsePrefix = "http.response.header."
	matcherPrefix  = "matcher "
	clientIP       = "http.vars.client_ip"
	anyHeader      = headerPrefix + "*"
	queryPrefix    = "http.request.uri.query."
	pathPrefix     = "http.request.uri.path"
	durations      = "how long requests took"
	statuses       = "statuses of responses"
	grpcStatus     = "http.response.trailer.Grpc-Status"
)

func (n *needs) add(others ...needs) {
	for _, other := range others {
		for _, name := range other {
			if !slices.Contains(*n, name) {
				*n = append(*n, name)
			}
		}
	}
}

// needsOfText returns the placeholders of a text.
func needsOfText(text string) needs { return limiter.PlaceholdersIn(text) }

// needsOfKey returns what the key of a zone needs. A request to which none of it applies is its client's
// address, which is looked at where that happens.
func needsOfKey(z *limiter.Zone) (n needs) {
	for _, text := range z.Key {
		n.add(needsOfText(text))
	}
	if len(z.Key) == 0 {
		n.add(needs{clientIP})
	}
	return n
}

// needsBesideKey returns what else a zone needs of a request, of the handler with these fields.
func needsBesideKey(z *limiter.Zone, handler map[string]json.RawMessage) (n needs) {
	for _, text := range []string{z.Events.Text, z.Burst.Text, z.Cost.Text} {
		n.add(needsOfText(text))
	}
	if algorithm.Of(z.Algorithm).Lease {
		n.add(needs{durations})
	}
	if none := (limiter.StatusSet{}); z.Free != none || z.Forgives != none {
		n.add(needs{statuses})
	}
	if z.KnowsGRPC {
		n.add(needs{grpcStatus})
	}
	if z.ObeyUpstream {
		for _, field := range retryafter.Fields {
			n.add(needs{responsePrefix + field})
		}
	}
	type matching struct {
		Name     string `json:"name"`
		Match    any    `json:"match"`
		Reserves []struct {
			Match any `json:"match"`
		} `json:"reserves"`
	}
	var zones []matching
	var named map[string]matching
	_ = unmarshal(handler["zones"], &zones)       // the module has reported
	_ = unmarshal(handler["rate_limits"], &named) // what is wrong
	for name, m := range named {
		m.Name = name
		zones = append(zones, m)
	}
	for _, m := range zones {
		if m.Name != z.Name {
			continue
		}
		n.add(needsOfMatchers(m.Match))
		for _, r := range m.Reserves {
			n.add(needsOfMatchers(r.Match))
		}
	}
	return n
}

// needsOfMatchers returns what a list of sets of matchers needs.
func needsOfMatchers(sets any) (n needs) {
	list, _ := sets.([]any)
	for _, set := range list {
		matchers, _ := set.(map[string]any)
		for name, matcher := range matchers {
			n.add(needsOfMatcher(name, matcher))
		}
	}
	return n
}

func needsOfMatcher(name string, matcher any) (n needs) {
	fields, _ := matcher.(map[string]any)
	switch name {
	case "not":
		return needsOfMatchers(matcher)
	case "path", "path_regexp":
		n.add(needs{pathPrefix})
	case "method":
		n.add(needs{"http.request.method"})
	case "query":
		for parameter := range fields {
			n.add(needs{queryPrefix + parameter})
		}
	case "remote_ip":
		n.add(needs{"http.request.remote.host"})
	case "client_ip":
		n.add(needs{clientIP})
	case "host":
		n.add(needs{"http.request.host"})
	case "header", "header_regexp":
		for field := range fields {
			n.add(needs{headerPrefix + textproto.CanonicalMIMEHeaderKey(field)})
		}
	case "vars", "vars_regexp":
		for field := range fields {
			if placeholders := needsOfText(field); len(placeholders) > 0 {
				n.add(placeholders)
			} else {
				n.add(needs{"http.vars." + field})
			}
		}
	case "expression":
		text, _ := matcher.(string)
		if of, ok := fields["expr"].(string); ok {
			text = of
		}
		if strings.Contains(text, "header(") || strings.Contains(text, "header_regexp(") {
			n.add(needs{anyHeader})
		}
		if strings.Contains(text, "host(") {
			n.add(needs{"http.request.host"})
		}
	default:
		n.add(needs{matcherPrefix + name})
	}
	n.add(needsOfTexts(matcher))
	return n
}

// needsOfTexts returns the placeholders of all texts in a value of JSON.
func needsOfTexts(value any) (n needs) {
	switch value := value.(type) {
	case string:
		return needsOfText(value)
	case []any:
		for _, v := range value {
			n.add(needsOfTexts(v))
		}
	case map[string]any:
		for _, v := range value {
			n.add(needsOfTexts(v))
		}
	}
	return n
}

// headers returns the names of the headers of requests, and of responses, that are read.
func (n needs) headers() (request, response []string, all bool) {
	for _, name := range n {
		if name == anyHeader {
			all = true
		} else if header, ok := strings.CutPrefix(name, headerPrefix); ok {
			request = append(request, textproto.CanonicalMIMEHeaderKey(header))
		} else if strings.HasPrefix(name, cookiePrefix) {
			request = append(request, "Cookie")
		} else if header, ok := strings.CutPrefix(name, responsePrefix); ok {
			response = append(response, textproto.CanonicalMIMEHeaderKey(header))
		}
	}
	return request, response, all
}

// present are the placeholders, and prefixes of some, that each format has.
var present = map[Format][]string{
	Caddy: {
		clientIP, "http.auth.user.id", "http.request.host", "http.request.host.", "http.request.hostport", "http.request.port",
		"http.request.method", "http.request.proto", "http.request.proto_name", "http.request.scheme", "http.request.uri", "http.request.uri.", "http.request.uri_escaped",
		"http.request.orig_method", "http.request.orig_uri", "http.request.orig_uri.",
		"http.request.remote", "http.request.remote.", headerPrefix, cookiePrefix, responsePrefix, "http.regexp.",
		"http.request.tls.version", "http.request.tls.cipher_suite", "http.request.tls.resumed", "http.request.tls.proto", "http.request.tls.server_name",
		"http.rate_limit.response.size", "http.rate_limit.response.duration_ms", "env.", durations, statuses,
		matcherPrefix + "protocol", matcherPrefix + "tls",
	},
	Combined: {
		clientIP, "http.auth.user.id", "http.request.method", "http.request.proto", "http.request.uri", "http.request.uri.", "http.request.uri_escaped",
		"http.request.orig_method", "http.request.orig_uri", "http.request.orig_uri.",
		"http.request.remote.host", "http.request.remote.host.", headerPrefix + "Referer", headerPrefix + "User-Agent", "http.regexp.",
		"http.rate_limit.response.size", "env.", statuses,
	},
}

// explanations say why logs lack what has a prefix.
var explanations = []struct{ prefix, text string }{
	{"http.rate_limit.response.", "logs have no response bodies"},
	{"http.request.body", "logs have no request bodies"},
	{grpcStatus, "statuses of gRPC are in trailers, which logs do not have"},
	{"http.response.trailer.", "logs have no trailers"},
	{"http.request.tls.client.", "logs have no client certificates"},
	{"time.", "it is the time of this machine"},
	{"http.vars.", "no handler that is replayed sets it"},
	{"http.request.host", "the log has no hosts: give one with --host"},
	{cookiePrefix, "the log has no cookies"},
	{headerPrefix, "the log does not have that header"},
	{responsePrefix, "the log has no response headers"},
	{"http.request.", "the log does not have it"},
}

// lacks returns why a log of this origin cannot decide about a zone, or "".
func (s *site) lacks(z *zone, from origin, hasHost bool) string {
	for _, name := range z.needs {
		if s.defined[name] || from.format == Combined && hasHost && strings.HasPrefix(name, "http.request.host") {
			continue
		}
		if isPresent(name, present[from.format]) {
			if change := s.changed(z, name, from); change != "" {
				return change
			}
			continue
		}
		if matcher, ok := strings.CutPrefix(name, matcherPrefix); ok {
			return "the matcher " + matcher + " reads more than the log has"
		}
		if name == durations {
			return "algorithm " + z.Algorithm.String() + " counts requests while they run, and the log has no durations"
		}
		if name == anyHeader {
			return "a matcher reads headers in an expression, and the log has few"
		}
		for _, e := range explanations {
			if strings.HasPrefix(name, e.prefix) {
				return "{" + name + "}: " + e.text
			}
		}
		return "{" + name + "}: it needs handlers that are not replayed"
	}
	return ""
}

// changed returns how the log's filters change what a zone needs, or "". Only Caddy's logs have some.
func (s *site) changed(z *zone, name string, from origin) string {
	if from.format != Caddy {
		return ""
	}
	change := s.logging.changes(z, name, from.logger)
	if change != "" {
		change = shownNeed(name) + ": " + change
	}
	return change
}

// shownNeed returns what is needed as text.
func shownNeed(name string) string {
	if strings.Contains(name, " ") {
		return name
	}
	return "{" + name + "}"
}

func isPresent(name string, names []string) bool {
	return slices.ContainsFunc(names, func(has string) bool {
		return name == has || strings.HasSuffix(has, ".") && strings.HasPrefix(name, has)
	})
}

// redacted is what Caddy's log has in place of a secret, and its filters in place of what they replace.
const redacted = "REDACTED"

// hides returns why a line does not show what the zone needs, or "".
func (z *zone) hides(l *Line) string {
	for _, name := range z.needs {
		header, isHeader := strings.CutPrefix(name, headerPrefix)
		switch {
		case name == clientIP:
			if reason := l.hidesAddress(); reason != "" {
				return reason
			}
		case isHeader && isRedacted(l, textproto.CanonicalMIMEHeaderKey(header)):
			return "{" + name + "}: the log shows it as " + redacted + ", see log_credentials"
		case strings.HasPrefix(name, cookiePrefix) && isRedacted(l, "Cookie"):
			return "{" + name + "}: the log shows Cookie as " + redacted + ", see log_credentials"
		case strings.HasPrefix(name, "http.request.uri") && strings.Contains(l.URI, redacted) && strings.Contains(l.shownBy(name), redacted):
			return "{" + name + "}: the log shows a part of the URI as " + redacted
		}
	}
	return ""
}

// hidesAddress returns why the log does not show the client's address, or "".
func (l *Line) hidesAddress() string {
	if l.isAddress() {
		return ""
	}
	return "{" + clientIP + "}: the log shows no address but " + clip(l.Client)
}

// shownBy returns the part of the URI that a placeholder names.
func (l *Line) shownBy(name string) string {
	path, query, _ := strings.Cut(l.URI, "?")
	if strings.HasPrefix(name, pathPrefix) {
		return path
	}
	if parameter, ok := strings.CutPrefix(name, queryPrefix); ok {
		values, _ := url.ParseQuery(query) // what is wrong is left out
		return strings.Join(values[parameter], "\n")
	}
	return l.URI
}

// fallsBack notes a request that has none of what the key of its zone names: its client is the address,
// if the log shows that.
func (r *run) fallsBack(d *limiter.Decision, l *Line) {
	i := slices.IndexFunc(r.zones, func(z *zone) bool { return z.Zone == d.Zone })
	if i < 0 {
		return
	}
	r.leaveOut(r.zones[i], cmp.Or(l.hidesAddress(), r.changed(r.zones[i], clientIP, l.origin())))
}

func isRedacted(l *Line, header string) bool {
	return slices.Contains(l.Header[header], redacted)
}

// clip shortens what a log says.
func clip(text string) string { return `"` + text[:min(len(text), 40)] + `"` }
