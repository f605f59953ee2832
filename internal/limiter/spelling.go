package limiter

import (
	"fmt"
	"net/http"
	"net/netip"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
)

// What the placeholders of request headers, query parameters, cookies and labels of the host begin with.
const (
	headerPrefix    = clientkey.HeaderPrefix
	queryPrefix     = clientkey.QueryPrefix
	cookiePrefix    = clientkey.CookiePrefix
	hostLabelPrefix = clientkey.HostLabelPrefix
)

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
	spelling clientkey.Spelling
}

func sourceOf(placeholder string) source {
	s := source{placeholder: placeholder, spelling: clientkey.SpellingOf(placeholder)}
	switch {
	case strings.HasPrefix(placeholder, headerPrefix):
		s.header = textproto.CanonicalMIMEHeaderKey(placeholder[len(headerPrefix):])
		s.isList = lists[s.header]
	case strings.HasPrefix(placeholder, queryPrefix):
		s.query = placeholder[len(queryPrefix):]
	case strings.HasPrefix(placeholder, cookiePrefix):
		s.cookie = placeholder[len(cookiePrefix):]
	}
	return s
}

// value returns the value for a request, and reports whether it has no other. A header is read without the
// replacer, which allocates for each value; r is nil where there is no request.
func (s *source) value(r *http.Request, repl *caddy.Replacer) (value string, isSingle bool) {
	if values, is := s.given(r); is {
		value, isSingle = single(values)
		if s.spelling == clientkey.Credentials && isSingle && clientkey.SignsEachRequest(value) {
			// It would be a client more with each request.
			value = ""
		}
		return value, isSingle
	}
	if r != nil && s.isList {
		return clientkey.Trimmed(strings.Join(r.Header[s.header], ",")), true
	}
	if s.spelling == clientkey.HostLabel {
		if host, _ := repl.GetString("http.request.host"); strings.HasSuffix(host, ".") {
			return hostLabelOf(s.placeholder, host), true
		}
	}
	value, _ = repl.GetString(s.placeholder)
	if s.header != "" {
		value = clientkey.Trimmed(value)
	}
	return value, true
}

// given returns the values that a request gives, if it may give several.
func (s *source) given(r *http.Request) (values []string, is bool) {
	switch {
	case r == nil, s.isList:
		return nil, false
	case s.header != "":
		return r.Header[s.header], true
	case s.query != "":
		return queryValues(r.URL.RawQuery, s.query), true
	case s.cookie != "":
		return cookieValues(r.Header["Cookie"], s.cookie), true
	}
	return nil, false
}

// clients returns the values that are not empty, each in one spelling, or nil if they are more than mostClients.
func (s *source) clients(r *http.Request, repl *caddy.Replacer, z *Zone) (values []string) {
	all, is := s.given(r)
	if _, isSingle := single(all); !is || isSingle {
		value, _ := s.value(r, repl)
		return []string{value}
	}
	if len(all) > mostReadings {
		return nil
	}
	var forms []string
	for _, value := range all {
		form := string(clientkey.Append(nil, clientkey.Trimmed(value), s.spelling, z.networks()))
		if form == "" || slices.Contains(forms, form) {
			continue
		}
		if values, forms = append(values, clientkey.Trimmed(value)), append(forms, form); len(values) > mostClients {
			return nil
		}
	}
	return values
}

// single returns the only value that is not empty, once or repeated, or all of them, joined as Caddy's
// placeholders do.
func single(values []string) (value string, isSingle bool) {
	for _, v := range values {
		switch v = clientkey.Trimmed(v); v {
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

// networks are in what the zone counts addresses.
func (z *Zone) networks() clientkey.Networks {
	return clientkey.Networks{IPv4: z.IPv4Prefix, IPv6: z.IPv6Prefix}
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
		if _, ok := clientkey.ParseAddr(values[i]); ok || values[i] == "" || values[i][0] == '@' || values[i][0] == '/' {
			continue
		}
		shown := clientkey.Shorten("{" + name + "}")
		network, err := netip.ParsePrefix(values[i])
		if err != nil {
			return fmt.Errorf("%s is %q, which is no IP address: write one without a port, such as 10.0.0.1", shown, values[i])
		}
		switch bits := z.networks().Of(network.Addr()); {
		case bits == 0:
			return fmt.Errorf("%s is %q, which is a network, but zone %s counts single addresses: write one of them", shown, values[i], z.Name)
		case network != network.Masked() || network.Bits() != bits:
			return fmt.Errorf("%s is %q, but zone %s counts networks of %d bits: write one of them, or an address", shown, values[i], z.Name, bits)
		}
	}
	return nil
}

// hostLabelOf returns the label that a placeholder names, of a host with a final dot. Caddy counts the
// empty label after it.
func hostLabelOf(name, host string) string {
	labels := strings.Split(clientkey.CanonicalHost(host), ".")
	n, err := strconv.Atoi(strings.TrimPrefix(name, hostLabelPrefix))
	if err != nil || n < 0 || n >= len(labels) {
		return ""
	}
	return labels[len(labels)-1-n]
}
