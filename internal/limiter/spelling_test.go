package limiter

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// spelt returns the client key, without its tag, of a request to a host with a header, through Caddy's
// own placeholders.
func spelt(t *testing.T, z *Zone, host, header, value string) string {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Host = host
	r.Header.Set(header, value)
	r, repl := arrived(r)
	h, _ := keyHandler()
	key, err := z.clientKey(r, repl, h, true)
	if err != nil {
		t.Error(err)
	}
	if replaced, _ := z.clientKey(nil, repl, h, true); replaced != key {
		t.Errorf("%s %s: key %q, by the replacer %q", host, value, key, replaced)
	}
	_, key, _ = strings.Cut(key, ":")
	return key
}

func TestCredentialsHaveOneSpelling(t *testing.T) {
	for _, header := range []string{"Authorization", "Proxy-Authorization", "X-Forwarded-Authorization", "X-Authorization"} {
		z := keyZone("{" + headerPrefix + strings.ToLower(header) + "}")
		for want, values := range map[string][]string{
			"bearer aBc":             {"Bearer aBc", "bearer aBc", "BEARER aBc", "bEaReR  aBc", "Bearer\taBc", " Bearer \t aBc "},
			"bearer abc":             {"Bearer abc"},
			"basic dXNlcjpwYXNz":     {"Basic dXNlcjpwYXNz", "basic  dXNlcjpwYXNz"},
			"basic dXNlcjpwYXNzMQ==": {"Basic dXNlcjpwYXNzMQ==", "BASIC dXNlcjpwYXNzMR==", "Basic dXNlcjpwYXNzMQ", "Basic dXNlcjpwYXNzMQ=", "Basic dXNl!cjpwYXNzMQ==", "Basic dX Nl\tcjpwYXNzMQ==", "Basic dXNlcjpwYXNzMQ=x"},
			"basic +/+/":             {"Basic +/+/", "Basic -_-_"},
			"basic ":                 {"Basic !", "Basic ="},
			"Token-Without-Scheme":   {"Token-Without-Scheme", " Token-Without-Scheme "},
			"token-without-scheme":   {"token-without-scheme"},
			"bearer Bearer":          {"Bearer Bearer"},
		} {
			for _, value := range values {
				if got := spelt(t, z, "example.com", header, value); got != want {
					t.Errorf("%s: %q is counted as %q, want %q", header, value, got, want)
				}
			}
		}
	}
	// Other headers have no scheme.
	z := keyZone("{" + headerA + "}")
	for _, value := range []string{"Bearer  x", " Bearer  x", "Bearer  x\t"} {
		if got := spelt(t, z, "example.com", "A", value); got != "Bearer  x" {
			t.Errorf("another header is counted as %q", got)
		}
	}
	if got := spelt(t, z, "example.com", "A", " \t"); got != "192.0.2.1" {
		t.Errorf("space is counted as %q", got)
	}
}

func TestHostsHaveOneSpelling(t *testing.T) {
	for want, hosts := range map[string][]string{
		"tenant.example": {"tenant.example", "Tenant.EXAMPLE", "tenant.example.", "tenant.example:80", "TENANT.example.:9", "tenant.example:"},
		"192.0.2.1":      {"192.0.2.1", "192.0.2.1:80", "[::ffff:192.0.2.1]:80"},
		"2001:db8::1":    {"[2001:db8::1]", "[2001:DB8:0::1]:443", "[2001:db8::1]:"},
		"localhost":      {"localhost", "LOCALHOST:1"},
	} {
		for _, text := range []string{"{http.request.host}", "{http.request.hostport}"} {
			for _, host := range hosts {
				if got := spelt(t, keyZone(text), host, "A", "x"); got != want {
					t.Errorf("%s of %q is counted as %q, want %q", text, host, got, want)
				}
			}
		}
		for _, host := range hosts {
			for _, header := range []string{"X-Forwarded-Host", "X-Original-Host"} {
				if got := spelt(t, keyZone("{http.request.header."+strings.ToLower(header)+"}"), "other", header, host); got != want {
					t.Errorf("%s %q is counted as %q, want %q", header, host, got, want)
				}
			}
		}
	}
	for _, host := range []string{"a.tenant.example", "a.TENANT.example", "a.tenant.example.", "a.Tenant.example.:80"} {
		if got := spelt(t, keyZone("{http.request.host.labels.1}"), host, "A", "x"); got != "tenant" {
			t.Errorf("label 1 of %q is counted as %q", host, got)
		}
	}
	// A host that has no such label has no key.
	if got := spelt(t, keyZone("{http.request.host.labels.5}"), "a.example.", "A", "x"); got != "192.0.2.1" {
		t.Errorf("a label that there is not is counted as %q", got)
	}
}

func TestCookiesHaveOneSpelling(t *testing.T) {
	for want, values := range map[string][]string{
		"s:aB/c":   {"s:aB/c", "s%3AaB/c", "s%3aaB%2Fc", "%73%3A%61B%2fc"},
		"a+b":      {"a+b", "a%2Bb"},
		"50%":      {"50%"}, // no escape
		"A":        {"A", "%41", "%2541"},
		"10.0.0.1": {"10.0.0.1", "%31%30.0.0.1"},
	} {
		for _, value := range values {
			if got := spelt(t, keyZone("{http.request.cookie.sid}"), "example.com", "Cookie", "a=b; sid="+value); got != want {
				t.Errorf("%q is counted as %q, want %q", value, got, want)
			}
		}
	}
}

// TestOperatorsSpellAsClients finds the bucket of each spelling.
func TestOperatorsSpellAsClients(t *testing.T) {
	for text, spellings := range map[string][]string{
		"{http.request.header.Authorization}": {"Bearer x", "bearer  x"},
		"{http.request.host}":                 {"tenant.example", "Tenant.example."},
		"{http.request.cookie.sid}":           {"s:a", "s%3Aa"},
		clientIPText:                          {"192.0.2.1", "::ffff:192.0.2.1", "64:ff9b::192.0.2.1"},
		"{http.request.remote.host}":          {"2001:db8::/64", "2001:DB8::/64", "2001:0db8:0::/64", "2001:db8::7"},
	} {
		z := keyZone(text)
		if strings.HasSuffix(spellings[0], "/64") {
			z.IPv6Prefix = 64
		}
		keys := map[string]bool{}
		for _, value := range spellings {
			buckets, err := z.BucketsOf([]string{value}, nil)
			if err != nil {
				t.Fatal(err)
			}
			keys[buckets[0].Key] = true
		}
		if len(keys) != 1 {
			t.Errorf("%s: %q are the clients %v, want one", text, spellings, keys)
		}
	}
}

// TestImpossibleAddresses are those that no request can have.
func TestImpossibleAddresses(t *testing.T) {
	for _, test := range []struct {
		key          string
		ipv4, ipv6   int
		value, wrong string
	}{
		{clientIPText, 0, 0, "10.0.0.1", ""},
		{clientIPText, 0, 0, "fe80::1%eth0", ""},
		{clientIPText, 0, 0, "10.0.0.300", "no IP address"},
		{clientIPText, 0, 0, "127.0.0.1:8080", "no IP address"},
		{clientIPText, 0, 0, "[::1]", "no IP address"},
		{clientIPText, 0, 0, "localhost", "no IP address"},
		{clientIPText, 0, 0, "10.0.0.0/8", "counts single addresses"},
		{clientIPText, 8, 0, "10.0.0.0/8", ""},
		{clientIPText, 8, 0, "10.1.2.3", ""},
		{clientIPText, 8, 0, "10.0.0.0/16", "networks of 8 bits"},
		{clientIPText, 8, 0, "10.0.0.1/8", "networks of 8 bits"},
		{clientIPText, 8, 0, "2001:db8::/64", "counts single addresses"},
		{clientIPText, 0, 64, "2001:db8::/64", ""},
		{"{http.request.remote.host}", 0, 0, "alice", "no IP address"},
		{"{http.request.remote.host/24}", 0, 0, "10.0.0.0/24", ""},
		{"{http.request.remote}", 0, 0, "10.0.0.1:80", ""},
		{"{http.request.remote.host}", 0, 0, "@", ""},
		// The address is the last text of this key.
		{"{" + headerA + "}", 0, 0, "10.0.0.300", ""},
		{"{" + headerA + "}-" + clientIPText, 0, 0, "10.0.0.300", "has as many placeholders as there are values, 1"},
	} {
		z := keyZone(test.key)
		z.IPv4Prefix, z.IPv6Prefix = test.ipv4, test.ipv6
		buckets, err := z.BucketsOf([]string{test.value}, nil)
		switch {
		case test.wrong == "" && (err != nil || len(buckets) == 0):
			t.Errorf("%s, %q: buckets %v, error %v", test.key, test.value, buckets, err)
		case test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)):
			t.Errorf("%s, %q: error %v, want one that says %q", test.key, test.value, err, test.wrong)
		}
	}
	z := keyZone("{" + headerA + "}-" + clientIPText)
	if _, err := z.BucketsOf([]string{"token", "10.0.0.300"}, nil); err == nil || !strings.Contains(err.Error(), "no IP address") {
		t.Errorf("in a key of two placeholders: %v", err)
	}
}

// TestRepeatedValues of what names a client are an error, unless they are one value, or a list.
func TestRepeatedValues(t *testing.T) {
	key := func(z *Zone, query string, headers http.Header) (string, error) {
		r := httptest.NewRequest(http.MethodGet, "/?"+query, nil)
		r.Header = headers
		r, repl := arrived(r)
		h, _ := keyHandler()
		clientKey, err := z.clientKey(r, repl, h, true)
		_, clientKey, _ = strings.Cut(clientKey, ":")
		return clientKey, err
	}
	header := func(values ...string) http.Header { return http.Header{"A": values} }
	for _, test := range []struct {
		text, query string
		headers     http.Header
		want        string // "" is an error
	}{
		{"{" + headerA + "}", "", header("good"), "good"},
		{"{" + headerA + "}", "", header("good", "good"), "good"},
		{"{" + headerA + "}", "", header("", "good", ""), "good"},
		{"{" + headerA + "}", "", header("", ""), "192.0.2.1"},
		{"{" + headerA + "}", "", header("good", "z1"), ""},
		{"{" + headerA + "}", "", header("z1", "good", "z1"), ""},
		{"x-{" + headerA + "}-" + clientIPText, "", header("good", "z1"), ""},
		{"{http.request.uri.query.key}", "key=k", nil, "k"},
		{"{http.request.uri.query.key}", "key=k&key=k&key=", nil, "k"},
		{"{http.request.uri.query.key}", "key=k&key=z", nil, ""},
		{"{http.request.uri.query.key}", "key=k&k%65y=z", nil, ""},
		{"{http.request.uri.query.key}", "other=1&other=2", nil, "192.0.2.1"},
		{"{http.request.uri.query.key}", "key=k" + strings.Repeat("&", 20_000), nil, "k"},
		{"{http.request.uri.query.key}", "key=z&x;key=k", nil, ""},
		{"{http.request.uri.query.key}", "key=z&key=re%zzal", nil, ""},
		{"{http.request.uri.query.key}", "a;key=k", nil, "k"},
		{"{http.request.uri.query.key}", "key=k#z", nil, ""},
		{"{http.request.uri.query.key}", "a=1#&key=z", nil, "z"},
		{"{http.request.uri.query.key}", "key=z1#&key=k", nil, ""},
		{"{http.request.uri.query.key}", "key=k#", nil, ""},
		{"{http.request.uri.query.key}", "%zz&key=k", nil, "k"},
		{"{http.request.uri.query.key}", "key=k+", nil, "k"},
		{"{http.request.uri.query.key}", "key[a]=1&key[b]=2", nil, "192.0.2.1"},
		{"{http.request.uri.query.key}", "key[a]=1&key=k", nil, "k"},
		{"{http.request.cookie.sid}", "", http.Header{"Cookie": {"a=1; sid=k; SID=%6B"}}, "k"},
		{"{http.request.cookie.sid}", "", http.Header{"Cookie": {"sid=1; sid=2; sid=3; sid=4"}}, ""},
		{"{http.request.header.authorization}", "", http.Header{"Authorization": {"Bearer k", "bearer  k"}}, "bearer k"},
		{"{http.request.header.authorization}", "", http.Header{"Authorization": {"Digest a", "Bearer k"}}, ""},
		{"{http.request.cookie.sid}", "", http.Header{"Cookie": {"sid=k; sid=k"}}, "k"},
		{"{http.request.cookie.sid}", "", http.Header{"Cookie": {"sid[a]=1; sid[b]=2; sid[c]=3; sid[d]=4"}}, "192.0.2.1"},
		{"{http.request.cookie.sid}", "", http.Header{"Cookie": {"SID=k"}}, "k"},
		{"{" + headerPrefix + "x-forwarded-host}", "", http.Header{"X-Forwarded-Host": {"a.example", "z.example"}}, ""},
		{"{" + headerA + "}", "", header(" good", "good\t"), "good"},
		{"{" + headerPrefix + "x-forwarded-for}", "", http.Header{"X-Forwarded-For": {"10.0.0.1", "10.0.0.2"}}, "10.0.0.1,10.0.0.2"},
		{"{" + headerPrefix + "accept-language}", "", http.Header{"Accept-Language": {"de", "en"}}, "de,en"},
		{clientIPText, "", header("good", "z1"), "192.0.2.1"},
	} {
		z := keyZone(test.text)
		z.enforced = cohorts
		got, err := key(z, test.query, test.headers)
		var refused caddyhttp.HandlerError
		if isRefused := errors.As(err, &refused) && refused.StatusCode == http.StatusBadRequest; got != test.want || isRefused != (test.want == "") {
			t.Errorf("%s of %q, %v: key %q, error %v, want %q", test.text, test.query, test.headers, got, err, test.want)
		}
		// A zone that refuses nobody says nothing to a client.
		z.enforced = 0
		if _, err := key(z, test.query, test.headers); err != nil {
			t.Errorf("%s, not enforced: %v", test.text, err)
		}
	}
	// Only the text that applies names the client.
	z := keyZone("{http.request.uri.query.key}", "{"+headerA+"}")
	z.enforced = cohorts
	if got, err := key(z, "key=k", header("a", "b")); got != "k" || err != nil {
		t.Errorf("the second text does not apply: key %q, error %v", got, err)
	}
}

// TestAmbiguousRequestsGetOneAnswer, whatever their limit, and whether or not operators have changed
// something for any client.
func TestAmbiguousRequestsGetOneAnswer(t *testing.T) {
	s := newQueueSite(t, []*Zone{{
		Name: "zone", Key: []string{clientKey}, Window: time.Hour, Events: Quantity{Text: eventsText, Number: 10},
	}})
	send := func(events string, values ...string) int {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.Header["A"] = values
		r.Header.Set("B", events)
		status, _ := s.serve(s.limiters, r)
		return status
	}
	for _, overrides := range []int{0, 1} {
		if overrides > 0 {
			err := s.handles[0].SetOverride(t.Context(), store.Override{
				Kind: store.OverrideBlock, Zone: "zone", ClientKey: "another", Until: time.Now().Add(time.Hour).UnixMicro(),
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, test := range []struct {
			events string
			values []string
			want   int
		}{
			{UnlimitedWord, []string{"good", "z1"}, http.StatusBadRequest},
			{"10", []string{"good", "z1"}, http.StatusBadRequest},
			{"0", []string{"good", "z1"}, http.StatusBadRequest},
			{UnlimitedWord, []string{"good", "good"}, http.StatusOK},
			{UnlimitedWord, []string{"good"}, http.StatusOK},
			{"10", []string{"good"}, http.StatusOK},
			{"0", []string{"good"}, http.StatusTooManyRequests},
		} {
			if got := send(test.events, test.values...); got != test.want {
				t.Errorf("%d overrides, events %s, %q: status %d, want %d", overrides, test.events, test.values, got, test.want)
			}
		}
	}
}
