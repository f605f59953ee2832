package limiter

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// A client may spell one identity in many ways, which must not be as many limits. So a value is
// brought into one form before it is part of a client key, for requests and operators alike.

// spelling says which values of a placeholder are the same. IP addresses have one form with each.
type spelling uint8

const (
	exact spelling = iota
	// credentials are a scheme in any case, spaces, and what the scheme defines.
	credentials
	// hostName is a host in any case, with or without a final dot and a port.
	hostName
	// hostLabel is a part of a host.
	hostLabel
	// escaped is a value of a cookie, in which servers commonly decode what is written with a percent sign.
	escaped
)

// What the placeholders of request headers, query parameters, cookies and labels of the host begin with.
const (
	headerPrefix    = "http.request.header."
	queryPrefix     = "http.request.uri.query."
	cookiePrefix    = "http.request.cookie."
	hostLabelPrefix = "http.request.host.labels."
)

// spellings has the placeholders, other than headers and cookies, with values that are not exact.
var spellings = map[string]spelling{
	"http.request.host":            hostName,
	"http.request.hostport":        hostName,
	"http.request.tls.server_name": hostName,
}

// spellingOf returns the spelling of a header's value, by the name of the header. Proxies pass values on
// under names such as X-Forwarded-Authorization and X-Original-Host.
func spellingOf(header string) spelling {
	switch {
	case strings.HasSuffix(header, "Authorization"):
		return credentials
	case strings.HasSuffix(header, "-Host"):
		return hostName
	}
	return exact
}

// lists are the request headers that have several values by their definition.
var lists = map[string]bool{
	"Accept": true, "Accept-Charset": true, "Accept-Encoding": true, "Accept-Language": true, "Access-Control-Request-Headers": true,
	"Baggage": true, "Cache-Control": true, "Cdn-Loop": true, "Connection": true, "Content-Encoding": true, "Content-Language": true,
	"Cookie": true, "Expect": true, "Forwarded": true, "If-Match": true, "If-None-Match": true, "Link": true, "Pragma": true, "Prefer": true,
	"Sec-Websocket-Extensions": true, "Sec-Websocket-Protocol": true, "Te": true, "Tracestate": true, "Trailer": true,
	"Transfer-Encoding": true, "Upgrade": true, "Via": true, "Warning": true, "X-Forwarded-Client-Cert": true, "X-Forwarded-For": true,
	"X-Forwarded-Port": true, "X-Forwarded-Proto": true,
}

// source is where a placeholder gets its value from.
type source struct {
	placeholder string
	// header, query and cookie are the names of what it stands for, at most one of which is set.
	header, query, cookie string
	// isList is set if the header is a list.
	isList   bool
	spelling spelling
}

func sourceOf(placeholder string) source {
	s := source{placeholder: placeholder, spelling: spellings[placeholder]}
	switch {
	case strings.HasPrefix(placeholder, headerPrefix):
		s.header = textproto.CanonicalMIMEHeaderKey(placeholder[len(headerPrefix):])
		s.isList, s.spelling = lists[s.header], spellingOf(s.header)
	case strings.HasPrefix(placeholder, queryPrefix):
		s.query = placeholder[len(queryPrefix):]
	case strings.HasPrefix(placeholder, cookiePrefix):
		s.cookie, s.spelling = placeholder[len(cookiePrefix):], escaped
	case strings.HasPrefix(placeholder, hostLabelPrefix):
		s.spelling = hostLabel
	}
	return s
}

// value returns the value for a request, and reports whether it has no other. A header is read without the
// replacer, which allocates for each value; r is nil where there is no request.
func (s *source) value(r *http.Request, repl *caddy.Replacer) (value string, isSingle bool) {
	switch {
	case r == nil:
	case s.isList:
		return trimmed(strings.Join(r.Header[s.header], ",")), true
	case s.header != "":
		return single(r.Header[s.header])
	case s.query != "":
		return single(queryValues(r.URL.RawQuery, s.query))
	case s.cookie != "":
		// Caddy's placeholder takes the first one of the name in any case, a server one of the very name.
		if cookies := r.CookiesNamed(s.cookie); len(cookies) > 0 {
			var values []string
			for _, c := range cookies {
				values = append(values, c.Value)
			}
			return single(values)
		}
	}
	if s.spelling == hostLabel {
		if host, _ := repl.GetString("http.request.host"); strings.HasSuffix(host, ".") {
			return hostLabelOf(s.placeholder, host), true
		}
	}
	value, _ = repl.GetString(s.placeholder)
	if s.header != "" {
		value = trimmed(value)
	}
	return value, true
}

// trimmed returns a value without the space around it. It is not part of a header's value, RFC 9110 section
// 5.5, but arrives over HTTP/2, and servers commonly ignore it elsewhere.
func trimmed(value string) string { return strings.Trim(value, " \t") }

// single returns the only value that is not empty, once or repeated, or all of them, joined as Caddy's
// placeholders do.
func single(values []string) (value string, isSingle bool) {
	for _, v := range values {
		switch v = trimmed(v); v {
		case "", value:
		default:
			if value != "" {
				return strings.Join(values, ","), false
			}
			value = v
		}
	}
	return value, true
}

// queryValues returns the values of a query parameter for which any server may take them: Go drops pairs
// with a semicolon or a bad escape, and everything where there are thousands. Some drop what follows a #,
// others do not.
func queryValues(query, name string) (values []string) {
	unescaped := func(s string) string {
		if text, err := url.QueryUnescape(s); err == nil {
			return text
		}
		return s
	}
	if before, _, isCut := strings.Cut(query, "#"); isCut {
		query += "&" + before
	}
	for pair := range strings.FieldsFuncSeq(query, func(r rune) bool { return r == '&' || r == ';' }) {
		key, value, _ := strings.Cut(pair, "=")
		if unescaped(key) == name {
			values = append(values, unescaped(value))
		}
	}
	return values
}

// appendCanonical appends the one form of a value, or of the network in which it is counted.
func (z *Zone) appendCanonical(b []byte, value string, s spelling) []byte {
	if s == escaped {
		value = decoded(value)
	}
	if addr, ok := parseAddr(value); ok {
		return z.appendAddr(b, addr)
	}
	switch s {
	case credentials:
		return appendCredentials(b, value)
	case hostName:
		name := canonicalHost(value)
		if addr, ok := parseAddr(strings.Trim(name, "[]")); ok {
			return z.appendAddr(b, addr)
		}
		return append(b, name...)
	case hostLabel:
		return append(b, strings.ToLower(value)...)
	case escaped, exact:
	}
	return append(b, value...)
}

// decoded returns a value without escapes, also of escapes, so that what operators are shown names the same
// client when they enter it.
func decoded(value string) string {
	for {
		text, err := url.PathUnescape(value)
		if err != nil || text == value {
			return value
		}
		value = text
	}
}

// parseAddr parses an IP address. Most values are none, and it allocates nothing for most of these.
func parseAddr(value string) (netip.Addr, bool) {
	isDecimal := true
	for i := range min(len(value), len("ffff")+1) {
		switch c := value[i]; {
		case c == '.' && isDecimal, c == ':':
			addr, err := netip.ParseAddr(value)
			return addr, err == nil
		case '0' <= c && c <= '9':
		case 'a' <= c && c <= 'f', 'A' <= c && c <= 'F':
			isDecimal = false
		default:
			return netip.Addr{}, false
		}
	}
	return netip.Addr{}, false
}

// nat64 is the prefix under which an IPv4 address reaches a network that has IPv6 alone, RFC 6052.
var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// canonicalAddr returns the one form of an address: the IPv4 address that an IPv6 address
// embeds, without a zone.
func canonicalAddr(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if nat64.Contains(addr) {
		whole := addr.As16()
		return netip.AddrFrom4([4]byte(whole[12:]))
	}
	return addr
}

// appendAddr appends an address, or its network if the zone counts networks.
func (z *Zone) appendAddr(b []byte, addr netip.Addr) []byte {
	addr = canonicalAddr(addr)
	bits := z.prefixOf(addr)
	// Load has checked the number of bits.
	if network, err := addr.Prefix(bits); bits > 0 && err == nil {
		return network.AppendTo(b)
	}
	return addr.AppendTo(b)
}

// prefixOf returns by how many bits the zone counts an address, or 0 for all of them.
func (z *Zone) prefixOf(addr netip.Addr) int {
	if addr.Is4() {
		return z.IPv4Prefix
	}
	return z.IPv6Prefix
}

// checkValues returns an error if no request can have the values, which the template takes, because the
// client's address is another text.
func (z *Zone) checkValues(t *keyTemplate, values []string) error {
	if t.isShortened(values) {
		return nil
	}
	for i, name := range distinct(t.placeholders) {
		// Others yield an address with a port, or a network of their own.
		if name != "http.vars."+caddyhttp.ClientIPVarKey && name != "http.request.remote.host" {
			continue
		}
		// The other end of a Unix socket has no address.
		if _, ok := parseAddr(values[i]); ok || values[i] == "" || values[i][0] == '@' || values[i][0] == '/' {
			continue
		}
		shown := shorthands.Replace("{" + name + "}")
		network, err := netip.ParsePrefix(values[i])
		if err != nil {
			return fmt.Errorf("%s is %q, which is no IP address: write one without a port, such as 10.0.0.1", shown, values[i])
		}
		switch bits := z.prefixOf(network.Addr()); {
		case bits == 0:
			return fmt.Errorf("%s is %q, which is a network, but zone %s counts single addresses: write one of them", shown, values[i], z.Name)
		case network != network.Masked() || network.Bits() != bits:
			return fmt.Errorf("%s is %q, but zone %s counts networks of %d bits: write one of them, or an address", shown, values[i], z.Name, bits)
		}
	}
	return nil
}

// appendCredentials appends the trimmed value of an Authorization field. Its scheme has no case, RFC 9110
// section 11.1. A value without a scheme stays as it is.
func appendCredentials(b []byte, value string) []byte {
	end := strings.IndexAny(value, " \t")
	if end < 0 {
		return append(b, value...)
	}
	scheme, rest := strings.ToLower(value[:end]), strings.TrimLeft(value[end:], " \t")
	b = append(append(b, scheme...), ' ')
	if scheme == "basic" {
		return appendBasic(b, rest)
	}
	return append(b, rest...)
}

// appendBasic appends a user and password in the one base64 of them. Servers decode many texts to the
// same: they ignore bits at the end, skip what is not base64, or take its form for URLs.
func appendBasic(b []byte, text string) []byte {
	text, _, _ = strings.Cut(text, "=")
	text = strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '+', r == '/':
			return r
		case r == '-':
			return '+'
		case r == '_':
			return '/'
		}
		return -1
	}, text)
	if len(text)%4 == 1 {
		text = text[:len(text)-1]
	}
	decoded, _ := base64.RawStdEncoding.DecodeString(text) // of such a text there is no error
	return base64.StdEncoding.AppendEncode(b, decoded)
}

// canonicalHost returns a host in lower case, without a final dot and a port. The client chooses the
// port of a Host field, wherever its connection goes.
func canonicalHost(host string) string {
	if at := strings.LastIndexByte(host, ':'); at >= 0 && (strings.IndexByte(host, ':') == at || strings.HasSuffix(host[:at], "]")) {
		host = host[:at]
	}
	return strings.ToLower(strings.TrimRight(host, "."))
}

// hostLabelOf returns the label that a placeholder names, of a host with a final dot. Caddy counts the
// empty label after it.
func hostLabelOf(name, host string) string {
	labels := strings.Split(canonicalHost(host), ".")
	n, err := strconv.Atoi(strings.TrimPrefix(name, hostLabelPrefix))
	if err != nil || n < 0 || n >= len(labels) {
		return ""
	}
	return labels[len(labels)-1-n]
}
