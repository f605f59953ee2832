package limiter

import (
	"cmp"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// fullNames are the placeholders that a Caddyfile has for longer ones. JSON has only these.
var fullNames = map[string]string{
	"host": "http.request.host", "hostport": "http.request.hostport", "port": "http.request.port",
	"method": "http.request.method", "uri": "http.request.uri", "path": "http.request.uri.path", "dir": "http.request.uri.path.dir",
	"file": "http.request.uri.path.file", "query": "http.request.uri.query", "scheme": "http.request.scheme", "uuid": "http.request.uuid",
	"orig_method": "http.request.orig_method", "orig_uri": "http.request.orig_uri", "orig_path": "http.request.orig_uri.path",
	"orig_dir": "http.request.orig_uri.path.dir", "orig_file": "http.request.orig_uri.path.file", "orig_query": "http.request.orig_uri.query",
	"remote": "http.request.remote", "remote_host": "http.request.remote.host", "remote_port": "http.request.remote.port",
	"client_ip": "http.vars." + caddyhttp.ClientIPVarKey, "tls_cipher": "http.request.tls.cipher_suite", "tls_version": "http.request.tls.version",
	"tls_client_fingerprint": "http.request.tls.client.fingerprint", "tls_client_issuer": "http.request.tls.client.issuer",
	"tls_client_serial": "http.request.tls.client.serial", "tls_client_subject": "http.request.tls.client.subject",
}

// families are fullNames that a name follows after a dot.
var families = map[string]string{
	"header": headerPrefix, "cookie": cookiePrefix, "query": queryPrefix, "labels": hostLabelPrefix, "path": "http.request.uri.path.",
	"vars": "http.vars.", "re": "http.regexp.",
}

// openPrefixes begin placeholders that take any name, or those of modules.
var openPrefixes = []string{
	headerPrefix, cookiePrefix, queryPrefix, hostLabelPrefix, "http.request.uri.path.", "http.request.orig_uri.path.",
	"http.request.remote.host/", "http.request.tls.", "http.vars.", "http.auth.", "http.regexp.", "http.matchers.", "http.reverse_proxy.",
	"http.intercept.", "http.error.", "http.response.header.", placeholderPrefix, DescriptorPrefix, "env.", "file.",
}

// closed are Caddy's other placeholders.
var closed = []string{
	"http.request.proto", "http.request.proto_name", "http.request.local", "http.request.local.host", "http.request.local.port",
	"http.request.uri_escaped", "http.request.uri.path_escaped", "http.request.uri.query_escaped", "http.request.uri.prefixed_query",
	"http.request.orig_uri.prefixed_query", "http.request.duration", "http.request.duration_ms", "http.request.body",
	"http.request.body_base64", "http.error", "http.shutting_down", "http.time_until_shutdown", "system.hostname", "system.slash", "system.os",
	"system.wd", "system.arch", "time.now", "time.now.http", "time.now.rfc3339", "time.now.common_log", "time.now.year", "time.now.unix",
	"time.now.unix_ms",
}

// alwaysSet are the placeholders that have a value for every request.
var alwaysSet = []string{
	"http.vars." + caddyhttp.ClientIPVarKey, "http.request.remote.host", "http.request.method", "http.request.scheme", "http.request.proto",
	"http.request.proto_name", "http.request.uri", "http.request.uri_escaped", "http.request.uri.path", "http.request.uri.path_escaped",
	"http.request.uri.path.dir", "http.request.orig_method", "http.request.orig_uri", "http.request.orig_uri.path", "http.request.local",
	"http.request.local.host", "http.request.local.port", "system.hostname", "system.slash", "system.os", "system.wd", "system.arch",
	"time.now.year",
}

// unrepeated are the placeholders with another value for each connection or request.
var unrepeated = map[string]string{
	"http.request.remote": "connection", "http.request.remote.port": "connection", "http.request.uuid": "request",
	"http.request.duration": "request", "http.request.duration_ms": "request", "time.now": "request", "time.now.http": "second",
	"time.now.rfc3339": "request", "time.now.common_log": "second", "time.now.unix": "second", "time.now.unix_ms": "request",
}

// requestIDs are the headers that clients and proxies commonly set anew for each request.
var requestIDs = []string{
	"X-Request-Id", "Request-Id", "X-Correlation-Id", "Traceparent", "X-Amzn-Trace-Id", "X-Cloud-Trace-Context", "Cf-Ray", "X-B3-Traceid",
	"X-B3-Spanid", "Sec-Websocket-Key", "Idempotency-Key", "Date",
}

// CheckKey returns an error if the texts of a key cannot all work.
func CheckKey(texts []string) error {
	for i, text := range texts {
		if err := checkBraces(text); err != nil {
			return err
		}
		if err := checkWords(texts[i:]); err != nil {
			return err
		}
		for _, name := range PlaceholdersIn(text) {
			if err := checkPlaceholder(name); err != nil {
				return err
			}
		}
	}
	for i, text := range texts[:max(len(texts)-1, 0)] {
		names := PlaceholdersIn(text)
		if len(names) == 0 {
			return option.Errorf("key", "%s is never reached, because %q is the same for all requests: remove one, or put %[2]q last", texts[i+1], text)
		}
		for _, name := range names {
			if slices.Contains(alwaysSet, name) || name == Descriptor || strings.HasPrefix(name, "http.request.remote.host/") {
				return option.Errorf("key", "%s is never reached, because {%s} always has a value: put %s last", texts[i+1], name, text)
			}
		}
	}
	return nil
}

// checkBraces returns an error if a brace lacks its other one.
func checkBraces(text string) error {
	open := -1
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] == '\\' && i+1 < len(text) && strings.IndexByte("{}", text[i+1]) >= 0:
			i++
		case text[i] == '{' && open >= 0, text[i] == '}' && open < 0:
			return option.Errorf("key", `%s: a brace lacks its other one: write {header.X-Api-Key} for example, or \{ and \} for braces`, text).
				JSONf(`%s: a brace lacks its other one: write {http.request.header.X-Api-Key} for example, or \\{ and \\} for braces`, text)
		case text[i] == '{':
			open = i
		case text[i] == '}':
			open = -1
		}
	}
	if open >= 0 {
		return option.Errorf("key", "%s: the brace is not closed: write %s}", text, text)
	}
	return nil
}

// checkWords returns an error if the first of some texts, or its first two, name a placeholder
// without braces.
func checkWords(texts []string) error {
	if strings.ContainsAny(texts[0], "{}") || strings.TrimSpace(texts[0]) == "" {
		return nil
	}
	whole := texts[0]
	texts = append(strings.Fields(whole), texts[1:]...)
	word, lower := texts[0], strings.ToLower(texts[0])
	family, rest, dotted := strings.Cut(word, ".")
	family = strings.ToLower(family)
	meant := ""
	switch {
	case families[family] != "" && dotted && rest != "":
		meant = word
	case families[lower] != "" && len(texts) > 1 && !strings.ContainsAny(texts[1], "{}"):
		word += " " + texts[1]
		meant = family + "." + texts[1]
	case fullNames[lower] != "":
		meant = lower
	case isKnownPlaceholder(lower):
		meant = word
	case family == "header" || family == "cookie":
		meant = family + ".<name>"
	default:
		if meant = elsewhere(lower); meant == "" || word != whole {
			return nil
		}
	}
	const fixed = "%s is a fixed text, the same for all requests: write {%s} for what it names, or another word, such as static"
	return option.Errorf("key", fixed, word, meant).JSONf(fixed, word, cmp.Or(fullName(meant), meant))
}

// addressWords and headerWords are what people call a client's address, and headers that tell clients apart.
var (
	addressWords = []string{"ip", "remote_addr", "remote_ip", "binary_remote_addr", "x-forwarded-for", "x-real-ip"}
	headerWords  = []string{
		"authorization", "api-key", "apikey", "x-api-key", "x-api-token", "x-auth-token", "x-access-token", "x-client-id", "x-tenant-id",
		"x-user-id", "user-agent",
	}
)

// elsewhere returns the placeholder for a text that names an address or a header without more, or a variable
// of nginx, and "" for others. The text is in lower case.
func elsewhere(text string) string {
	name, isVariable := strings.CutPrefix(text, "$")
	header, isHeader := strings.CutPrefix(name, "http_")
	header = strings.ReplaceAll(header, "_", "-")
	argument, isArgument := strings.CutPrefix(name, "arg_")
	cookie, isCookie := strings.CutPrefix(name, "cookie_")
	switch {
	case slices.Contains(addressWords, name), isVariable && isHeader && slices.Contains(addressWords, header):
		return "client_ip"
	case slices.Contains(headerWords, name):
		return "header." + http.CanonicalHeaderKey(name)
	case !isVariable || !nginxName.MatchString(name):
		return ""
	case header == "host":
		return "host"
	case isHeader:
		return "header." + http.CanonicalHeaderKey(header)
	case isArgument:
		return "query." + argument
	case isCookie:
		return "cookie." + cookie
	case fullNames[name] != "":
		return name
	}
	return "<placeholder>"
}

// nginxName is what variables of nginx are called.
var nginxName = regexp.MustCompile(`^[a-z]\w*$`)

// fullName returns the placeholder for which a Caddyfile has a shorter name, or "".
func fullName(name string) string {
	if family, rest, dotted := strings.Cut(name, "."); dotted && families[family] != "" {
		return families[family] + rest
	}
	return fullNames[name]
}

func checkPlaceholder(name string) error {
	if per, is := unrepeated[name]; is {
		return option.Errorf("key", "{%s} is another with each %s, so it would limit nobody: use what stays the same for a client, such as {client_ip}", name, per).
			JSONf("{%s} is another with each %s, so it would limit nobody: use what stays the same for a client, such as {http.vars.client_ip}", name, per)
	}
	if long := fullName(name); long != "" {
		return option.Errorf("key", "{%s} is a shorthand that has no value here: write {%s}", name, long)
	}
	if strings.EqualFold(name, headerPrefix+"Host") {
		return option.Errorf("key", "{%s} has no value, because the server keeps the host apart: write {http.request.host}", name)
	}
	if strings.HasPrefix(name, placeholderPrefix) {
		return option.Errorf("key", "{%s} has no value before the limits are checked: use another", name)
	}
	return nil
}

// isKnownPlaceholder reports whether Caddy, or a module that comes with it, has a placeholder of
// that name.
func isKnownPlaceholder(name string) bool {
	for _, prefix := range openPrefixes {
		if rest, ok := strings.CutPrefix(name, prefix); ok && rest != "" {
			return true
		}
	}
	return name == Descriptor || slices.Contains(closed, name) || slices.Contains(longForms(), name)
}

// longForms are the placeholders that have a shorthand.
func longForms() (names []string) {
	for _, long := range fullNames {
		names = append(names, long)
	}
	return names
}

// doubt is a placeholder of a key that may not work.
type doubt struct {
	text string
	// isLikely is set unless it has a name as map gives them.
	isLikely bool
}

// doubtsAbout returns what is doubtful about a key: placeholders that are none of Caddy's, which a
// plugin or another handler may define, and those that are likely new with each request.
func doubtsAbout(texts []string) (doubts []doubt) {
	for _, name := range PlaceholdersIn(strings.Join(texts, " ")) {
		switch header, isHeader := strings.CutPrefix(name, headerPrefix); {
		case isHeader && slices.ContainsFunc(requestIDs, func(id string) bool { return strings.EqualFold(id, header) }):
			doubts = append(doubts, doubt{"{" + name + "} is commonly another with each request, which would limit nobody", true})
		case !isKnownPlaceholder(name):
			text := "{" + name + "} is none of Caddy's placeholders"
			isDotted := strings.Contains(name, ".")
			if meant := addressMeant(name); meant != "" || !isDotted {
				text += meant
			} else {
				text += option.DidYouMean(name, append(longForms(), closed...))
			}
			doubts = append(doubts, doubt{text + "; it is empty unless a plugin, or a handler before rate_limit such as map, sets it", isDotted})
		}
	}
	return doubts
}

// reportDoubts logs what is doubtful about the zone's key when its config is loaded.
func (z *Zone) reportDoubts(l *Limiter) {
	for _, d := range doubtsAbout(z.Key) {
		level := zap.InfoLevel
		if d.isLikely {
			level = zap.WarnLevel
			z.doubts = append(z.doubts, d.text)
		}
		l.Logger.Log(level, "key may not tell clients apart",
			zap.String("zone", z.Name), zap.Strings("key", z.Key), zap.String("problem", d.text))
	}
}

// KeyProblems returns what is likely wrong with the zone's key, by its texts and by requests.
func (z *Zone) KeyProblems() (problems []string) {
	problems = slices.Clone(z.doubts)
	if name := z.unknown.Load(); name != nil && strings.IndexByte(*name, '.') < 0 {
		problems = append(problems, unknownText(*name))
	}
	return problems
}

func unknownText(name string) string {
	return "placeholder {" + name + "} is unknown" + addressMeant(name)
}

// addressMeant returns the end of a text about a placeholder that nothing defines and that names the client's
// address, and "" for others.
func addressMeant(name string) string {
	plain := strings.ToLower(name)
	for _, prefix := range []string{"http.", "request.", "vars."} {
		plain = strings.TrimPrefix(plain, prefix)
	}
	switch strings.NewReplacer(".", "", "_", "", "-", "").Replace(plain) {
	case "ip", "clientip", "clientaddr", "clientaddress", "realip", "xrealip", "remoteip", "remoteaddr", "remoteaddress", "sourceip", "peerip":
		return ", did you mean {client_ip}, in JSON {" + fullNames["client_ip"] + "}?"
	}
	return ""
}

// noteUndefined notes a placeholder that nothing defines for a request that is not simulated.
func (z *Zone) noteUndefined(name string, l *Limiter) {
	if l.simulation == nil {
		z.unknown.Store(&name)
	}
}

// warnUnknown logs that nothing defines a placeholder beside others that have a value.
func (z *Zone) warnUnknown(name string, l *Limiter) {
	z.noteUndefined(name, l)
	if times, log := l.mayLog(&z.noKey); log {
		l.Logger.Warn("a part of key is always empty", zap.String("zone", z.Name), zap.Strings("key", z.Key),
			zap.Int64("times", times), zap.String("hint", unknownText(name)))
	}
}

// emptyKeysVar is the request variable that holds the zones whose warning waits for the end of
// the request.
const emptyKeysVar = "rate_limit.empty_keys"

type emptyKey struct {
	zone  *Zone
	times int64
}

// reportEmptyKeys logs the warnings about keys that were empty. Only now it is known whether a
// handler after the limiter sets what they need.
func (l *Limiter) reportEmptyKeys(r *http.Request) {
	waiting, _ := caddyhttp.GetVar(r.Context(), emptyKeysVar).([]emptyKey)
	if len(waiting) == 0 {
		return
	}
	caddyhttp.SetVar(r.Context(), emptyKeysVar, nil)
	for _, empty := range waiting {
		hint := empty.zone.hintForLaterHeader(r)
		if hint == "" {
			hint = empty.zone.hintForNoKey(r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer), l)
		}
		empty.zone.logNoKey(l, empty.times, hint)
	}
}

// hintForLaterHeader returns the hint about a header of the key that the request has got since
// the key was found empty, or "".
func (z *Zone) hintForLaterHeader(r *http.Request) string {
	for _, t := range z.templates {
		for _, s := range t.sources {
			if s.header != "" && len(r.Header[s.header]) > 0 {
				return "put rate_limit into a route after the handler that sets the header " + s.header + ", because it runs before forward_auth and request_header"
			}
		}
	}
	return ""
}
