package shardlimit

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// NamedBucket identifies a bucket of a zone: its client key and, if the bucket was
// found by values, the template of the key that yields it.
type NamedBucket struct {
	ClientKey string `json:"client_key"`
	Text      string `json:"text,omitempty"`
}

// About returns a request about a bucket that costs nothing.
func (z *compiledZone) About(b NamedBucket) store.Request {
	return store.Request{Limit: &z.limit, ClientKey: b.ClientKey, Events: z.Events.Number, Burst: z.Burst}
}

// BucketsOf returns the buckets of the client whose placeholders have these
// values: one for each text of the key that has as many. Or the client key is
// given as it is.
func (z *compiledZone) BucketsOf(values, clientKeys []string) (buckets []NamedBucket, err error) {
	if len(clientKeys) > 0 {
		if len(values) > 0 {
			return nil, errors.New("give key or client_key, not both")
		}
		if !z.couldHave(clientKeys[0]) {
			return nil, fmt.Errorf("client_key %q is none of zone %s: copy it from a log or from /rate_limit/top, or give key", clientKeys[0], z.Name)
		}
		return []NamedBucket{{ClientKey: canonicalKey(clientKeys[0])}}, nil
	}
	if len(values) > 0 && !slices.ContainsFunc(values, func(v string) bool { return v != "" }) {
		return nil, errors.New("key is empty: write what the placeholder has for the client")
	}
	for i := range z.templates {
		t := &z.templates[i]
		names := distinct(t.placeholders)
		text := clientIPText
		if i < len(z.Key) {
			text = z.Key[i]
		} else if _, err := netip.ParseAddr(strings.Join(values, "")); err != nil {
			// The address counts where no text of the key applies.
			continue
		}
		if len(names) != len(values) {
			continue
		}
		repl := caddy.NewEmptyReplacer()
		for n, name := range names {
			repl.Set(name, values[n])
		}
		key, _ := t.clientKey(nil, repl, z)
		buckets = append(buckets, NamedBucket{ClientKey: string(key), Text: text})
	}
	if len(buckets) == 0 {
		return nil, fmt.Errorf("no text of its key (%s) has %d placeholders: give key once for each placeholder of one of them, in their order", strings.Join(z.Key, ", "), len(values))
	}
	return buckets, nil
}

// couldHave tells whether a client of the zone could have that client key.
func (z *compiledZone) couldHave(clientKey string) bool {
	return clientKey == overflowKey || slices.ContainsFunc(z.templates, func(t keyText) bool { return strings.HasPrefix(clientKey, t.tag+":") })
}

// distinct are names, each once, in the order in which they come first.
func distinct(names []string) (once []string) {
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	return once
}
