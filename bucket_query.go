package shardlimit

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// bucketQuery is which of a zone's buckets an admin request is about.
type bucketQuery struct {
	zone    *compiledZone
	use     *storeUse
	buckets []NamedBucket
}

// bucketParameters are what such a request can say.
var bucketParameters = []string{"key", "client_key", "store"}

// bucketQuery reads it.
func newBucketQuery(running runningConfig, zone, rawQuery string) (*bucketQuery, error) {
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
	storeNames := storesOfZones(running)
	in, ok := storeNames[zone]
	if !ok {
		return nil, unknownZone(zone, storeNames)
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
	q := zoneIn(running, zone, name)
	q.buckets, err = q.zone.BucketsOf(query["key"], query["client_key"])
	if err != nil {
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("zone %s: %w", zone, err))
	}
	return q, nil
}

// zoneIn returns a zone, of one handler, that counts in a store. There is one.
func zoneIn(running runningConfig, zone, storeName string) *bucketQuery {
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			for _, use := range l.Stores() {
				if z.Name == zone && use.name == storeName {
					return &bucketQuery{zone: z, use: use}
				}
			}
		}
	}
	return nil
}
