package shardlimit

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// bucketQuery is which of a zone's buckets an admin request is about.
type bucketQuery struct {
	zone    *Zone
	use     *storeUse
	buckets []namedBucket
}

// bucketParameters are what such a request can say.
var bucketParameters = []string{"key", "client_key", "store"}

// bucketQuery reads it.
func (a *App) bucketQuery(zone, rawQuery string) (*bucketQuery, error) {
	query, err := url.ParseQuery(rawQuery)
	if err != nil {
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("query: %w", err))
	}
	for name, values := range query {
		switch {
		case !slices.Contains(bucketParameters, name):
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("parameter %q is unknown; there is %s", name, strings.Join(bucketParameters, ", ")))
		case name != "key" && len(values) > 1:
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("parameter %s is given twice", name))
		}
	}
	stores := a.storesOfZones()
	in, ok := stores[zone]
	if !ok {
		return nil, unknownZone(zone, stores)
	}
	name := query.Get("store")
	switch {
	case name == "" && len(in) == 1:
		name = in[0]
	case name == "":
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("zone %s counts in several stores: add store= with one of %s", zone, strings.Join(in, ", ")))
	case !slices.Contains(in, name):
		return nil, apiError(http.StatusNotFound, fmt.Errorf("zone %s does not count in the store %q; there is %s", zone, name, strings.Join(in, ", ")))
	}
	q := a.zoneIn(zone, name)
	q.buckets, err = q.zone.bucketsOf(query["key"], query["client_key"])
	if err != nil {
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("zone %s: %w", zone, err))
	}
	return q, nil
}

// zoneIn returns a zone, of one handler, that counts in a store. There is one.
func (a *App) zoneIn(zone, storeName string) *bucketQuery {
	for _, h := range a.handlers {
		for _, z := range h.Zones {
			for _, in := range z.uses {
				if z.Name == zone && in.use != nil && in.use.name == storeName {
					return &bucketQuery{zone: z, use: in.use}
				}
			}
		}
	}
	return nil
}

// request is one about a bucket, that costs nothing.
func (q *bucketQuery) request(b namedBucket) store.Request {
	return store.Request{Limit: &q.zone.limit, ClientKey: b.ClientKey, Events: q.zone.events, Burst: q.zone.Burst}
}

// bucketsOf returns the buckets of the client whose placeholders have these
// values: one for each text of the key that has as many. Or the client key is
// given as it is.
func (z *Zone) bucketsOf(values, clientKeys []string) (buckets []namedBucket, err error) {
	if len(clientKeys) > 0 {
		if len(values) > 0 {
			return nil, errors.New("give key or client_key, not both")
		}
		if !z.couldHave(clientKeys[0]) {
			return nil, fmt.Errorf("client_key %q is none of zone %s: copy it from a log or from /rate_limit/top, or give key", clientKeys[0], z.Name)
		}
		return []namedBucket{{ClientKey: canonicalKey(clientKeys[0])}}, nil
	}
	if len(values) > 0 && !slices.ContainsFunc(values, func(v string) bool { return v != "" }) {
		return nil, errors.New("key is empty: write what the placeholder has for the client")
	}
	for i := range z.texts {
		t := &z.texts[i]
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
		buckets = append(buckets, namedBucket{ClientKey: string(key), Text: text})
	}
	if len(buckets) == 0 {
		return nil, fmt.Errorf("no text of its key (%s) has %d placeholders: give key once for each placeholder of one of them, in their order", strings.Join(z.Key, ", "), len(values))
	}
	return buckets, nil
}

// couldHave tells whether a client of the zone could have that client key.
func (z *Zone) couldHave(clientKey string) bool {
	return clientKey == overflowKey || slices.ContainsFunc(z.texts, func(t keyText) bool { return strings.HasPrefix(clientKey, t.tag+":") })
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
