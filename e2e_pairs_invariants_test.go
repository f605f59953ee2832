package shardlimit_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
)

// capacity is what the client may use of its bucket in a zone.
func (p *pairRun) capacity(c *pairClient, zone string) int64 {
	limit := map[string]int64{zoneAPI: pairLimit, zoneGroup: groupLimit, zoneInner: innerLimit}[zone]
	if p.has("reserve") && !c.staff && (zone == zoneAPI || p.alike) {
		limit -= limit * reservePercent / 100
	}
	return limit
}

// complain reports what is wrong, the first few times.
func (p *pairRun) complain(format string, args ...any) {
	p.t.Helper()
	const most = 10
	if p.complaints++; p.complaints <= most {
		p.t.Errorf(format, args...)
	}
}

// check requires of all answers, and of what is counted, what holds in every
// pair.
func (p *pairRun) check() {
	p.t.Helper()
	b := p.bounds()
	unchecked := map[pairBucket]int64{}
	type lifeBucket struct {
		pairBucket
		life int
	}
	inMemory := map[lifeBucket]int64{}
	capacity := map[pairBucket]int64{}
	for i := range p.answers {
		a := &p.answers[i]
		if a.err != nil {
			p.complain("client %.30q (healthy %v): status %d, %v, %v", a.key, a.healthy, a.status, a.err, a.header)
			continue
		}
		if a.status == http.StatusTooManyRequests && a.modest && !b.strangers {
			p.complain("modest client %.30q is refused (healthy %v): %v", a.key, a.healthy, a.header)
		}
		for _, zone := range p.site().zonesOf() {
			bucket := a.bucket(zone)
			capacity[bucket] = max(capacity[bucket], p.capacity(&a.pairClient, zone))
			switch outcome := a.outcome[zone]; {
			case a.status == http.StatusTooManyRequests:
				continue
			case outcome == "error_allowed" && !a.healthy:
				if a.served() {
					unchecked[bucket]++
				}
			case outcome != "allowed":
				p.complain("client %.30q got %d and zone %s says %q (healthy %v)", a.key, a.status, zone, outcome, a.healthy)
			}
			if a.served() && a.life%2 == 1 {
				inMemory[lifeBucket{bucket, a.life}]++
			}
		}
	}
	for store, buckets := range p.books {
		for bucket, held := range buckets {
			most := capacity[bucket]
			if bucket.name == overflowBucket {
				most = map[string]int64{zoneAPI: pairLimit, zoneGroup: groupLimit, zoneInner: innerLimit}[bucket.zone]
				unchecked[bucket] = slices.Max(append(slices.Collect(maps.Values(unchecked)), 0))
			}
			if held.local > most {
				p.complain("%s of %.30q: %d counted while store %s was away, at most %d may be", bucket.zone, bucket.name, held.local, store, most)
			}
			if most = most*b.limits + unchecked[bucket]; held.used > most {
				p.complain("%s of %.30q in store %s: %d counted, at most %d may be", bucket.zone, bucket.name, store, held.used, most)
			}
		}
	}
	for l, n := range inMemory {
		most := capacity[l.pairBucket]
		if b.either {
			most *= 2
		}
		if n > most {
			p.complain("%s of %.30q in memory: %d served, at most %d may be", l.zone, l.name, n, most)
		}
	}
	if p.complaints > 0 {
		p.t.Errorf("%d complaints in all", p.complaints)
	}
}

// probe asks once for each regular client, one after the other: who fits is
// served, who does not is refused. Nothing from before is in the way.
func (p *pairRun) probe() {
	p.t.Helper()
	zones := p.site().zonesOf()
	probed := map[pairBucket]int64{}
	for _, c := range regulars {
		// A bucket may be in any of the stores.
		fits, isFull := true, false
		for _, zone := range zones {
			full := 0
			for _, buckets := range p.books {
				held := buckets[c.bucket(zone)]
				if held.penalized || held.used+probed[c.bucket(zone)] >= p.capacity(&c, zone) {
					full++
				}
			}
			fits, isFull = fits && full == 0, isFull || full == len(p.books)
		}
		a := p.ask(pairRequest{pairClient: c})
		a.healthy = true
		p.answers = append(p.answers, a)
		if a.served() {
			for _, zone := range zones {
				probed[c.bucket(zone)]++
			}
		}
		if p.bounds().strangers {
			continue
		}
		if fits && a.status != http.StatusOK || isFull && a.status != http.StatusTooManyRequests {
			p.complain("at rest client %.30q gets %d, %v; it fits: %v", c.key, a.status, a.header, fits)
		}
	}
}

// spareBytes are less than a few buckets take: timers that were stopped, and what
// shares a block with something small that is in use.
const spareBytes = 4 << 10

// unload takes the limiter out of the config: its goroutines end and what it
// knew is forgotten.
func (p *pairRun) unload() {
	p.t.Helper()
	status, text := p.caddy.Load(unlimitedSite)
	must(p.t, "unload: "+text, want("status", status, http.StatusOK))
	// A connection of a reverse proxy keeps the config from which it was made.
	p.client.CloseIdleConnections()
	p.backend.CloseClientConnections()
	p.await("nothing of the limiter is left", func() error {
		h := holdingsOf(p.caddy)
		if h.Goroutines > 0 || h.Bytes > spareBytes {
			return fmt.Errorf("%d goroutines and %d bytes:\n%.20000s", h.Goroutines, h.Bytes, strings.Join(h.Stacks, "\n"))
		}
		return nil
	})
	if log := p.caddy.Logs.String(); strings.Contains(log, "panic") {
		p.t.Error("a panic")
	}
}
