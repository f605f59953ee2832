package clientkey

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"regexp"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Tag returns a short tag for a template: it is part of every key in a store, so that the values
// of two templates never meet.
func Tag(template string) string {
	sum := sha256.Sum256([]byte(template))
	return base64.RawURLEncoding.EncodeToString(sum[:3])[:3]
}

// shorthands are placeholders in a Caddyfile, and in JSON: those of Caddy.
var shorthands = [][2]string{
	{"{client_ip}", "{http.vars.client_ip}"},
	{"{remote_host}", "{http.request.remote.host}"},
	{"{remote_port}", "{http.request.remote.port}"},
	{"{remote}", "{http.request.remote}"},
	{"{host}", "{http.request.host}"},
	{"{hostport}", "{http.request.hostport}"},
	{"{port}", "{http.request.port}"},
	{"{scheme}", "{http.request.scheme}"},
	{"{uuid}", "{http.request.uuid}"},
	{"{method}", "{http.request.method}"},
	{"{uri}", "{http.request.uri}"},
	{"{%uri}", "{http.request.uri_escaped}"},
	{"{path}", "{http.request.uri.path}"},
	{"{%path}", "{http.request.uri.path_escaped}"},
	{"{dir}", "{http.request.uri.path.dir}"},
	{"{file}", "{http.request.uri.path.file}"},
	{"{query}", "{http.request.uri.query}"},
	{"{%query}", "{http.request.uri.query_escaped}"},
	{"{?query}", "{http.request.uri.prefixed_query}"},
	{"{orig_method}", "{http.request.orig_method}"},
	{"{orig_uri}", "{http.request.orig_uri}"},
	{"{orig_path}", "{http.request.orig_uri.path}"},
	{"{orig_dir}", "{http.request.orig_uri.path.dir}"},
	{"{orig_file}", "{http.request.orig_uri.path.file}"},
	{"{orig_query}", "{http.request.orig_uri.query}"},
	{"{orig_?query}", "{http.request.orig_uri.prefixed_query}"},
	{"{tls_cipher}", "{http.request.tls.cipher_suite}"},
	{"{tls_version}", "{http.request.tls.version}"},
	{"{tls_client_fingerprint}", "{http.request.tls.client.fingerprint}"},
	{"{tls_client_issuer}", "{http.request.tls.client.issuer}"},
	{"{tls_client_serial}", "{http.request.tls.client.serial}"},
	{"{tls_client_subject}", "{http.request.tls.client.subject}"},
	{"{tls_client_certificate_pem}", "{http.request.tls.client.certificate_pem}"},
	{"{tls_client_certificate_der_base64}", "{http.request.tls.client.certificate_der_base64}"},
	{"{upstream_hostport}", "{http.reverse_proxy.upstream.hostport}"},
}

// families are the beginnings of placeholders that end with a name, and what it consists of. The first
// that fits counts.
var families = [][3]string{
	{"{header.", "{" + HeaderPrefix, word},
	{"{cookie.", "{" + CookiePrefix, word},
	{"{query.", "{" + QueryPrefix, word},
	{"{labels.", "{" + HostLabelPrefix, word},
	{"{file.", "{http.request.uri.path.file.", word},
	{"{path.", "{http.request.uri.path.", word},
	{"{vars.", "{http.vars.", word},
	{"{re.", "{http.regexp.", words},
	{"{rp.", "{http.reverse_proxy.", words},
	{"{resp.", "{http.intercept.", words},
	{"{err.", "{http.error.", words},
	{"{file_match.", "{http.matchers.file.", word},
}

const word, words = `[\w-]*`, `[\w.-]*`

var expanding, ofFamily, shortening = replacers()

func replacers() (expanding *strings.Replacer, ofFamily []*regexp.Regexp, shortening *strings.Replacer) {
	var long, short []string
	for _, s := range shorthands {
		long, short = append(long, s[0], s[1]), append(short, s[1], s[0])
	}
	for _, f := range families {
		ofFamily = append(ofFamily, regexp.MustCompile(regexp.QuoteMeta(f[0])+"("+f[2]+"})"))
		short = append(short, f[1], f[0])
	}
	return strings.NewReplacer(long...), ofFamily, strings.NewReplacer(short...)
}

// Expand replaces what a Caddyfile has for placeholders by their names, as Caddy does.
func Expand(text string) string {
	text = expanding.Replace(text)
	for i, f := range families {
		text = ofFamily[i].ReplaceAllString(text, f[1]+"$1")
	}
	return text
}

// Shorten replaces placeholders by what a Caddyfile has for them.
func Shorten(text string) string { return shortening.Replace(text) }

// Template is a text of a zone's key with one placeholder, for which a program has the value, or
// without any.
type Template struct {
	tag string
	// placeholder is its name, or empty.
	placeholder string
	spelling    Spelling
}

// ParseTemplate parses a text as a Caddyfile or JSON has it. It is an error if it has several
// placeholders, or a brace that belongs to none.
func ParseTemplate(text string) (Template, error) {
	text = Expand(text)
	t := Template{tag: Tag(text)}
	_, rest, has := strings.Cut(text, "{")
	if !has && !strings.Contains(text, "}") {
		return t, nil
	}
	name, rest, closed := strings.Cut(rest, "}")
	if !closed || name == "" || strings.ContainsAny(name+rest, "{}") {
		return Template{}, errors.New("it must be a text with one placeholder in braces, or without any")
	}
	t.placeholder, t.spelling = name, SpellingOf(name)
	return t, nil
}

// Key returns the client key for a value of the placeholder. Without a placeholder there is one key. It
// reports false if the value is empty: then the template does not apply.
func (t *Template) Key(value string) (key string, applies bool) {
	var scratch [128]byte
	b := append(append(scratch[:0], t.tag...), ':')
	if t.placeholder == "" {
		return string(b), true
	}
	for _, prefix := range [...]string{HeaderPrefix, QueryPrefix, CookiePrefix} {
		if strings.HasPrefix(t.placeholder, prefix) {
			value = Trimmed(value)
		}
	}
	return string(store.Shortened(Append(b, value, t.spelling, Networks{}))), value != ""
}
