// Package clientkey makes client keys: what identifies a client in a bucket. A client may spell
// one identity in many ways, which must not be as many limits, so a value is brought into one
// form before it is part of a key. Requests of Caddy, operators and programs of package limit
// make the same key of the same value.
package clientkey

import (
	"encoding/base64"
	"encoding/hex"
	"net/netip"
	"slices"
	"strings"
)

// Spelling says which values of a placeholder are the same. IP addresses have one form with each.
type Spelling uint8

// The spellings.
const (
	Exact Spelling = iota
	// Credentials are a scheme in any case, spaces, and what the scheme defines.
	Credentials
	// HostName is a host in any case, with or without a final dot and a port.
	HostName
	// HostLabel is a part of a host.
	HostLabel
	// Escaped is a value of a cookie, in which servers commonly decode what is written with a percent sign.
	Escaped
)

// What the placeholders of request headers, query parameters, cookies and labels of the host begin with.
const (
	HeaderPrefix    = "http.request.header."
	QueryPrefix     = "http.request.uri.query."
	CookiePrefix    = "http.request.cookie."
	HostLabelPrefix = "http.request.host.labels."
)

// spellings has the placeholders, other than headers and cookies, with values that are not exact.
var spellings = map[string]Spelling{
	"http.request.host":            HostName,
	"http.request.hostport":        HostName,
	"http.request.tls.server_name": HostName,
}

// SpellingOf returns the spelling of a placeholder's value.
func SpellingOf(placeholder string) Spelling {
	switch {
	case strings.HasPrefix(placeholder, HeaderPrefix):
		return spellingOfHeader(placeholder)
	case strings.HasPrefix(placeholder, CookiePrefix):
		return Escaped
	case strings.HasPrefix(placeholder, HostLabelPrefix):
		return HostLabel
	}
	return spellings[placeholder]
}

// spellingOfHeader returns the spelling of a header's value, by the name of the header in any case.
// Proxies pass values on under names such as X-Forwarded-Authorization and X-Original-Host.
func spellingOfHeader(name string) Spelling {
	switch name = strings.ToLower(name); {
	case strings.HasSuffix(name, "authorization"):
		return Credentials
	case strings.HasSuffix(name, "-host"):
		return HostName
	}
	return Exact
}

// Networks are by how many bits of an address a client is identified; 0 for all of them.
type Networks struct{ IPv4, IPv6 int }

// Of returns by how many bits an address counts, or 0 for all of them.
func (n Networks) Of(addr netip.Addr) int {
	if addr.Is4() {
		return n.IPv4
	}
	return n.IPv6
}

// Append appends the one form of a value, or of the network in which it is counted.
func Append(b []byte, value string, s Spelling, n Networks) []byte {
	if s == Escaped {
		value = decoded(value)
	}
	if addr, ok := ParseAddr(value); ok {
		return n.append(b, addr)
	}
	switch s {
	case Credentials:
		return appendCredentials(b, value)
	case HostName:
		name := CanonicalHost(value)
		if addr, ok := ParseAddr(strings.Trim(name, "[]")); ok {
			return n.append(b, addr)
		}
		return append(b, name...)
	case HostLabel:
		return append(b, strings.ToLower(value)...)
	case Escaped, Exact:
	}
	return append(b, value...)
}

// Trimmed returns a header's value without the space around it. It is not part of the value, RFC 9110
// section 5.5, but arrives over HTTP/2, and servers commonly ignore it elsewhere.
func Trimmed(value string) string { return strings.Trim(value, " \t") }

// decoded returns a value without escapes, also of escapes, so that what operators are shown names the same
// client when they enter it.
func decoded(value string) string {
	if !strings.Contains(value, "%") {
		return value
	}
	b := make([]byte, 0, len(value))
	for i := range len(value) {
		b = append(b, value[i])
		// What is decoded may complete another escape.
		for n := len(b); n >= 3 && b[n-3] == '%'; n = len(b) {
			var c [1]byte
			if _, err := hex.Decode(c[:], b[n-2:]); err != nil {
				break
			}
			b = append(b[:n-3], c[0])
		}
	}
	return string(b)
}

// ParseAddr parses an IP address. Most values are none, and it allocates nothing for most of these.
func ParseAddr(value string) (netip.Addr, bool) {
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

// embeddings are the prefixes of IPv6 addresses that embed an IPv4 address, and where: a host has one of
// the latter, but may choose among many of the former.
var embeddings = [...]struct {
	prefix     netip.Prefix
	at         int
	isInverted bool
}{
	{netip.MustParsePrefix("64:ff9b::/96"), 12, false},    // NAT64, RFC 6052
	{netip.MustParsePrefix("64:ff9b:1::/48"), 12, false},  // NAT64 of a network's own, RFC 8215
	{netip.MustParsePrefix("::ffff:0:0:0/96"), 12, false}, // SIIT, RFC 2765
	{netip.MustParsePrefix("2002::/16"), 2, false},        // 6to4, RFC 3056
	{netip.MustParsePrefix("2001::/32"), 12, true},        // Teredo, RFC 4380
}

// CanonicalAddr returns the one form of an address: the IPv4 address that an IPv6 address
// embeds, without a zone.
func CanonicalAddr(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if addr.Is4() {
		return addr
	}
	for _, e := range &embeddings {
		if !e.prefix.Contains(addr) {
			continue
		}
		whole := addr.As16()
		if e.prefix.Bits() == 48 && [3]byte(whole[13:]) == [3]byte{} {
			// The network embeds addresses elsewhere.
			break
		}
		v4 := [4]byte(whole[e.at:])
		if e.isInverted {
			for i := range v4 {
				v4[i] = ^v4[i]
			}
		}
		return netip.AddrFrom4(v4)
	}
	return addr
}

// append appends an address, or its network if networks count.
func (n Networks) append(b []byte, addr netip.Addr) []byte {
	addr = CanonicalAddr(addr)
	bits := n.Of(addr)
	// Load has checked the number of bits.
	if network, err := addr.Prefix(bits); bits > 0 && err == nil {
		return network.AppendTo(b)
	}
	return addr.AppendTo(b)
}

// constant are the schemes whose credentials are the same with each request whatever is in them, signing those
// of which one word is new with each.
var (
	constant = [...]string{"apikey", "api-key", "bearer", "dpop", "key", "token"}
	signing  = [...]string{"hmac", "negotiate", "ntlm", "signature"}
)

// SignsEachRequest reports whether the trimmed value of an Authorization field may be new with each request, so that
// it names no client: of a scheme only one word without parameters, or a name and a signature, is constant.
func SignsEachRequest(value string) bool {
	end := strings.IndexAny(value, " \t")
	if end < 0 {
		return false
	}
	is := func(scheme string) bool { return strings.EqualFold(scheme, value[:end]) }
	word := strings.TrimLeft(value[end:], " \t")
	switch {
	case is("basic"):
		return false
	case strings.ContainsAny(word, " \t,;"), slices.ContainsFunc(signing[:], is):
		return true
	}
	return !slices.ContainsFunc(constant[:], is) && strings.ContainsAny(strings.TrimRight(word, "="), "=:")
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

// CanonicalHost returns a host in lower case, without a final dot and a port. The client chooses the
// port of a Host field, wherever its connection goes.
func CanonicalHost(host string) string {
	if at := strings.LastIndexByte(host, ':'); at >= 0 && (strings.IndexByte(host, ':') == at || strings.HasSuffix(host[:at], "]")) {
		host = host[:at]
	}
	return strings.ToLower(strings.TrimRight(host, "."))
}
