package replay

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

const (
	// mostHours is for how many hours of a zone counts are kept: eleven years.
	mostHours = 100_000
	// topClients is how many clients of a zone are shown.
	topClients = 10
	hour       = int64(3600)
)

// tally sums up what a zone decides.
type tally struct {
	zone  *limiter.Zone
	store string
	// requests, refused and wouldRefuse count requests.
	requests, refused, wouldRefuse int64
	// clients are by the hash of their key, and keys has the keys of those that were, or would have been,
	// refused. unknown counts requests of clients beyond the bound.
	clients map[uint64]counts
	keys    map[uint64]string
	unknown int64
	hours   map[int64]counts
	// last is the hour of the last request, whose counts are not in hours yet.
	last       int64
	lastCounts counts
	// fellBack counts requests to which none of the key applies.
	fellBack int64
	// dropped counts requests of hours beyond the bound.
	dropped int64
}

// counts are requests, those of them that were refused, and those that would have been.
type counts struct{ requests, refused, wouldRefuse uint32 }

func (c *counts) add(other counts) {
	c.requests += other.requests
	c.refused += other.refused
	c.wouldRefuse += other.wouldRefuse
}

// isFine reports whether none was, or would have been, refused.
func (c *counts) isFine() bool { return c.refused == 0 && c.wouldRefuse == 0 }

func newTally(z *limiter.Zone, store string) *tally {
	return &tally{zone: z, store: store, clients: map[uint64]counts{}, keys: map[uint64]string{}, hours: map[int64]counts{}}
}

// add counts a decision about a request that arrived in a second since the epoch. At most so many
// clients are remembered.
func (t *tally) add(d *limiter.Decision, second int64, mostClients int) {
	one := counts{requests: 1}
	t.requests++
	switch d.Outcome {
	case telemetry.Refused:
		t.refused++
		one.refused = 1
	case telemetry.WouldRefuse:
		t.wouldRefuse++
		one.wouldRefuse = 1
	}
	if h := second - second%hour; h != t.last {
		t.flush()
		t.last = h
	}
	t.lastCounts.add(one)
	t.addClient(d.ClientKey, one, mostClients)
}

func (t *tally) addClient(clientKey string, one counts, most int) {
	hash := xxhash.Sum64String(clientKey)
	c, isKnown := t.clients[hash]
	if !isKnown && len(t.clients) >= most {
		t.unknown++
		return
	}
	if !one.isFine() && c.isFine() {
		// Keys are parts of the text of a log.
		t.keys[hash] = strings.Clone(clientKey)
	}
	c.add(one)
	t.clients[hash] = c
}

// flush adds the counts of the last hour. Arrivals that come late make an hour come again.
func (t *tally) flush() {
	if t.lastCounts == (counts{}) {
		return
	}
	all, isKnown := t.hours[t.last]
	if !isKnown && len(t.hours) >= mostHours {
		t.dropped += int64(t.lastCounts.requests)
	} else {
		all.add(t.lastCounts)
		t.hours[t.last] = all
	}
	t.lastCounts = counts{}
}

// sum returns what the zone has done, and notes what was dropped.
func (t *tally) sum() (z result.Zone, notes []string) {
	t.flush()
	z = result.Zone{
		Name: t.zone.Name, Store: t.store, Algorithm: t.zone.Algorithm.String(), Events: t.zone.Events.String(),
		Window: t.zone.Window.Seconds(), Calendar: t.zone.Calendar.String(),
		Requests: t.requests, Refused: t.refused, WouldRefuse: t.wouldRefuse,
		Clients: int64(len(t.clients)),
		Top:     t.top(), Hours: []result.Hour{},
	}
	for hash := range t.keys {
		if c := t.clients[hash]; c.refused > 0 {
			z.ClientsRefused++
		} else {
			z.ClientsWouldRefuse++
		}
	}
	for _, start := range slices.Sorted(maps.Keys(t.hours)) {
		c := t.hours[start]
		z.Hours = append(z.Hours, result.Hour{Start: start, Requests: int64(c.requests), Refused: int64(c.refused), WouldRefuse: int64(c.wouldRefuse)})
	}
	if t.unknown > 0 {
		notes = append(notes, fmt.Sprintf("zone %s: %d clients are remembered; %d requests of others count as requests only", z.Name, len(t.clients), t.unknown))
	}
	if t.fellBack > 0 {
		notes = append(notes, fmt.Sprintf("zone %s: %d of %d requests have nothing that its key names, so their clients are their addresses", z.Name, t.fellBack, t.requests))
	}
	if t.dropped > 0 {
		notes = append(notes, fmt.Sprintf("zone %s: %d hours are remembered; %d requests of others are in no hour", z.Name, len(t.hours), t.dropped))
	}
	return z, notes
}

// top returns the clients that were refused most, and then those that would have been.
func (t *tally) top() []result.Client {
	hashes := slices.SortedFunc(maps.Keys(t.keys), func(a, b uint64) int {
		return cmp.Or(cmp.Compare(t.clients[b].refused, t.clients[a].refused), cmp.Compare(t.clients[b].wouldRefuse, t.clients[a].wouldRefuse), cmp.Compare(t.keys[a], t.keys[b]))
	})
	top := []result.Client{}
	for _, hash := range hashes[:min(len(hashes), topClients)] {
		c := t.clients[hash]
		top = append(top, result.Client{Client: adminapi.Client(t.zone.ClientOf(t.keys[hash])), Requests: int64(c.requests), Refused: int64(c.refused), WouldRefuse: int64(c.wouldRefuse)})
	}
	return top
}
