package admin

import (
	"fmt"
	"slices"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// trafficLasts is how much time problems of traffic are about.
	trafficLasts = time.Minute
	// rateLasts is how much time the rate of what happens now is of.
	rateLasts = 10 * time.Second
	// fewRequests is from how many requests on a share of them says something; of one client's
	// share, that is manyRequests.
	fewRequests, manyRequests = 20, 1000
	// A problem is that at least this percentage of the requests have a proxy's address, or an
	// empty key, or the same one.
	proxyPercent, emptyPercent, oneKeyPercent = 25, 10, 90
	// idleFor is how long a zone may decide about no request after its config was loaded.
	idleFor = 10 * time.Minute
)

// traffic is what the requests of the zones were like in the last minute. The zero value has
// measured nothing.
type traffic struct {
	began time.Time
	zones map[string]*zoneTraffic
	// sorted are the zones in alphabetical order.
	sorted []*zoneTraffic
}

// zoneTraffic is that of one zone, in all stores.
type zoneTraffic struct {
	bound []zoneInStore
	// handlers are the limiters of all handlers with the zone.
	handlers []*limiter.Limiter
	// first is the count of requests when the config was loaded.
	first int64
	// looks are in the order of time; the first is the last one kept that is older than a minute.
	looks []look
}

// look is what one look at a zone has found: its counters, and a sample of the requests since
// the look before.
type look struct {
	at                         time.Time
	requests, allowed, evicted int64
	samples                    []limiter.Sample
}

// measure takes a look at each zone.
func (t *traffic) measure(running runningConfig, now time.Time) {
	isFirst := t.zones == nil
	if isFirst {
		t.begin(running, now)
	}
	for _, zone := range t.sorted {
		counts := zone.bound[0].Counts
		l := look{
			at: now, requests: counts.Requests.Value(), allowed: counts.Decisions[telemetry.ErrorAllowed].Value(),
			evicted: counts.Evicted.Value(),
		}
		for _, bound := range zone.bound {
			if s := bound.TakeSample(bound.store, now); s.Requests > 0 {
				l.samples = append(l.samples, s)
			}
		}
		if isFirst {
			// What came before is none of this config's.
			l.samples, zone.first = nil, l.requests
		}
		zone.add(l)
	}
}

// begin notes the zones, which stay the same while the config runs.
func (t *traffic) begin(running runningConfig, now time.Time) {
	t.began, t.zones = now, map[string]*zoneTraffic{}
	for name, bound := range zonesInStores(running) {
		t.zones[name] = &zoneTraffic{bound: bound}
	}
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			zone := t.zones[z.Name]
			zone.handlers = append(zone.handlers, l)
		}
	}
	for _, name := range sortedKeys(t.zones) {
		t.sorted = append(t.sorted, t.zones[name])
	}
}

// add adds a look. Of looks without a request in between, the first and the last are kept.
func (z *zoneTraffic) add(l look) {
	if n := len(z.looks); n > 1 && z.looks[n-2].isSame(&z.looks[n-1]) && z.looks[n-1].isSame(&l) {
		z.looks[n-1].at = l.at
	} else {
		z.looks = append(z.looks, l)
	}
	for len(z.looks) > 1 && l.at.Sub(z.looks[1].at) >= trafficLasts {
		z.looks = z.looks[1:]
	}
}

// isSame reports whether no request has come between two looks, the second of which is l.
func (f *look) isSame(l *look) bool {
	return f.requests == l.requests && f.allowed == l.allowed && f.evicted == l.evicted && len(l.samples) == 0
}

// minute is what a zone's requests of the last minute were like. Forwarded, empty and ofOne are
// parts of sampled, overSocket is one of forwarded.
type minute struct {
	requests, allowed, evicted       int64
	sampled, forwarded, empty, ofOne int
	overSocket                       int
	// seconds is how long it has been measured.
	seconds                            float64
	decided, isProxied, isEmpty, isOne bool
}

// last returns the last minute up to now.
func (z *zoneTraffic) last(now time.Time) (m minute) {
	from, to := z.looks[0], z.looks[len(z.looks)-1]
	m.decided = to.requests > z.first
	if now.Sub(to.at) >= trafficLasts {
		return m
	}
	// Without requests before, the first look may be older.
	m.seconds = min(secondsOf(&from, &to), (trafficLasts + lookPeriod).Seconds())
	m.requests, m.allowed, m.evicted = to.requests-from.requests, to.allowed-from.allowed, to.evicted-from.evicted
	ofKey := map[uint64]int{}
	for _, l := range z.looks[1:] {
		for _, s := range l.samples {
			m.sampled, m.forwarded, m.empty = m.sampled+s.Requests, m.forwarded+s.Forwarded, m.empty+s.Empty
			m.overSocket += s.OverSocket
			// A key with nearly all requests has most of nearly every sample.
			ofKey[s.Key] += s.OfKey
			m.ofOne = max(m.ofOne, ofKey[s.Key])
		}
	}
	isShare := func(part, percent, least int) bool { return m.sampled >= least && part*100 >= m.sampled*percent }
	m.isProxied, m.isEmpty = isShare(m.forwarded, proxyPercent, fewRequests), isShare(m.empty, emptyPercent, fewRequests)
	m.isOne = isShare(m.ofOne, oneKeyPercent, manyRequests)
	return m
}

// secondsOf is the time between two looks that a rate is of.
func secondsOf(from, to *look) float64 { return max(to.at.Sub(from.at).Seconds(), 1) }

// uncheckedRate returns how many requests of a zone a second pass unchecked now: since the first did that passed
// in the last ten seconds.
func (t *traffic) uncheckedRate(zone string) (rate float64) {
	measured := t.zones[zone]
	if measured == nil {
		return 0
	}
	last := len(measured.looks) - 1
	to := &measured.looks[last]
	for i := last - 1; i >= 0 && to.at.Sub(measured.looks[i].at) <= rateLasts; i-- {
		if from := &measured.looks[i]; from.allowed < measured.looks[i+1].allowed {
			rate = float64(to.allowed-from.allowed) / secondsOf(from, to)
		}
	}
	return rate
}

// problems returns what is wrong with the requests of the zones.
func (t *traffic) problems(now time.Time) (all []problem) {
	for _, measured := range t.sorted {
		zone, m := &measured.bound[0], measured.last(now)
		name := zone.Name
		add := func(k kind, format string, args ...any) {
			all = append(all, problem{
				adminapi.Problem{Store: zone.store.Name, Zone: name, Text: "zone " + name + ": " + fmt.Sprintf(format, args...)},
				subject{kind: k, store: zone.store.Name, zone: name},
			})
		}
		percent := func(part int) int { return part * 100 / m.sampled }
		if m.allowed > 0 {
			add(adminapi.ProblemUnchecked, "%d of %d requests in the last minute passed unchecked (now %.1f a second), because the store cannot answer and on_error lets them: restore the store; with on_error local this Caddy would count them meanwhile",
				m.allowed, m.requests, t.uncheckedRate(name))
		}
		if m.isProxied {
			add(adminapi.ProblemProxyAddress, "%d %% of the requests come through a proxy that Caddy does not trust, so its clients share one bucket: %s", percent(m.forwarded), proxyRemedy(m))
		} else if m.isOne {
			add(adminapi.ProblemOneKey, "one key has %d %% of the requests, so the key may be the same for all clients, such as a proxy's address: let it have what tells clients apart; if all should share one limit, write key static", percent(m.ofOne))
		}
		if m.isEmpty {
			add(adminapi.ProblemEmptyKey, "the key is empty in %d %% of the requests (about %.1f a second), which are counted by the client's address instead: see to it that clients send what key asks for, or end key with {client_ip}",
				percent(m.empty), float64(m.requests)*float64(m.empty)/float64(m.sampled)/m.seconds)
		}
		if m.evicted > 0 {
			add(adminapi.ProblemEvicted, "%d buckets that counted were forgotten in the last minute, so their clients begin anew: %s", m.evicted, evictionRemedy(zone.store))
		}
		if !m.decided && now.Sub(t.began) >= idleFor && slices.ContainsFunc(measured.handlers, (*limiter.Limiter).IsInUse) && !isUnlimited(zone.rule()) {
			add(adminapi.ProblemIdleZone, "it has decided about no request since the config was loaded, although its handler gets requests: see to it that its matcher fits some, that events is not unlimited for all, and that no zone before refuses them")
		}
	}
	return all
}

// proxyRemedy says how Caddy comes to trust the proxies of a minute.
func proxyRemedy(m minute) string {
	switch m.overSocket {
	case 0:
		return "add trusted_proxies static with the proxy's address to the global option servers, and let the key have {client_ip}"
	case m.forwarded:
		return "add trusted_proxies_unix to the global option servers, because the proxy uses a Unix socket, and let the key have {client_ip}"
	}
	return "add trusted_proxies static with the proxy's address, and trusted_proxies_unix for the Unix socket, to the global option servers, and let the key have {client_ip}"
}

// evictionRemedy says what keeps a store, or the local counts beside it, from forgetting buckets.
func evictionRemedy(handle *stores.Handle) string {
	if open := handle.EnterOpen(); open != nil {
		defer handle.Leave()
		if open.IsRemote {
			return "the local counts are full while the store is away: restore it, or set max_new_buckets in it"
		}
	}
	return "raise max_buckets, or set max_new_buckets"
}

// isUnlimited reports whether operators have lifted the limit.
func isUnlimited(rule *store.Override) bool { return rule != nil && rule.Events == store.Unlimited }
