package limiter

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/clientkey"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Client is a client key, explained by the templates of its zone's key.
type Client struct {
	// ClientKey is the key as [ShownKey] has it.
	ClientKey string
	// Template is the text of the zone's key that yields the client key, as a Caddyfile has it; empty if
	// unknown. Values are the values of its placeholders, each once.
	Template string
	Values   []string
	// Note describes the client key where Template and Values do not describe it fully.
	Note string
	// Unknown means that the zone cannot yield the client key, or not without the client's own.
	Unknown bool
}

// Bucket identifies a bucket of a zone.
type Bucket struct {
	Client
	// Text is the text of the zone's key that yields the bucket, as the config has it; empty if the bucket
	// was found by its client key.
	Text string
	// Key is the client key itself, which may be no text.
	Key string
}

// What a client key is that no template explains, or not all of it.
const (
	noteLong     = "a long key: its beginning and a digest"
	noteSecret   = "a digest, by key_secret"
	noteBinary   = "a digest of a key that is no text"
	noteParts    = "values that are no text"
	noteBase64   = "a key that is no text, in base64"
	noteOverflow = "the bucket that new clients share, by max_new_buckets"
	noteUnknown  = "the bucket that clients share while the store does not say whether they are new, by max_new_buckets"
	noteNoText   = "of no text of the zone's key in the running config"
)

// textOf returns the text of template i.
func (z *Zone) textOf(i int) string {
	if i < len(z.Key) {
		return z.Key[i]
	}
	return clientIPText
}

// base64Prefix begins a client key that is no text where it is shown. JSON has no form for
// it, and each byte that is none would become the same character. No client key begins so:
// its tag is shorter.
const base64Prefix = "base64:"

// KeyOf returns the client key that an operator means by one copied from a log or an
// answer, or written in full.
func KeyOf(shown string) string {
	if encoded, ok := strings.CutPrefix(shown, base64Prefix); ok {
		if key, err := base64.RawURLEncoding.DecodeString(encoded); err == nil {
			return canonicalKey(string(key))
		}
	}
	return canonicalKey(shown)
}

// ShownKey returns the form in which answers and the log have a client key.
func ShownKey(clientKey string) string {
	if utf8.ValidString(clientKey) {
		return clientKey
	}
	return base64Prefix + base64.RawURLEncoding.EncodeToString([]byte(clientKey))
}

// nameBucket returns the bucket of a client key.
func (z *Zone) nameBucket(clientKey string) Bucket {
	return Bucket{Client: z.ClientOf(clientKey), Key: clientKey}
}

// FallsBack reports whether a client key is the address of a client to whom none of the zone's key applies.
func (z *Zone) FallsBack(clientKey string) bool {
	if len(z.templates) <= len(z.Key) {
		return false
	}
	rest, ok := strings.CutPrefix(clientKey, z.templates[len(z.Key)].tag)
	return ok && len(z.Key) > 0 && strings.HasPrefix(rest, ":")
}

// ClientOf explains a client key of the zone, or the form in which a store lists one.
func (z *Zone) ClientOf(clientKey string) Client {
	c := Client{ClientKey: ShownKey(clientKey)}
	switch {
	case c.ClientKey != clientKey:
		c.Note = noteBase64
		return c
	case clientKey == stores.OverflowKey:
		c.Note = noteOverflow
		return c
	case clientKey == stores.UnknownKey:
		c.Note = noteUnknown
		return c
	case strings.HasPrefix(clientKey, "$"):
		c.Note, c.Unknown = noteSecret, true
		return c
	case strings.HasPrefix(clientKey, "#"):
		c.Note, c.Unknown = noteBinary, true
		return c
	}
	for i := range z.templates {
		t := &z.templates[i]
		rest, ok := strings.CutPrefix(clientKey, t.tag+":")
		if !ok {
			continue
		}
		if store.IsShortened(clientKey) {
			c.Template, c.Values, c.Note = clientkey.Shorten(z.textOf(i)), []string{rest}, noteLong
			return c
		}
		if values, ok := t.split(rest); ok && slices.ContainsFunc(values, isBinary) {
			// Only together are they text.
			c.Note = noteParts
			return c
		} else if ok {
			c.Template, c.Values = clientkey.Shorten(z.textOf(i)), values
			return c
		}
	}
	c.Note, c.Unknown = noteNoText, !z.CouldHave(clientKey)
	return c
}

func isBinary(value string) bool { return !utf8.ValidString(value) }

// split returns the values of the template's placeholders, each once, from what follows
// the tag in a client key that is not shortened. It is the reverse of clientKey.
func (t *keyTemplate) split(rest string) (values []string, ok bool) {
	lengths := make([]int, len(t.placeholders))
	for i := len(t.placeholders) - 2; i >= 0; i-- {
		at := strings.LastIndexByte(rest, ':')
		if at < 0 {
			return nil, false
		}
		length, err := strconv.ParseUint(rest[at+1:], 10, 16)
		if err != nil {
			return nil, false
		}
		lengths[i], rest = int(length), rest[:at]
	}
	for i, name := range t.placeholders {
		if i == len(t.placeholders)-1 {
			lengths[i] = len(rest)
		}
		if lengths[i] > len(rest) {
			return nil, false
		}
		if !slices.Contains(t.placeholders[:i], name) {
			values = append(values, rest[:lengths[i]])
		}
		rest = rest[lengths[i]:]
	}
	return values, rest == ""
}

// BucketsOf returns the buckets of the client whose placeholders have these values, one
// for each template with as many placeholders, or the bucket of a client key that is
// given as it is. The first value may be a template: then it is the only one that
// counts, as where a client is given as [Zone.ClientOf] explains it.
func (z *Zone) BucketsOf(values, clientKeys []string) (buckets []Bucket, err error) {
	if len(clientKeys) > 0 {
		if len(values) > 0 {
			return nil, errors.New("give key or client_key, not both")
		}
		key := KeyOf(clientKeys[0])
		if !z.CouldHave(key) {
			return nil, fmt.Errorf("client_key %q is none of zone %s: copy it from a log or from /rate_limit/top, or give key", clientKeys[0], z.Name)
		}
		return []Bucket{z.nameBucket(key)}, nil
	}
	only, values, err := z.named(values)
	if err != nil {
		return nil, err
	}
	if len(values) > 0 && !slices.ContainsFunc(values, func(v string) bool { return v != "" }) {
		return nil, errors.New("key is empty: write what the placeholder has for the client")
	}
	var impossible error
	for i := range z.templates {
		t := &z.templates[i]
		if only != nil && only != t || !t.takes(values) {
			continue
		}
		if err := z.checkValues(t, values); err != nil {
			if i < len(z.Key) || only == t {
				impossible = cmp.Or(impossible, err)
			}
			continue
		}
		b := z.nameBucket(t.keyOf(values, z))
		b.Text = z.textOf(i)
		buckets = append(buckets, b)
	}
	if len(buckets) == 0 && impossible != nil {
		return nil, impossible
	}
	if len(buckets) == 0 {
		return nil, fmt.Errorf("no text of its key (%s) has as many placeholders as there are values, %d: give key once for each placeholder of one of them, in their order", strings.Join(z.Key, ", "), len(values))
	}
	return buckets, nil
}

// Find returns the buckets of the client that a text names: by a value, as it is shown,
// with its quotes or without, or by its client key. There is none if no client of the zone
// can have that name. Only an address, or a network, names a client by its address.
func (z *Zone) Find(text string) (buckets []Bucket) {
	if key := KeyOf(text); z.CouldHave(key) {
		buckets = append(buckets, z.nameBucket(key))
	}
	var forms [][]string
	for i := range z.templates {
		for _, form := range z.formsOf(i) {
			rest, ok := strings.CutPrefix(text, form+" ")
			for _, values := range [][]string{{rest}, strings.Fields(rest)} {
				if ok && z.templates[i].takes(values) {
					forms = append(forms, append([]string{form}, values...))
				}
			}
		}
	}
	if forms == nil {
		forms = [][]string{{text}, strings.Fields(text)}
	}
	if words := words(text); words != nil {
		forms = append(forms, words)
	}
	for _, values := range forms {
		found, err := z.BucketsOf(values, nil)
		if err != nil {
			continue
		}
		for _, b := range found {
			if !slices.ContainsFunc(buckets, func(other Bucket) bool { return other.Key == b.Key }) {
				buckets = append(buckets, b)
			}
		}
	}
	return buckets
}

// words returns the arguments that a shell makes of a client as it is shown: of texts in
// single quotes, and others between spaces. There are none if a quote is not closed.
func words(text string) (words []string) {
	var word strings.Builder
	isWord, isQuoted, isEscaped := false, false, false
	for _, r := range text {
		switch {
		case isEscaped:
			isEscaped = false
			word.WriteRune(r)
		case r == '\'':
			isWord, isQuoted = true, !isQuoted
		case isQuoted:
			word.WriteRune(r)
		case r == '\\':
			isWord, isEscaped = true, true
		case r != ' ':
			isWord = true
			word.WriteRune(r)
		case isWord:
			words = append(words, word.String())
			isWord = false
			word.Reset()
		}
	}
	if isQuoted || isEscaped {
		return nil
	}
	if isWord {
		words = append(words, word.String())
	}
	if len(words) > 1 && words[0] == "--" {
		return words[1:]
	}
	return words
}

// named returns the template that values begin with, and the others. The template is nil
// if they begin with none. A template with placeholders needs their values: without them, its text
// would be the name of a client that nobody is.
func (z *Zone) named(values []string) (t *keyTemplate, others []string, err error) {
	for i := range z.templates {
		t := &z.templates[i]
		switch {
		case len(values) == 0 || !slices.Contains(z.formsOf(i), values[0]):
		case t.takes(values[1:]):
			return t, values[1:], nil
		case len(t.placeholders) > 0:
			err = fmt.Errorf("%s: write the value of each of its placeholders behind it: it has %d, and %d are given", values[0], len(distinct(t.placeholders)), len(values)-1)
		}
	}
	return nil, values, err
}

// formsOf returns how template i is written in a config, and as it is shown.
func (z *Zone) formsOf(i int) []string {
	return []string{z.textOf(i), clientkey.Shorten(z.textOf(i))}
}

// takes reports whether values are as many as the template has placeholders, or the one
// that stands for all in a shortened client key.
func (t *keyTemplate) takes(values []string) bool {
	return len(values) == len(distinct(t.placeholders)) || t.isShortened(values)
}

func (t *keyTemplate) isShortened(values []string) bool {
	return len(values) == 1 && store.IsShortened(t.tag+":"+values[0])
}

// keyOf returns the client key of values that the template takes.
func (t *keyTemplate) keyOf(values []string, z *Zone) string {
	if t.isShortened(values) {
		return t.tag + ":" + values[0]
	}
	repl := caddy.NewEmptyReplacer()
	for i, name := range distinct(t.placeholders) {
		value := values[i]
		if network, err := netip.ParsePrefix(value); err == nil && IsAddress(name) {
			value = network.Masked().String() // the form that requests yield
		}
		repl.Set(name, value)
	}
	key, _, _ := t.clientKey(nil, nil, repl, z)
	return string(key)
}

// CouldHave reports whether a client of the zone could have that client key.
func (z *Zone) CouldHave(clientKey string) bool {
	return stores.IsShared(clientKey) || slices.ContainsFunc(z.templates, func(t keyTemplate) bool { return strings.HasPrefix(clientKey, t.tag+":") })
}

// distinct returns each of the names once, in their order.
func distinct(names []string) (once []string) {
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	return once
}
