package limiter

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// clientIPText is the template for a request to which none of a zone's key applies.
const clientIPText = "{http.vars." + caddyhttp.ClientIPVarKey + "}"

// keyTemplate is one template of a zone's key.
type keyTemplate struct {
	// tag stands for the template in client keys, so that the values of two
	// templates never meet.
	tag string
	// placeholders are the names in the template, in order. A template without any
	// is the same for all requests.
	placeholders []string
	// sources say where each gets its value.
	sources []source
	// doubtful are those that are none of Caddy's.
	doubtful []string
	// hasAddress is set if one of them is the client's address, and isConstant if all requests have the same key.
	hasAddress, isConstant bool
}

// compileKey compiles the templates of a zone's key, and adds the client's address
// for requests to which none of them applies.
func compileKey(texts []string) []keyTemplate {
	compiled := make([]keyTemplate, 0, len(texts)+1)
	taken := map[string]bool{}
	for i, text := range append(texts[:len(texts):len(texts)], clientIPText) {
		if i == len(texts) && i > 0 && (texts[i-1] == clientIPText || len(compiled[i-1].placeholders) == 0) {
			break // No request comes this far.
		}
		tag := clientkey.Tag(text)
		for salt := 0; taken[tag]; salt++ {
			tag = clientkey.Tag(text + strconv.Itoa(salt))
		}
		taken[tag] = true
		t := keyTemplate{tag: tag, placeholders: PlaceholdersIn(text)}
		t.hasAddress = slices.ContainsFunc(t.placeholders, IsAddress)
		t.isConstant = !slices.ContainsFunc(t.placeholders, func(name string) bool { return !isConstant(name) })
		for _, name := range t.placeholders {
			t.sources = append(t.sources, sourceOf(name))
			if !isKnownPlaceholder(name) {
				t.doubtful = append(t.doubtful, name)
			}
		}
		compiled = append(compiled, t)
	}
	return compiled
}

// IsAddress reports whether the placeholder of that name yields the client's
// address, or a network of it.
func IsAddress(name string) bool {
	return name == "http.vars."+caddyhttp.ClientIPVarKey ||
		name == "http.request.remote" || strings.HasPrefix(name, "http.request.remote.host")
}

// PlaceholdersIn returns the names of the placeholders in text, as Caddy's replacer
// finds them.
func PlaceholdersIn(text string) (names []string) {
	_, _ = caddy.NewEmptyReplacer().ReplaceFunc(text, func(name string, _ any) (any, error) {
		names = append(names, name)
		return nil, nil
	})
	return names
}

// mostClients is of how many clients a request may be.
const mostClients = 3

// clientKeys returns the client key of a request: that of the first template that applies. A request with several
// values for what names its client is an error, because each would be a limit more; a zone that only observes
// these clients counts all together. But a browser cannot help sending several cookies of one name, so
// such a request is of more clients, one for each value, up to mostClients. Without a limit the key does not
// matter, so nothing is logged of it.
func (z *Zone) clientKeys(r *http.Request, repl *caddy.Replacer, l *Limiter, isLimited bool) (key string, more []string, err error) {
	key, i, applies, repeated := z.keyOf(r, repl)
	if isLimited {
		z.warnOfKey(i, applies, r, repl, l)
	}
	if repeated == "" {
		return key, nil, nil
	}
	t, rule := &z.templates[i], z.rule(l)
	keys, areCookies := t.severalKeys(r, repl, z)
	switch {
	case len(keys) == 1 || len(keys) > 0 && areCookies:
		return keys[0], keys[1:], nil
	case keys == nil && !z.observesAll(rule), slices.ContainsFunc(keys, func(key string) bool { return z.enforces(key, rule) }):
		return "", nil, z.refuseRepeated(repeated, l)
	}
	return key, nil, nil
}

// keyOf returns the client key of a request, the template that made it, and whether that template applies. If a
// placeholder of it has several values, repeated is its name.
func (z *Zone) keyOf(r *http.Request, repl *caddy.Replacer) (key string, template int, applies bool, repeated string) {
	var scratch [128]byte
	for i := range z.templates {
		key, applies, repeated := z.templates[i].clientKey(scratch[:0], r, repl, z)
		if isLast := i == len(z.templates)-1; applies || isLast {
			return string(key), i, applies, repeated
		}
	}
	return "", 0, true, ""
}

// countsAddress reports whether the client key of a request has the client's address.
func (z *Zone) countsAddress(r *http.Request, repl *caddy.Replacer) bool {
	_, i, _, _ := z.keyOf(r, repl)
	return z.templates[i].hasAddress
}

// showsAddress reports whether the client key of a request shows the address ip, or a network of it.
func (z *Zone) showsAddress(r *http.Request, repl *caddy.Replacer, ip string) bool {
	_, i, _, _ := z.keyOf(r, repl)
	t := &z.templates[i]
	return t.hasAddress || slices.ContainsFunc(t.placeholders, func(name string) bool {
		value, _ := repl.GetString(name)
		return strings.Contains(value, ip)
	})
}

// hasClientsOf reports whether a request is of the same client in both zones.
func (z *Zone) hasClientsOf(other *Zone) bool {
	return z.networks() == other.networks() &&
		slices.EqualFunc(z.templates, other.templates, func(a, b keyTemplate) bool { return a.tag == b.tag })
}

// warnOfKey logs what is doubtful about the key of a request, which is that of template i.
func (z *Zone) warnOfKey(i int, applies bool, r *http.Request, repl *caddy.Replacer, l *Limiter) {
	if !applies || i >= len(z.Key) {
		z.warnNoKey(r, repl, l)
	} else if name := z.templates[i].unknownIn(repl); name != "" {
		z.warnUnknown(name, l)
	} else if was := z.unknown.Load(); was != nil && slices.Contains(z.templates[i].doubtful, *was) {
		z.unknown.CompareAndSwap(was, nil)
	}
}

func (z *Zone) refuseRepeated(name string, l *Limiter) error {
	if times, log := l.mayLog(&z.repeats); log {
		l.Logger.Warn("requests have several values for what names their client; they are refused with 400",
			zap.String("zone", z.Name), zap.String("placeholder", "{"+name+"}"), zap.Int64("times", times),
			zap.String("hint", "let the client send one value, or count by what the authentication found"))
	}
	return caddyhttp.Error(http.StatusBadRequest, fmt.Errorf("several values of {%s}, which names the client in rate limit %s", name, z.Name))
}

// warnNoKey logs that the key of a request is empty, at the end of the request if a later handler may
// set what it asks for.
func (z *Zone) warnNoKey(r *http.Request, repl *caddy.Replacer, l *Limiter) {
	for i := range z.templates {
		if name := z.templates[i].unknownIn(repl); name != "" {
			z.noteUndefined(name, l)
		}
	}
	times, log := l.mayLog(&z.noKey)
	if !log {
		return
	}
	asksForHeader := slices.ContainsFunc(z.templates, func(t keyTemplate) bool {
		return slices.ContainsFunc(t.sources, func(s source) bool { return s.header != "" })
	})
	if r == nil || !asksForHeader {
		z.logNoKey(l, times, z.hintForNoKey(repl, l))
		return
	}
	waiting, _ := caddyhttp.GetVar(r.Context(), emptyKeysVar).([]emptyKey)
	caddyhttp.SetVar(r.Context(), emptyKeysVar, append(waiting, emptyKey{z, times}))
}

func (z *Zone) hintForNoKey(repl *caddy.Replacer, l *Limiter) string {
	hint := ""
	const usual = "see to it that clients send what key asks for, or end key with {client_ip}"
	for _, t := range z.templates {
		if behind := l.hintForHeaderBehind(t.placeholders); behind != "" {
			return behind
		}
		for _, name := range t.placeholders {
			if strings.HasPrefix(name, headerPrefix) {
				hint = cmp.Or(hint, usual+orLater)
			} else if strings.HasPrefix(name, "http.auth.") {
				hint = "put rate_limit into a route after the authentication, because it runs before that by default"
			} else if _, known := repl.Get(name); !known {
				hint = unknownText(name)
			}
		}
	}
	return cmp.Or(hint, usual)
}

// orLater follows the hint about a header that clients send, or perhaps another handler.
const orLater = "; if forward_auth or another handler sets it, put rate_limit into a route after that"

func (z *Zone) logNoKey(l *Limiter, times int64, hint string) {
	l.Logger.Warn("key is empty; counting by client IP",
		zap.String("zone", z.Name), zap.Strings("key", z.Key), zap.Int64("times", times), zap.String("hint", hint))
}

// clientKey appends the client key that the template yields to b, which is empty,
// and reports whether the template applies to the request: it has no placeholder,
// or at least one that is not empty. The lengths at the end keep the values of
// several placeholders apart. If the request has several values for a placeholder, that is returned.
func (t *keyTemplate) clientKey(b []byte, r *http.Request, repl *caddy.Replacer, z *Zone) (key []byte, applies bool, repeated string) {
	applies = len(t.placeholders) == 0
	var scratch [8]string
	values := scratch[:0]
	for i := range t.sources {
		value, isSingle := t.sources[i].value(r, repl)
		if !isSingle && repeated == "" {
			repeated = t.sources[i].placeholder
		}
		applies = applies || value != ""
		values = append(values, value)
	}
	return t.appendKey(b, values, z), applies, repeated
}

// appendKey appends the client key of the values of all sources.
func (t *keyTemplate) appendKey(b []byte, values []string, z *Zone) []byte {
	b = append(append(b, t.tag...), ':')
	var scratch [8]int
	lengths := scratch[:0]
	for i := range t.sources {
		start := len(b)
		b = clientkey.Append(b, values[i], t.sources[i].spelling, z.networks())
		lengths = append(lengths, len(b)-start)
	}
	for i := range len(lengths) - 1 {
		b = strconv.AppendInt(append(b, ':'), int64(lengths[i]), 10)
	}
	return store.Shortened(b)
}

// severalKeys returns the client keys of a request that has several values for placeholders, and whether these are
// all cookies. There are none if they are more than mostClients.
func (t *keyTemplate) severalKeys(r *http.Request, repl *caddy.Replacer, z *Zone) (keys []string, areCookies bool) {
	all, areCookies := [][]string{nil}, true
	for i := range t.sources {
		source := &t.sources[i]
		values := source.clients(r, repl, z)
		areCookies = areCookies && (source.cookie != "" || len(values) == 1)
		var longer [][]string
		for _, chosen := range all {
			if at := slices.Index(t.placeholders[:i], source.placeholder); at >= 0 {
				values = chosen[at : at+1]
			}
			for _, value := range values {
				longer = append(longer, append(slices.Clone(chosen), value))
			}
		}
		if all = longer; len(all) == 0 || len(all) > mostClients {
			return nil, false
		}
	}
	for _, values := range all {
		keys = append(keys, string(t.appendKey(nil, values, z)))
	}
	return keys, areCookies
}

// unknownIn returns a placeholder of the template that nothing defines for the request, or "".
func (t *keyTemplate) unknownIn(repl *caddy.Replacer) string {
	for _, name := range t.doubtful {
		if _, known := repl.Get(name); !known {
			return name
		}
	}
	return ""
}

// canonicalKey returns the client key that an operator means by one copied from a
// log or an answer, or written in full: it shortens a long key unless that is
// shortened already.
func canonicalKey(clientKey string) string {
	if store.IsShortened(clientKey) {
		return clientKey
	}
	return string(store.Shortened([]byte(clientKey)))
}

// About returns a request about a bucket that costs nothing, and says nothing of the client's limit.
func (z *Zone) About(clientKey string) store.Request {
	return store.Request{Limit: &z.limit, ClientKey: clientKey, Penalty: z.Penalty}
}

// WindowEnd returns when the window ends that a state shows. Without an open window, and
// of an algorithm that has none of its own, it ends in the length of one.
func (z *Zone) WindowEnd(st store.State, now time.Time) int64 {
	at := now.UnixMicro()
	// The state has the time of the server, whose clock this machine's may differ from.
	if !algorithm.Of(z.limit.Algorithm).Windowed() || st.Now == 0 || st.Reset <= st.Now || !algorithm.Believes(st.Reset, st.Now, z.limit.Window) {
		return at + z.limit.Window.Microseconds()
	}
	if ahead := st.Now - at; max(ahead, -ahead) <= algorithm.Grace.Microseconds() {
		// These are one clock, whose reading was a moment ago.
		return st.Reset
	}
	return at + st.Reset - st.Now
}
