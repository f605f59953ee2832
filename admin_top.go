package shardlimit

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// zoneTop is what the admin API tells of the clients that a zone refused.
type zoneTop struct {
	Zone string `json:"zone"`
	// Since is how many seconds the counts cover.
	Since   float64         `json:"since"`
	Refused []refusedClient `json:"refused"`
}

// allTops are those of all zones, in alphabetical order.
type allTops struct {
	Zones []zoneTop `json:"zones"`
}

const (
	defaultTop = 20
	mostTop    = 100
)

// adminTop answers GET /rate_limit/top: the clients that were refused most in
// the last minutes.
func adminTop(running runningConfig, r *http.Request) (any, error) {
	query, err := queryOf(r, "zone", "n")
	if err != nil {
		return nil, err
	}
	n := defaultTop
	if text := query.Get("n"); text != "" {
		if n, err = strconv.Atoi(text); err != nil || n < 1 || n > mostTop {
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("n is %q: it must be a number from 1 to %d", text, mostTop))
		}
	}
	now := time.Now()
	storeNames := storesOfZones(running)
	if zone := query.Get("zone"); zone != "" {
		names, ok := storeNames[zone]
		if !ok {
			return nil, unknownZone(zone, storeNames)
		}
		return topOf(zone, names, n, now), nil
	}
	all := allTops{Zones: []zoneTop{}}
	for _, zone := range sortedKeys(storeNames) {
		all.Zones = append(all.Zones, topOf(zone, storeNames[zone], n, now))
	}
	return all, nil
}

// topOf is about a zone in all stores in which it counts.
func topOf(zone string, storeNames []string, n int, now time.Time) zoneTop {
	top := zoneTop{Zone: zone, Refused: []refusedClient{}}
	refused, since := refusedMost(zone, storeNames, n, now)
	top.Since, top.Refused = since.Seconds(), append(top.Refused, refused...)
	return top
}

// storesOfZones returns the names of the stores in which each zone counts.
func storesOfZones(running runningConfig) map[string][]string {
	storeNames := map[string][]string{}
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			for _, use := range l.Stores() {
				if !slices.Contains(storeNames[z.Name], use.name) {
					storeNames[z.Name] = append(storeNames[z.Name], use.name)
				}
			}
		}
	}
	return storeNames
}

func unknownZone(zone string, storeNames map[string][]string) error {
	return apiError(http.StatusNotFound, fmt.Errorf("zone %q is unknown; there is %s", zone, strings.Join(sortedKeys(storeNames), ", ")))
}

func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}

// queryOf returns the parameters of a request, of which there must be no others
// than those that are known, each at most once.
func queryOf(r *http.Request, known ...string) (url.Values, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("query: %w", err))
	}
	for name, values := range query {
		switch {
		case !slices.Contains(known, name):
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("parameter %q is unknown; there is %s", name, strings.Join(known, ", ")))
		case len(values) > 1:
			return nil, apiError(http.StatusBadRequest, errors.New("parameter "+name+" is given twice"))
		}
	}
	return query, nil
}
