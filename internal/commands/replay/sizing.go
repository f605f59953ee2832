package replay

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// sizing finds limits. Beside each zone there are trials, which are zones too: of other windows, with
// a limit that refuses nobody. A client that is never refused spends as if there was no limit, so the
// most that it needs at once there is the least limit that never refuses it. That holds unless the
// limit decides how fast events come back (gcra): there, trials have limits, and count whom they refuse.
type sizing struct {
	limiters map[*limiter.Limiter]*limiter.Limiter
	// trials are by their zone, and lists by the zone that they are for.
	trials  map[*limiter.Zone]*trial
	lists   map[tallyID][]*trial
	handle  *stores.Handle
	evicted int64
}

// trial is a zone that is tried.
type trial struct {
	zone  *limiter.Zone
	isOwn bool
	// factor is its limit as a multiple of the zone's; 0 if it has none.
	factor float64
	// needs is the most that each client needed at once or, with a factor, 1 for clients that were
	// refused, by the hash of the key.
	needs map[uint64]int64
	// skip is which hashes are left out, so that a sample of the clients is remembered.
	skip uint64
}

// windows are those that are suggested beside the zone's own.
var windows = []time.Duration{time.Second, 10 * time.Second, time.Minute, 10 * time.Minute, time.Hour, 24 * time.Hour}

const (
	// mostSized is for how many clients of a trial needs are remembered.
	mostSized = 1 << 17
	// longestLog is the longest other window of a sliding log, which keeps all events of it, and
	// mostLogged how many of a client.
	longestLog = time.Hour
	mostLogged = 10_000
	// factors is how many limits of gcra are tried on either side of the zone's, and factorStep how far
	// apart they are.
	factors    = 8
	factorStep = math.Sqrt2
)

func (r *run) newSizing(ctx caddy.Context) (*sizing, error) {
	s := &sizing{limiters: map[*limiter.Limiter]*limiter.Limiter{}, trials: map[*limiter.Zone]*trial{}, lists: map[tallyID][]*trial{}}
	var err error
	s.handle, err = stores.Open(ctx, "suggest", &module{
		buckets: memory.NewBuckets(),
		options: memory.Options{MaxBuckets: r.MostBuckets, Now: r.Now, OnEvict: func(string) { s.evicted++ }},
	})
	if err != nil {
		return nil, err
	}
	for of, replayed := range r.limiters {
		config := limiter.Config{
			Store: s.handle, Headers: limiter.HeadersNone, LogRefusals: limiter.LogNone, Logger: zap.NewNop(),
			Now: r.Now, AfterFunc: r.AfterFunc,
		}
		for _, z := range replayed.Zones {
			config.Zones = append(config.Zones, s.trialsOf(z, tallyID{replayed.Store.Name, z.Name})...)
		}
		s.limiters[of] = limiter.New(config)
	}
	return s, nil
}

func (s *sizing) close() { s.handle.Unload() }

// trialsOf returns the zones that are tried for one.
func (s *sizing) trialsOf(z *limiter.Zone, id tallyID) (zones []*limiter.Zone) {
	// Handlers with the same zone count together.
	shared := s.lists[id]
	add := func(t *trial) {
		if n := len(zones); n < len(shared) {
			t.needs = shared[n].needs
			s.trials[t.zone] = shared[n]
		} else {
			t.needs = map[uint64]int64{}
			s.trials[t.zone], s.lists[id] = t, append(s.lists[id], t)
		}
		t.zone.Name = fmt.Sprintf("%s %s %d", id.store, z.Name, len(zones))
		zones = append(zones, t.zone)
	}
	traits := algorithm.Of(z.Algorithm)
	if traits.Drains() {
		for i := -factors; i <= factors && !isDynamic(z); i++ {
			factor := math.Pow(factorStep, float64(i))
			t := trialOf(z)
			t.Events.Number, t.Burst.Number = scaled(z.Events.Number, factor), scaled(z.Burst.Number, factor)
			t.Enforce = new(float64)
			add(&trial{zone: t, isOwn: true, factor: factor})
		}
		return zones
	}
	own := trialOf(z)
	own.Calendar = z.Calendar
	add(&trial{zone: own, isOwn: true})
	for _, window := range windows {
		if traits.Lease || window == z.Window && z.Calendar.Unit == "" || isLog(traits) && window > longestLog {
			continue
		}
		other := trialOf(z)
		other.Window = window
		add(&trial{zone: other})
	}
	return zones
}

// isDynamic reports whether the limit depends on the request.
func isDynamic(z *limiter.Zone) bool { return z.Events.Text != "" || z.Burst.Text != "" }

// scaled returns a multiple of a limit; 0 stays 0.
func scaled(n int64, factor float64) int64 {
	if n == 0 {
		return 0
	}
	return max(int64(math.Round(float64(n)*factor)), 1)
}

// trialOf returns a zone that counts the same requests at the same cost, without a limit.
func trialOf(z *limiter.Zone) *limiter.Zone {
	t := &limiter.Zone{
		Matchers: z.Matchers, Key: z.Key, IPv4Prefix: z.IPv4Prefix, IPv6Prefix: z.IPv6Prefix,
		Algorithm: z.Algorithm, Window: z.Window, Align: z.Align, Cost: z.Cost, ChargeBefore: z.ChargeBefore,
		Free: z.Free, Forgives: z.Forgives, SettleAtEnd: z.SettleAtEnd, KnowsGRPC: z.KnowsGRPC,
	}
	traits := algorithm.Of(z.Algorithm)
	t.Events.Number = traits.MostEvents
	if isLog(traits) {
		t.Events.Number = mostLogged
	}
	return t
}

// isLog reports whether every event of a window is kept, which costs memory.
func isLog(t *algorithm.Traits) bool { return t.NeedsID && !t.Lease }

// leaveOut adds the trials for a zone to those that are left out.
func (s *sizing) leaveOut(z *zone, leftOut map[*limiter.Zone]bool) {
	of := s.lists[tallyID{z.stores[0], z.Name}]
	for zone, t := range s.trials {
		if slices.Contains(of, t) {
			leftOut[zone] = true
		}
	}
}

// count notes what a request needed.
func (s *sizing) count(d limiter.Decision) {
	t := s.trials[d.Zone]
	hash := xxhash.Sum64String(d.ClientKey)
	if hash&t.skip != 0 {
		return
	}
	need := d.Needed
	if t.factor > 0 {
		need = 0
		if d.Outcome == telemetry.WouldRefuse {
			need = 1
		}
	}
	was, isKnown := t.needs[hash]
	if !isKnown || need > was {
		t.needs[hash] = need
	}
	for len(t.needs) > mostSized {
		t.halve()
	}
}

// halve forgets about half of the clients, by their hash, and takes no others like them.
func (t *trial) halve() {
	t.skip = t.skip<<1 | 1
	for hash := range t.needs {
		if hash&t.skip != 0 {
			delete(t.needs, hash)
		}
	}
}

// suggest returns the limits of a zone that refuse at most a share of the clients.
func (s *sizing) suggest(id tallyID, share float64) (suggestions []result.Suggestion, notes []string) {
	var tried []*trial
	for _, t := range s.lists[id] {
		if t.factor > 0 {
			tried = append(tried, t)
		} else {
			suggestions = append(suggestions, t.suggest(share))
		}
	}
	if len(tried) > 0 {
		found, note := suggestTried(tried, share)
		suggestions = append(suggestions, found...)
		if note != "" {
			notes = append(notes, "zone "+id.zone+": "+note)
		}
	}
	return suggestions, notes
}

// suggestion returns one without a limit.
func (t *trial) suggestion() result.Suggestion {
	how := "exact"
	if sample := t.skip + 1; sample > 1 {
		how = fmt.Sprintf("for a sample of 1 in %d clients, exact", sample)
	}
	return result.Suggestion{
		Window: t.zone.Window.Seconds(), Calendar: t.zone.Calendar.String(), Clients: int64(len(t.needs)), How: how, IsOwn: t.isOwn,
	}
}

// mostOf returns the most of n that are at most a share of them. It compares quotients, which are rounded as
// the share was: a product such as 0.29*100 may be less than it is.
func mostOf(share float64, n int) int {
	return sort.Search(n, func(k int) bool { return float64(k+1)/float64(n) > share })
}

func (t *trial) suggest(share float64) result.Suggestion {
	needs := make([]int64, 0, len(t.needs))
	for _, n := range t.needs {
		needs = append(needs, n)
	}
	slices.Sort(needs)
	slices.Reverse(needs)
	a := t.suggestion()
	if len(needs) == 0 {
		return a
	}
	a.Most = needs[0]
	a.Events = max(needs[min(mostOf(share, len(needs)), len(needs)-1)], 1)
	for _, n := range needs {
		if n > a.Events {
			a.Refused++
		}
	}
	if a.Events > t.zone.Events.Number {
		a.How = fmt.Sprintf("more than %d", t.zone.Events.Number)
	}
	return a
}

// suggestTried returns the least of limits that were tried, if one is enough. They rise.
func suggestTried(tried []*trial, share float64) ([]result.Suggestion, string) {
	for _, t := range tried {
		a := t.suggestion()
		a.Events = t.zone.Events.Number
		for _, n := range t.needs {
			a.Refused += n
		}
		if a.Refused <= int64(mostOf(share, len(t.needs))) {
			a.How = strings.Replace(a.How, "exact", "the least", 1) + fmt.Sprintf(" of %d limits that were tried, from %d to %d", len(tried), tried[0].zone.Events.Number, tried[len(tried)-1].zone.Events.Number)
			if t.zone.Burst.Number > 0 {
				a.How += fmt.Sprintf(", with burst %d", t.zone.Burst.Number)
			}
			return []result.Suggestion{a}, ""
		}
	}
	return nil, fmt.Sprintf("of the limits that were tried, up to %d, none is enough", tried[len(tried)-1].zone.Events.Number)
}
