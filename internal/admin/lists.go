package admin

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	defaultListed = 20
	mostListed    = 100
)

// listed is what a list of clients is about: up to n clients of each zone.
type listed struct {
	zones map[string][]zoneInStore
	// zone is the only one of zones, or empty if the list is of all.
	zone string
	n    int
}

// readListed reads the request for a list of clients.
func readListed(running runningConfig, r *http.Request) (*listed, error) {
	query, err := queryOf(r, "zone", "n")
	if err != nil {
		return nil, err
	}
	l := &listed{zones: zonesInStores(running), zone: query.Get("zone"), n: defaultListed}
	if text := query.Get("n"); text != "" {
		if l.n, err = strconv.Atoi(text); err != nil || l.n < 1 || l.n > mostListed {
			return nil, apiErrorf(http.StatusBadRequest, "n is %q: it must be a number from 1 to %d", text, mostListed)
		}
	}
	if l.zone != "" {
		zone, ok := l.zones[l.zone]
		if !ok {
			return nil, unknownZone(l.zone, l.zones)
		}
		l.zones = map[string][]zoneInStore{l.zone: zone}
	}
	return l, nil
}

// top answers GET /rate_limit/top with the clients that were refused most in the
// last minutes.
func top(running runningConfig, r *http.Request) (any, error) {
	list, err := readListed(running, r)
	if err != nil {
		return nil, err
	}
	all := adminapi.Tops{Zones: []adminapi.Top{}}
	for _, name := range sortedKeys(list.zones) {
		all.Zones = append(all.Zones, topOf(name, list.zones[name], list.n, time.Now()))
	}
	if list.zone != "" {
		return all.Zones[0], nil
	}
	return all, nil
}

// topOf returns the top of a zone in all stores in which it counts.
func topOf(name string, zone []zoneInStore, n int, now time.Time) adminapi.Top {
	refused, since := limiter.RefusedMost(name, storeNames(zone), n, now)
	top := adminapi.Top{Zone: name, Since: since.Seconds(), Refused: make([]adminapi.RefusedClient, len(refused))}
	for i, c := range refused {
		top.Refused[i] = adminapi.RefusedClient{Client: clientOf(zone, c.Store, c.ClientKey), Store: c.Store, Count: c.Count, LastRefused: c.LastRefused}
	}
	return top
}

// nearPercent is how much of a limit is most of it, for zones without warn.
const nearPercent = 80

// near answers GET /rate_limit/near with the clients that have used most of their limit,
// and not all of it. It looks at the buckets of which this process knows something, which
// is no call, and needs nothing on the way of requests.
func near(running runningConfig, r *http.Request) (any, error) {
	list, err := readListed(running, r)
	if err != nil {
		return nil, err
	}
	all := adminapi.Nears{Zones: make([]adminapi.Near, 0, len(list.zones))}
	scans := map[*stores.Handle]*scan{}
	for _, name := range sortedKeys(list.zones) {
		zone := list.zones[name]
		all.Zones = append(all.Zones, adminapi.Near{Zone: name, Percent: 100, Clients: []adminapi.NearClient{}})
		into := &all.Zones[len(all.Zones)-1]
		for _, bound := range zone {
			percent := cmp.Or(bound.Warn, nearPercent)
			into.Percent = min(into.Percent, percent)
			s := scans[bound.store]
			if s == nil {
				s = new(scan)
				scans[bound.store] = s
			}
			s.zones = append(s.zones, bound)
			s.found = append(s.found, &nearest{into: into, percent: percent, n: list.n})
		}
	}
	for handle, s := range scans {
		s.run(handle)
	}
	for i := range all.Zones {
		z := &all.Zones[i]
		slices.SortFunc(z.Clients, func(a, b adminapi.NearClient) int {
			return cmp.Or(cmp.Compare(shareOf(b.Used, b.Limit), shareOf(a.Used, a.Limit)), cmp.Compare(a.ClientKey, b.ClientKey),
				cmp.Compare(a.Store, b.Store), slices.Compare(a.Values, b.Values))
		})
		z.Clients = z.Clients[:min(list.n, len(z.Clients))]
		slices.Sort(z.Unlisted)
	}
	if list.zone != "" {
		return all.Zones[0], nil
	}
	return all, nil
}

// scan looks at the buckets of some zones in one store.
type scan struct {
	zones []zoneInStore
	found []*nearest
}

func (s *scan) run(handle *stores.Handle) {
	open := handle.EnterOpen()
	if open == nil {
		return
	}
	defer handle.Leave()
	if open.Operable == nil {
		for _, found := range s.found {
			found.into.Unlisted = append(found.into.Unlisted, handle.Name)
		}
		return
	}
	reqs, about := aboutAll(s.zones)
	open.Walk(reqs, about, func(i int, clientKey string, st *store.State) {
		s.found[i].visit(clientKey, st)
	})
	for i, found := range s.found {
		for _, b := range found.buckets {
			found.into.Clients = append(found.into.Clients, adminapi.NearClient{
				Client: adminapi.Client(s.zones[i].ClientOf(b.clientKey)), Store: handle.Name, Limit: b.limit, Used: b.used, Reset: limiter.EpochSeconds(b.reset),
			})
		}
	}
}

// aboutAll returns what a walk needs to visit the buckets of some zones in one store, with the limits
// that hold now.
func aboutAll(zones []zoneInStore) (reqs []store.Request, about func(i int, r *store.Request) bool) {
	limits := make([]func(r *store.Request) bool, len(zones))
	for i, z := range zones {
		r := z.About("")
		limits[i] = z.limitNow()
		// The first look at overrides is not waited for with a lock held.
		limits[i](&r)
		reqs = append(reqs, z.About(""))
	}
	return reqs, func(i int, r *store.Request) bool { return limits[i](r) }
}

// nearest are the n buckets of a zone in one store that are nearest to their limit, the
// nearest first.
type nearest struct {
	into    *adminapi.Near
	percent int64
	n       int
	buckets []nearBucket
}

type nearBucket struct {
	clientKey          string
	share              float64
	limit, used, reset int64
}

// visit adds a bucket that is near its limit. It is called with a lock of the store held.
func (c *nearest) visit(clientKey string, st *store.State) {
	switch {
	case st.Limit == 0 || st.Used < limiter.Share(st.Limit, c.percent):
		return
	case st.Used >= st.Limit:
		c.into.Full++
		return
	}
	share := shareOf(st.Used, st.Limit)
	at, _ := slices.BinarySearchFunc(c.buckets, share, func(b nearBucket, share float64) int {
		return cmp.Compare(share, b.share)
	})
	if at == c.n {
		return
	}
	// A walk may visit a bucket twice.
	if slices.ContainsFunc(c.buckets, func(b nearBucket) bool { return b.clientKey == clientKey }) {
		return
	}
	c.buckets = slices.Insert(c.buckets, at, nearBucket{clientKey, share, st.Limit, st.Used, st.Reset})
	c.buckets = c.buckets[:min(c.n, len(c.buckets))]
}

func shareOf(used, limit int64) float64 { return float64(used) / float64(limit) }
