package limiter

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
)

// TestCookiesAreReadAsServersReadThem: whichever value a server takes is among those that are counted.
func TestCookiesAreReadAsServersReadThem(t *testing.T) {
	for _, test := range []struct {
		header string
		want   []string
	}{
		{"", nil},
		{"other=abc; insid=abc; sid2=abc", nil},
		{"sid", nil},
		{"sid=abc", []string{"abc"}},
		{"a=1; sid=abc; b=2", []string{"abc"}},
		{"sid = abc", []string{"abc"}},
		{"sid\t=\tabc\t", []string{"abc"}},
		{"sid=abc=d", []string{"abc=d"}},
		{"sid=old; sid=abc", []string{"old", "abc"}},
		{`sid="abc"`, []string{"abc"}},
		{`sid=""`, []string{""}},
		{`sid="`, []string{""}},
		{`sid="\141bc"`, []string{"abc"}},
		{`sid="a\bc"`, []string{"abc"}},
		{`sid="\"\\\054"`, []string{`"\,`}},
		{`sid="\400\1"`, []string{"4001"}},
		{`sid="a b"`, []string{"a b"}},
		{`sid=\141bc`, []string{`\141bc`}},
		{`sid="abcX`, []string{"abc"}},                // old versions of Express
		{`sid="abc" z=1`, []string{`abc" z=`, "abc"}}, // Python
		{`sid=abc z=1`, []string{"abc z=1", "abc"}},   // Python
		{`sid=Bearer abc`, []string{"Bearer abc"}},
		{`sid={"id": 1}`, []string{`{"id": 1}`}},
		{`sid="x","y"`, []string{`x","y`}},
		{`x=1 sid=abc`, []string{"abc"}},                       // Python
		{`x=1 sid = abc; sid=b`, []string{"abc", "b"}},         // Python
		{`sid=x sid=abc`, []string{"x sid=abc", "x", "abc"}},   // Python
		{"SID=abc; sid=x", []string{"abc", "x"}},               // ASP.NET
		{"sid[0]=abc", nil},                                    // a list, which is no text
		{"s%69d=abc", []string{"abc"}},                         // PHP before 7.4.11
		{"%s%69d=abc", nil},                                    // no escape
		{"sid=\xc3\xa9,{\"a\"}", []string{"\xc3\xa9,{\"a\"}"}}, // Go ignores it
	} {
		if got := cookieValues([]string{test.header}, "sid"); !slices.Equal(got, test.want) {
			t.Errorf("%q has the values %q, want %q", test.header, got, test.want)
		}
	}
	if got := cookieValues([]string{"a_b=1; a.b=2; a b=3; a[b=4; A.B=5", "a_b=6"}, "a_b"); strings.Join(got, "") != "123456" {
		t.Errorf("PHP takes %q for a_b", got)
	}
}

func TestParametersAreNamedAsServersNameThem(t *testing.T) {
	for _, test := range []struct {
		query, want string
	}{
		{"api_key=k", "k"},
		{"api.key=k", "k"},
		{"api%20key=k", "k"},
		{"api+key=k", "k"},
		{"api%5Bkey=k", "k"},
		{"api[key=k", "k"},
		{"%20%09api_key=k", "k"},
		{"api_key%00x=k", "k"},
		{"API_KEY=k", "k"},
		{"Api.Key=k&api_key=z", "k,z"},
		{"api_key[]=k", "k"},
		{"api_key%5Ba%5D=k", "k"},
		{"ap%69_key%00%zz=k", "k"},
		{"%u0061pi_key=%u006b", "k"},
		{"api_key=%u00", "%u00"},
		{"api_keys=k", ""},
		{"my_api_key=k", ""},
		{"api-key=k", ""},
		{"api_ke=k", ""},
		{"[api_key]=k", ""},
		{"api_key_=k", ""},
	} {
		if got := strings.Join(queryValues(test.query, "api_key"), ","); got != test.want {
			t.Errorf("%s has the values %q, want %q", test.query, got, test.want)
		}
	}
}

// TestSignedRequestsCountAsTheirAddress: their credentials are new each time.
func TestSignedRequestsCountAsTheirAddress(t *testing.T) {
	z := keyZone("{" + headerPrefix + "authorization}")
	for value, want := range map[string]string{
		`Digest username="a", nc=1`: "192.0.2.1", `DIGEST  username="a"`: "192.0.2.1", "NTLM x": "192.0.2.1", `Hawk id="x", ts="1"`: "192.0.2.1",
		"AWS AKID:sig": "192.0.2.1", "GOOG4-HMAC-SHA256 Credential=x": "192.0.2.1", `MAC id="x"`: "192.0.2.1",
		"OAuth oauth_nonce=x": "192.0.2.1", "OAuth abc": "oauth abc", "Bearer a:b=c": "bearer a:b=c",
		"AWS4-HMAC-SHA256 Credential=x": "192.0.2.1", "Digest": "Digest", "Digests x": "digests x",
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Authorization", value)
		r, repl := arrived(r)
		h, _ := keyHandler()
		key, err := z.clientKey(r, repl, h, true)
		if _, key, _ = strings.Cut(key, ":"); key != want || err != nil {
			t.Errorf("%q is counted as %q, want %q: %v", value, key, want, err)
		}
	}
}

// TestHostileCookiesCostLittle: what is read of a header takes memory by its length alone.
func TestHostileCookiesCostLittle(t *testing.T) {
	const length, most = 1 << 16, 40
	for _, part := range []string{"=", " ", "sid=", " sid=", "; sid=", `"`, `\`, `sid="`, ` sid="\`, "a=", "sid= ", "[", "%73", "; sid=\xff"} {
		header := "sid=" + strings.Repeat(part, length/len(part))
		z := keyZone("{" + clientkey.CookiePrefix + "sid}")
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Cookie", header)
		r, repl := arrived(r)
		h, _ := keyHandler()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, more, err := z.clientKeys(r, repl, h, true)
		runtime.ReadMemStats(&after)
		if len(more) >= mostClients || err != nil {
			t.Errorf("a header like %q is of %d more clients: %v", part, len(more), err)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > most*length {
			t.Errorf("a header of %d bytes like %q takes %d bytes", len(header), part, took)
		}
	}
}
