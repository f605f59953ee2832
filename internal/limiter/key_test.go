package limiter

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	headerA = "http.request.header.A"
	headerB = "http.request.header.B"
	ipVar   = "http.vars.client_ip"
)

// values are what placeholders yield for a request.
type values map[string]string

func (v values) replacer() *caddy.Replacer {
	repl := caddy.NewEmptyReplacer()
	for name, value := range v {
		repl.Set(name, value)
	}
	return repl
}

// keyZone is a zone that counts by these texts, ready to make client keys.
func keyZone(texts ...string) *Zone {
	z := &Zone{Name: "test", Counts: new(telemetry.ZoneCounters), Key: texts, templates: compileKey(texts)}
	z.bound[ownStore] = boundZone{Zone: z, handle: new(stores.Handle)}
	return z
}

// keyHandler is a handler that logs to the returned log.
func keyHandler() (*Limiter, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.WarnLevel)
	now := time.Unix(1_000_000, 0)
	return &Limiter{Config: Config{Logger: zap.New(core), Now: func() time.Time { return now }}}, logs
}

func keyFor(z *Zone, v values) string {
	h, _ := keyHandler()
	key, _ := z.clientKey(nil, v.replacer(), h, true)
	return key
}

func TestClientKeyTakesTheFirstTextThatIsNotEmpty(t *testing.T) {
	z := keyZone("{"+headerA+"}", "{"+headerB+"}")
	a, b := keyFor(z, values{headerA: "x", headerB: "y"}), keyFor(z, values{headerB: "y"})
	if !strings.HasSuffix(a, ":x") || !strings.HasSuffix(b, ":y") {
		t.Errorf("keys are %q and %q, want them to end with :x and :y", a, b)
	}
}

func TestClientKeyShowsWhichTextResolved(t *testing.T) {
	z := keyZone("{"+headerA+"}", clientIPText)
	asHeader := keyFor(z, values{headerA: "192.0.2.1", ipVar: "198.51.100.1"})
	asAddress := keyFor(z, values{ipVar: "192.0.2.1"})
	if asHeader == asAddress {
		t.Errorf("an address sent as a header has the key %q of that address", asHeader)
	}
}

func TestClientKeyFallsBackToTheClientIP(t *testing.T) {
	for name, key := range map[string][]string{
		"header":              {"{" + headerA + "}"},
		"two headers":         {"{" + headerA + "}", "{" + headerB + "}"},
		"unknown placeholder": {"{nobody.knows}"},
		"composed":            {"{" + headerA + "}-{" + headerB + "}"},
	} {
		t.Run(name, func(t *testing.T) {
			z := keyZone(key...)
			one, other := keyFor(z, values{ipVar: "192.0.2.1"}), keyFor(z, values{ipVar: "192.0.2.2"})
			if one == other {
				t.Errorf("two clients without a key share the key %q", one)
			}
			if want := keyFor(keyZone(clientIPText), values{ipVar: "192.0.2.1"}); one != want {
				t.Errorf("key is %q, want %q as for the client IP", one, want)
			}
		})
	}
}

func TestClientKeyOfAStaticTextIsOneForAll(t *testing.T) {
	z := keyZone("static")
	if one, other := keyFor(z, values{ipVar: "192.0.2.1"}), keyFor(z, values{ipVar: "192.0.2.2"}); one != other {
		t.Errorf("keys are %q and %q, want one", one, other)
	}
	if one, other := keyFor(keyZone("static"), nil), keyFor(keyZone("fixed"), nil); one == other {
		t.Errorf("two static texts share the key %q", one)
	}
}

func TestClientKeyPartsDoNotRunIntoEachOther(t *testing.T) {
	parts := []string{"", "a", "b", "ab", ":", ":1", "1", "1:1", "a:1", "-", "a-", "-b", "\x00", "é"}
	for _, text := range []string{"{%s}{%s}", "{%s}-{%s}", "{%s}:{%s}"} {
		z := keyZone(fmt.Sprintf(text, headerA, headerB))
		seen := map[string]values{}
		for _, a := range parts {
			for _, b := range parts {
				v := values{headerA: a, headerB: b}
				if a+b == "" {
					continue
				}
				key := keyFor(z, v)
				if other, taken := seen[key]; taken {
					t.Errorf("%s: %q and %q share the key %q", text, other, v, key)
				}
				seen[key] = v
			}
		}
	}
}

// arrived returns a request as it reaches a handler, from 192.0.2.1, with its placeholders.
func arrived(r *http.Request) (*http.Request, *caddy.Replacer) {
	repl := caddy.NewReplacer()
	r = caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), nil)
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, "192.0.2.1")
	return r, repl
}

// TestHeadersAreReadAsTheReplacerDoes, without it.
func TestHeadersAreReadAsTheReplacerDoes(t *testing.T) {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header = http.Header{"A": {"x"}, "B": {""}, "Two": {"one", "other"}, "X_key": {"y"}, "X-Long-Name": {"z"}, "a b": {"w"}}
	r, repl := arrived(r)
	h, _ := keyHandler()
	keys := map[string]bool{}
	for _, name := range []string{"A", "a", "B", "Absent", "two", "x_key", "x-long-NAME", "a b", ""} {
		for _, text := range []string{"{" + headerPrefix + name + "}", "{" + headerPrefix + name + "}-{" + ipVar + "}"} {
			z := keyZone(text)
			direct, _ := z.clientKey(r, repl, h, true)
			replaced, _ := z.clientKey(nil, repl, h, true)
			if direct != replaced {
				t.Errorf("%s: key %q, by the replacer %q", text, direct, replaced)
			}
			keys[direct] = true
		}
	}
	if len(keys) < 9 {
		t.Errorf("only %d keys: %v", len(keys), keys)
	}
}

func TestClientKeyWarnsOnceAMinuteThatItIsEmpty(t *testing.T) {
	for name, test := range map[string]struct{ key, hint string }{
		"header":  {"{" + headerA + "}", "see to it that clients send what key asks for, or end key with {client_ip}; if forward_auth or another handler sets it, put rate_limit into a route after that"},
		"unknown": {"{nobody.knows}", "placeholder {nobody.knows} is unknown"},
		"address": {"{remote_ip}", "placeholder {remote_ip} is unknown, did you mean {client_ip}, in JSON {http.vars.client_ip}?"},
		"auth":    {"{http.auth.user.id}", "put rate_limit into a route after the authentication, because it runs before that by default"},
	} {
		t.Run(name, func(t *testing.T) {
			z := keyZone(test.key)
			h, logs := keyHandler()
			start := h.Now()
			repl := values{headerA: "", ipVar: "192.0.2.1"}.replacer()
			for range 5 {
				_, _ = z.clientKey(nil, repl, h, true)
			}
			h.Now = func() time.Time { return start.Add(telemetry.ReportInterval) }
			_, _ = z.clientKey(nil, repl, h, true)
			if logs.Len() != 2 {
				t.Fatalf("%d warnings, want 2", logs.Len())
			}
			fields := logs.All()[1].ContextMap()
			if fields["hint"] != test.hint || fields["zone"] != "test" || fields["times"] != int64(5) {
				t.Errorf("warning has %v, want zone test, times 5 and hint %q", fields, test.hint)
			}
		})
	}
}

func TestClientKeyDoesNotWarnWhereSomeTextApplies(t *testing.T) {
	h, logs := keyHandler()
	repl := values{ipVar: "192.0.2.1"}.replacer()
	_, _ = keyZone("{"+headerA+"}", clientIPText).clientKey(nil, repl, h, true)
	_, _ = keyZone("static").clientKey(nil, repl, h, true)
	if logs.Len() != 0 {
		t.Errorf("logged %v", logs.All())
	}
}

func TestKeyTagsAreUnique(t *testing.T) {
	// Among so many texts some tags of 18 bits would collide.
	texts := make([]string, 0, 3000)
	for i := range cap(texts) {
		texts = append(texts, fmt.Sprint("text ", i))
	}
	tags := map[string]bool{}
	for _, text := range append(compileKey(texts), compileKey([]string{"a", "a"})[0]) {
		if tags[text.tag] {
			t.Fatalf("tag %s is used twice", text.tag)
		}
		tags[text.tag] = true
	}
	if same := compileKey([]string{"a", "a"}); same[0].tag == same[1].tag {
		t.Error("a text given twice has one tag")
	}
}

func TestKeyTagsDoNotDependOnTheirPlace(t *testing.T) {
	one, other := compileKey([]string{"a", "b"}), compileKey([]string{"b", "a"})
	if one[0].tag != other[1].tag || one[1].tag != other[0].tag {
		t.Errorf("tags are %v and %v", one, other)
	}
}

// TestCompileKeyAddsTheClientIP unless it is last, or no request would come that far.
func TestCompileKeyAddsTheClientIP(t *testing.T) {
	for _, test := range []struct {
		key  []string
		want int
	}{{[]string{"{a}"}, 2}, {[]string{clientIPText}, 1}, {[]string{"{a}", clientIPText}, 2}, {[]string{"a"}, 1}, {[]string{"{a}", "b"}, 2}} {
		if got := len(compileKey(test.key)); got != test.want {
			t.Errorf("%q has %d texts, want %d", test.key, got, test.want)
		}
	}
}

// TestLongClientKeysAreShortened to a fixed length, and none becomes another
// client's key.
func TestLongClientKeysAreShortened(t *testing.T) {
	z := keyZone("{" + headerA + "}{" + headerB + "}")
	tag := z.templates[0].tag + ":"
	seen := map[string]string{}
	for n := range 2*store.MaxClientKey + 1 {
		for _, b := range []string{"", "x", "xx"} {
			value := strings.Repeat("x", n)
			// The key at full length.
			full := fmt.Sprint(tag, value, b, ":", n)
			key := keyFor(z, values{headerA: value, headerB: b, ipVar: "192.0.2.1"})
			if n+len(b) == 0 {
				continue
			}
			switch {
			case len(full) <= store.MaxClientKey && key != full:
				t.Errorf("a key of %d bytes became %q, want %q", len(full), key, full)
			case len(full) > store.MaxClientKey && (len(key) != store.MaxClientKey || !strings.HasPrefix(key, full[:29]) || !store.IsShortened(key)):
				t.Errorf("a key of %d bytes became %q, want %d bytes that begin like it", len(full), key, store.MaxClientKey)
			}
			if other, taken := seen[key]; taken {
				t.Errorf("%q and %q share the key %q", other, full, key)
			}
			seen[key] = full
		}
	}
}

// TestShortenedKeyIsNoClientKey sends the shortened key of another client, which
// is long itself.
func TestShortenedKeyIsNoClientKey(t *testing.T) {
	z := keyZone("{" + headerA + "}")
	for n := store.MaxClientKey; n < 2*store.MaxClientKey; n++ {
		victim := keyFor(z, values{headerA: strings.Repeat("x", n)})
		for _, tail := range []string{"", victim[len(victim)-10:]} {
			for _, sent := range []string{victim + tail, strings.TrimPrefix(victim, z.templates[0].tag+":") + tail} {
				if forged := keyFor(z, values{headerA: sent}); forged == victim {
					t.Errorf("%q has the key of the client that it imitates", sent)
				}
			}
		}
	}
}

// TestCanonicalKey of what an operator copies: a shortened key is the client's,
// and another long one is shortened as it would be in a request.
func TestCanonicalKey(t *testing.T) {
	for n := range 3 * store.MaxClientKey {
		key := strings.Repeat("k", n)
		once := canonicalKey(key)
		if len(key) <= store.MaxClientKey && once != key || len(key) > store.MaxClientKey && len(once) != store.MaxClientKey {
			t.Errorf("a key of %d bytes is %q", n, once)
		}
		if twice := canonicalKey(once); twice != once {
			t.Errorf("%q is shortened again, to %q", once, twice)
		}
	}
}

func TestPlaceholdersIn(t *testing.T) {
	for text, want := range map[string][]string{
		"":                 nil,
		"static":           nil,
		"{a}":              {"a"},
		"{a}{b}":           {"a", "b"},
		"x{a}-{b.c}y":      {"a", "b.c"},
		`\{a}`:             nil,
		`\{a}{b}`:          {"b"},
		`{a\}b}`:           {`a\}b`},
		`{a\}`:             {`a\`},
		`{a\}{b}`:          {`a\}{b`},
		"{a":               nil,
		"{a}{b":            {"a"},
		"{a{b}c}":          {"a{b"},
		"{}":               {""},
		"}{":               nil,
		"{http.auth.user}": {"http.auth.user"},
	} {
		if got := PlaceholdersIn(text); !slices.Equal(got, want) {
			t.Errorf("%s has the placeholders %q, want %q", text, got, want)
		}
		// The replacer has the last word on what a placeholder is.
		var asked []string
		repl := caddy.NewEmptyReplacer()
		repl.Map(func(name string) (any, bool) { asked = append(asked, name); return "", true })
		repl.ReplaceAll(text, "")
		if !slices.Equal(asked, want) {
			t.Errorf("the replacer finds %q in %s, want %q", asked, text, want)
		}
	}
}

func TestClientKeyCountsNetworks(t *testing.T) {
	for _, test := range []struct {
		ipv4, ipv6  int
		value, want string
	}{
		{0, 0, "192.0.2.77", "192.0.2.77"},
		{0, 0, "2001:DB8::1", "2001:db8::1"},
		{0, 0, "::ffff:c000:24d", "192.0.2.77"},
		{0, 0, "fe80::1%eth0", "fe80::1"},
		{0, 64, "64:ff9b::c000:24d", "192.0.2.77"},
		{24, 64, "64:FF9B::192.0.2.77", "192.0.2.0/24"},
		{0, 64, "64:ff9b:1::c000:24d", "192.0.2.77"},
		{0, 64, "64:ff9b:1:2:3::c000:24d", "192.0.2.77"},
		{0, 64, "64:ff9b:1:c000:2:4d00::", "64:ff9b:1:c000::/64"},
		{0, 64, "64:ff9b:2::c000:24d", "64:ff9b:2::/64"},
		{0, 64, "::ffff:0:192.0.2.77", "192.0.2.77"},
		{24, 64, "2002:c000:24d:5::1", "192.0.2.0/24"},
		{0, 64, "2001:0:1:1:1:1:3fff:fdb2", "192.0.2.77"},
		{0, 64, "::1", "::/64"},
		{24, 0, "192.0.2.77", "192.0.2.0/24"},
		{32, 0, "192.0.2.77", "192.0.2.77/32"},
		{1, 0, "192.0.2.77", "128.0.0.0/1"},
		{24, 0, "2001:DB8::1", "2001:db8::1"},
		{0, 64, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"},
		{0, 128, "2001:db8::1", "2001:db8::1/128"},
		{0, 64, "192.0.2.77", "192.0.2.77"},
		{24, 64, "::ffff:192.0.2.77", "192.0.2.0/24"},
		{0, 64, "::ffff:192.0.2.77", "192.0.2.77"},
		{24, 64, "::ffff:c000:24d", "192.0.2.0/24"},
		{24, 64, "fe80::1%eth0", "fe80::/64"},
		{24, 64, "fe80::1%a:b%", "fe80::/64"},
		{24, 0, "fe80::1%eth0", "fe80::1"},
		{24, 64, "not an address", "not an address"},
		{24, 64, "192.0.2.0/24", "192.0.2.0/24"},
		{24, 64, "192.0.2", "192.0.2"},
		{24, 64, "192.0.2.77:80", "192.0.2.77:80"},
		{24, 64, "[2001:db8::1]", "[2001:db8::1]"},
		{24, 64, "192.000.002.077", "192.000.002.077"},
	} {
		z := keyZone("{" + headerA + "}")
		z.IPv4Prefix, z.IPv6Prefix = test.ipv4, test.ipv6
		key := keyFor(z, values{headerA: test.value})
		if _, got, _ := strings.Cut(key, ":"); got != test.want {
			t.Errorf("%s with ipv4_prefix %d, ipv6_prefix %d is counted as %s, want %s", test.value, test.ipv4, test.ipv6, got, test.want)
		}
	}
}

func TestClientKeyMasksEachPart(t *testing.T) {
	z := keyZone("{" + headerA + "} {" + ipVar + "}")
	z.IPv4Prefix = 24
	one := keyFor(z, values{headerA: "token", ipVar: "192.0.2.1"})
	other := keyFor(z, values{headerA: "token", ipVar: "192.0.2.200"})
	if one != other || !strings.Contains(one, "token192.0.2.0/24") {
		t.Errorf("keys are %q and %q, want one with the network 192.0.2.0/24", one, other)
	}
}

func TestClientKeyMasksTheFallback(t *testing.T) {
	z := keyZone("{" + headerA + "}")
	z.IPv4Prefix = 24
	if one, other := keyFor(z, values{ipVar: "192.0.2.1"}), keyFor(z, values{ipVar: "192.0.2.2"}); one != other {
		t.Errorf("keys are %q and %q, want one", one, other)
	}
}

// FuzzClientKey compares the client keys of two requests: they are equal
// exactly if the same text of the zone's key applies to both and all its
// placeholders yield the same.
func FuzzClientKey(f *testing.F) {
	f.Add("a", "b", "c", "192.0.2.1", "a", "b", "c", "192.0.2.1", 0, 0)
	f.Add("ab", "", "", "", "a", "b", "", "", 24, 64)
	f.Add("a:1", "b", "", "", "a", ":1b", "", "", 0, 0)
	f.Add("1:1", "", "", "", "1", ":1", "", "", 32, 128)
	f.Add("", "", "x", "192.0.2.1", "", "", "", "x", 0, 64)
	f.Add("", "", "192.0.2.1", "192.0.2.2", "", "", "", "192.0.2.1", 8, 0)
	f.Add("::ffff:192.0.2.1", "fe80::1%eth0", "", "::", "192.0.2.1", "fe80::1", "", "", 1, 1)
	names := []string{"a", "b", "c", ipVar}
	z := keyZone("{a}-{b}", "{a}{b}{c}")
	h, _ := keyHandler()
	f.Fuzz(func(t *testing.T, a1, b1, c1, ip1, a2, b2, c2, ip2 string, ipv4, ipv6 int) {
		one, other := []string{a1, b1, c1, ip1}, []string{a2, b2, c2, ip2}
		key := func(z *Zone, texts []string) string {
			v := values{}
			for i, name := range names {
				v[name] = texts[i]
			}
			clientKey, _ := z.clientKey(nil, v.replacer(), h, true)
			return clientKey
		}
		key1, key2 := key(z, one), key(z, other)
		if same := identityOf(one) == identityOf(other); same != (key1 == key2) {
			t.Errorf("%q and %q have the keys %q and %q", one, other, key1, key2)
		}
		// Networks put addresses into one bucket, so only this holds.
		masked := keyZone(z.Key...)
		masked.IPv4Prefix, masked.IPv6Prefix = int(uint(ipv4)%33), int(uint(ipv6)%129)
		if key1 == key2 && key(masked, one) != key(masked, other) {
			t.Errorf("%q and %q differ only where networks are counted", one, other)
		}
		key(masked, other)
	})
}

// identityOf returns what identifies a client in FuzzClientKey's zone.
func identityOf(texts []string) [4]string {
	v := slices.Clone(texts)
	for i := range v {
		if addr, err := netip.ParseAddr(v[i]); err == nil {
			v[i] = clientkey.CanonicalAddr(addr).String()
		}
	}
	switch {
	case v[0] != "" || v[1] != "":
		return [4]string{"first", v[0], v[1]}
	case v[2] != "":
		return [4]string{"second", v[2]}
	default:
		return [4]string{"client IP", v[3]}
	}
}

// requestOf returns what r asks of a zone that no handler has.
func requestOf(z *Zone, r *http.Request, repl *caddy.Replacer, l *Limiter) (store.Request, error) {
	z.bound[ownStore] = boundZone{Zone: z, handle: new(stores.Handle)}
	in, _, err := z.meet(r, repl, &choice{limiter: l, isMade: true})
	return in.req, err
}

// clientKey returns the client key of a request of one client.
func (z *Zone) clientKey(r *http.Request, repl *caddy.Replacer, l *Limiter, isLimited bool) (string, error) {
	key, more, err := z.clientKeys(r, repl, l, isLimited)
	if len(more) > 0 {
		return "", fmt.Errorf("%d more clients", len(more))
	}
	return key, err
}
