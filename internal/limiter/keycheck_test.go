package limiter

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestKeysThatCannotWork are errors that name the text and the remedy.
func TestKeysThatCannotWork(t *testing.T) {
	for name, test := range map[string]struct {
		texts []string
		want  string
	}{
		"open brace":               {[]string{"{http.request.header.X-Api-Key"}, "the brace is not closed: write {http.request.header.X-Api-Key}"},
		"open brace in the middle": {[]string{"{http.request.header.A}-{http.request.header.B"}, "the brace is not closed"},
		"closing brace alone":      {[]string{"http.request.header.X-Api-Key}"}, "a brace lacks its other one"},
		"brace in braces":          {[]string{"{{http.request.header.A}}"}, "a brace lacks its other one"},
		"one brace too many":       {[]string{"{http.request.header.A}}"}, "a brace lacks its other one"},
		"word of a shorthand":      {[]string{"remote_host"}, "remote_host is a fixed text, the same for all requests: write {remote_host}"},
		"a header alone":           {[]string{"X-Api-Key"}, "X-Api-Key is a fixed text, the same for all requests: write {header.X-Api-Key}"},
		"a header in lower case":   {[]string{"authorization"}, "write {header.Authorization}"},
		"an address of elsewhere":  {[]string{"ip"}, "write {client_ip}"},
		"a forwarded address":      {[]string{"X-Forwarded-For"}, "write {client_ip}"},
		"nginx's header":           {[]string{"$http_x_api_key"}, "write {header.X-Api-Key}"},
		"nginx's address":          {[]string{"$binary_remote_addr"}, "write {client_ip}"},
		"nginx's host":             {[]string{"$http_host"}, "write {host}"},
		"nginx's path":             {[]string{"$uri"}, "write {uri}"},
		"nginx's argument":         {[]string{"$arg_token"}, "write {query.token}"},
		"nginx's cookie":           {[]string{"$cookie_session"}, "write {cookie.session}"},
		"another variable":         {[]string{"$tenant"}, "write {<placeholder>}"},
		"word of a family":         {[]string{"header", "X-Api-Key"}, "header X-Api-Key is a fixed text, the same for all requests: write {header.X-Api-Key}"},
		"words in one text":        {[]string{"header X-Api-Key"}, "write {header.X-Api-Key}"},
		"in capitals":              {[]string{"Remote_Host"}, "write {remote_host}"},
		"family of cookies":        {[]string{"cookie", "sid"}, "write {cookie.sid}"},
		"family after another":     {[]string{"{http.request.header.A}", "query", "key"}, "write {query.key}"},
		"header alone":             {[]string{"header"}, "write {header.<name>}"},
		"dotted word":              {[]string{"header.X-Api-Key"}, "write {header.X-Api-Key}"},
		"long name":                {[]string{"http.request.remote.host"}, "write {http.request.remote.host}"},
		"long name of a header":    {[]string{"http.request.header.X-Api-Key"}, "write {http.request.header.X-Api-Key}"},
		"shorthand in JSON":        {[]string{"{client_ip}"}, "{client_ip} is a shorthand that has no value here: write {" + ipVar + "}"},
		"header in JSON":           {[]string{"{header.X-Api-Key}"}, "write {http.request.header.X-Api-Key}"},
		"address with port":        {[]string{"{http.request.remote}"}, "{http.request.remote} is another with each connection, so it would limit nobody"},
		"port":                     {[]string{"{" + ipVar + "}:{http.request.remote.port}"}, "another with each connection"},
		"uuid":                     {[]string{"{http.request.header.A}", "{http.request.uuid}"}, "another with each request"},
		"time":                     {[]string{"{time.now.unix_ms}"}, "another with each request"},
		"duration":                 {[]string{"{http.request.duration}"}, "another with each request"},
		"header of the host":       {[]string{"{http.request.header.host}"}, "has no value, because the server keeps the host apart: write {http.request.host}"},
		"of the limiter":           {[]string{"{http.rate_limit.remaining}"}, "has no value before the limits are checked"},
		"after the address":        {[]string{"{" + ipVar + "}", "{http.request.header.X-Api-Key}"}, "{http.request.header.X-Api-Key} is never reached, because {" + ipVar + "} always has a value: put {" + ipVar + "} last"},
		"after a part that is set": {[]string{"{http.request.header.A}-{http.request.method}", "{http.request.header.B}"}, "because {http.request.method} always has a value"},
		"after a network":          {[]string{"{http.request.remote.host/24,64}", "static"}, "always has a value"},
		"after a fixed text":       {[]string{"{http.request.header.A}", "static", "{http.request.header.B}"}, `is never reached, because "static" is the same for all requests`},
	} {
		t.Run(name, func(t *testing.T) {
			if err := CheckKey(test.texts); err == nil || !strings.HasPrefix(err.Error(), "key ") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("the error is %v, want one with %q", err, test.want)
			}
		})
	}
}

// TestKeysThatWork are no errors, and nothing in them is doubtful.
func TestKeysThatWork(t *testing.T) {
	for _, texts := range [][]string{
		{"static"}, {"everybody"}, {"api"}, {"api-key-holders"}, {"ips"}, {"ip pool"}, {"x"}, {"x-ai"}, {"http_api"}, {"$5-plan"}, {"X-Api-Keys"}, {`\{literal\}`}, {"{http.request.header.X-Api-Key}", clientIPText},
		{"{http.request.header.A}|{http.request.cookie.b}", "{http.request.uri.query.c}", clientIPText}, {"{http.request.host}", clientIPText},
		{"{http.auth.user.id}", "anonymous"}, {"{http.auth.user.id}", "x-anonymous"}, {"{http.request.tls.client.fingerprint}"}, {"{http.vars.tenant}"}, {"{http.regexp.name.1}"},
		{clientIPText + " {http.request.uri.path}"}, {"{http.request.remote.host}"}, {"{env.TENANT}", "{time.now.year}"},
		{"{http.request.host.labels.2}", clientIPText}, {"{http.request.uri.path.0}"}, {"{http.matchers.file.type}"},
	} {
		if err := CheckKey(texts); err != nil {
			t.Errorf("%q: %v", texts, err)
		}
		if doubts := doubtsAbout(texts); len(doubts) > 0 {
			t.Errorf("%q is doubtful: %v", texts, doubts)
		}
	}
}

// TestShorthandsAreThoseOfCaddy: each stands for what the Caddyfile makes of it, and is known.
func TestShorthandsAreThoseOfCaddy(t *testing.T) {
	for short, long := range fullNames {
		segment := httpcaddyfile.NewShorthandReplacer()
		tokens := caddyfile.Segment{{Text: "{" + short + "}"}}
		segment.ApplyToSegment(&tokens)
		if got := tokens[0].Text; got != "{"+long+"}" {
			t.Errorf("{%s} becomes %s in a Caddyfile, want {%s}", short, got, long)
		}
		if !isKnownPlaceholder(long) {
			t.Errorf("%s is not known", long)
		}
	}
	for family, prefix := range families {
		segment := httpcaddyfile.NewShorthandReplacer()
		tokens := caddyfile.Segment{{Text: "{" + family + ".x}"}}
		segment.ApplyToSegment(&tokens)
		if got := tokens[0].Text; got != "{"+prefix+"x}" {
			t.Errorf("{%s.x} becomes %s in a Caddyfile, want {%sx}", family, got, prefix)
		}
	}
}

// TestPlaceholdersThatAreAlwaysSet have a value for a request with nothing in it.
func TestPlaceholdersThatAreAlwaysSet(t *testing.T) {
	local := context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9), Port: 443})
	_, repl := arrived(httptest.NewRequestWithContext(local, http.MethodGet, "/", nil))
	for _, name := range append(alwaysSet, closed...) {
		if slices.Contains([]string{"http.error", "http.shutting_down", "http.time_until_shutdown"}, name) {
			continue // of error routes and of the server
		}
		if _, known := repl.Get(name); !known {
			t.Errorf("Caddy does not know {%s}", name)
		}
	}
	for _, name := range alwaysSet {
		if value, _ := repl.GetString(name); value == "" {
			t.Errorf("{%s} has no value", name)
		}
	}
}

// TestDoubtfulKeys are reported when they are loaded, and what is likely wrong in the status, as are
// placeholders that a request finds unknown.
func TestDoubtfulKeys(t *testing.T) {
	for name, test := range map[string]struct {
		text, log, level string
		problems         string
	}{
		"slip":           {"{http.request.heder.X-Api-Key}", "none of Caddy's placeholders", "warn", "none of Caddy's placeholders"},
		"plugin":         {"{geo.country}", "{geo.country} is none of Caddy's placeholders; it is empty unless a plugin, or a handler before rate_limit such as map, sets it", "warn", "{geo.country}"},
		"map":            {"{tenant}", "{tenant} is none of Caddy's placeholders", "info", ""},
		"remote_ip":      {"{http.request.remote_ip}", "{http.request.remote_ip} is none of Caddy's placeholders, did you mean {client_ip}, in JSON {http.vars.client_ip}?", "warn", "did you mean {client_ip}"},
		"client_ip":      {"{http.request.client_ip}", "did you mean {client_ip}", "warn", "did you mean {client_ip}"},
		"client.ip":      {"{http.request.client.ip}", "did you mean {client_ip}", "warn", "did you mean {client_ip}"},
		"address":        {"{request.Remote-Addr}", "did you mean {client_ip}", "warn", "did you mean {client_ip}"},
		"undotted":       {"{remote_ip}", "did you mean {client_ip}", "info", ""},
		"request ID":     {"{http.request.header.x-request-id}", "commonly another with each request", "warn", "commonly another with each request"},
		"beside another": {"{" + headerA + "}|{nobody}", "{nobody}", "info", ""},
	} {
		t.Run(name, func(t *testing.T) {
			core, logs := observer.New(zap.InfoLevel)
			h := &Limiter{Config: Config{Logger: zap.New(core)}}
			z := keyZone(test.text)
			z.reportDoubts(h)
			if logs.Len() != 1 {
				t.Fatalf("%d entries are logged", logs.Len())
			}
			if entry := logs.All()[0]; entry.Level.String() != test.level || !strings.Contains(entry.ContextMap()["problem"].(string), test.log) {
				t.Errorf("logged %s %v, want %s %q", entry.Level, entry.ContextMap(), test.level, test.log)
			}
			if got := strings.Join(z.KeyProblems(), " "); (got == "") != (test.problems == "") || !strings.Contains(got, test.problems) {
				t.Errorf("problems are %q, want %q", got, test.problems)
			}
		})
	}
	h, logs := keyHandler()
	z := keyZone("{" + headerA + "}|{nobody}")
	repl := values{headerA: "x", ipVar: "192.0.2.1"}.replacer()
	for range 3 {
		_, _ = z.clientKey(nil, repl, h, true)
	}
	if got := strings.Join(z.KeyProblems(), " "); got != "placeholder {nobody} is unknown" || logs.Len() != 1 || logs.All()[0].ContextMap()["hint"] != got {
		t.Errorf("after requests the problems are %q, and %v is logged", got, logs.All())
	}
	repl.Set("nobody", "")
	z = keyZone("{" + headerA + "}|{nobody}")
	if _, _ = z.clientKey(nil, repl, h, true); len(z.KeyProblems()) > 0 {
		t.Errorf("a placeholder that is set to nothing is a problem: %v", z.KeyProblems())
	}
}

// TestHeaderThatALaterHandlerSets: the hint names the order, not the client.
func TestHeaderThatALaterHandlerSets(t *testing.T) {
	for name, test := range map[string]struct{ set, hint string }{
		"the header":  {"X-User", "put rate_limit into a route after the handler that sets the header X-User"},
		"another one": {"X-Other", "see to it that clients send what key asks for"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newTestHandler(t, &Zone{}, &deafStore{})
			core, entries := observer.New(zap.InfoLevel)
			l.Logger = zap.New(core)
			l.Zones[0].Key = []string{"{" + headerPrefix + "X-User}"}
			l.Zones[0].prepare()
			w := httptest.NewRecorder()
			r := caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil)
			err := l.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
				if entries.Len() > 0 {
					t.Error("the warning comes before the end")
				}
				r.Header.Set(test.set, "alice")
				return nil
			}))
			if err != nil {
				t.Fatal(err)
			}
			if entries.Len() != 1 || !strings.HasPrefix(entries.All()[0].ContextMap()["hint"].(string), test.hint) {
				t.Errorf("logged %v, want the hint %q", entries.All(), test.hint)
			}
		})
	}
}

// TestUnknownPlaceholderIsAProblemWhileItLasts, and not because of a simulation.
func TestUnknownPlaceholderIsAProblemWhileItLasts(t *testing.T) {
	z := &Zone{}
	l := newTestHandler(t, z, memory.New(memory.NewBuckets(), memory.Options{}))
	z.templates = []keyTemplate{{doubtful: []string{"tenant"}}}
	ask := func(l *Limiter, repl *caddy.Replacer) int {
		if _, err := z.clientKey(nil, repl, l, true); err != nil {
			t.Fatal(err)
		}
		return len(z.KeyProblems())
	}
	quiet := *l
	quiet.simulation = new(Simulation)
	known := caddy.NewReplacer()
	known.Set("tenant", "a")
	if n := ask(&quiet, caddy.NewReplacer()); n != 0 {
		t.Errorf("%d problems after a simulation", n)
	}
	if n := ask(l, caddy.NewReplacer()); n != 1 {
		t.Errorf("%d problems after a request, want 1", n)
	}
	if n := ask(l, known); n != 0 {
		t.Errorf("%d problems once it has a value", n)
	}
}

// TestNothingIsSaidOfTheKeyOfAClientWithoutALimit: it does not matter there.
func TestNothingIsSaidOfTheKeyOfAClientWithoutALimit(t *testing.T) {
	for events, warnings := range map[string]int{UnlimitedWord: 0, "5": 1} {
		z := keyZone("{" + headerA + "}")
		z.Events, z.Cost = Quantity{Text: "{" + headerB + "}", Number: 3}, Quantity{Number: 1}
		h, logs := keyHandler()
		if _, err := requestOf(z, nil, values{headerA: "", headerB: events, ipVar: "192.0.2.1"}.replacer(), h); err != nil {
			t.Fatal(err)
		}
		if logs.Len() != warnings {
			t.Errorf("with events %s are logged %v", events, logs.All())
		}
	}
}
