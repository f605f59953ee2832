//go:build check

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// The client keys of buckets that clients share: if they are new, and while the store does not
// say whether they are.
const (
	overflowBucket = "*overflow"
	unknownBucket  = "*unknown"
)

// pairBucket is a bucket of a zone: a client's, a group's, or the shared one.
type pairBucket struct{ zone, name string }

func (c *pairClient) bucket(zone string) pairBucket {
	if zone == zoneGroup {
		return pairBucket{zone, c.group}
	}
	return pairBucket{zone, c.key}
}

// heldBucket is what a store has of a bucket, and what this process has counted
// while the store did not answer.
type heldBucket struct {
	used, local int64
	penalized   bool
}

// pairBooks are all buckets, by store.
type pairBooks map[string]map[pairBucket]heldBucket

// clients returns all clients so far.
func (p *pairRun) clients() []pairClient { return append(slices.Clip(regulars), p.strangers...) }

// read gets all buckets from the admin API. It fails while a request is in flight, a charge is
// pending, or part of a batch is reserved.
func (p *pairRun) read() (pairBooks, error) {
	p.t.Helper()
	status, _ := adminStatus(p.caddy)
	books := pairBooks{}
	for _, store := range status.Stores {
		if l := store.Ledger; l == nil || l.InFlight != 0 || l.Unsent != 0 {
			return nil, fmt.Errorf("the ledger of store %s is %+v", store.Name, l)
		}
		books[store.Name] = map[pairBucket]heldBucket{}
		for _, zone := range p.site().zonesOf() {
			for _, c := range p.clients() {
				b := c.bucket(zone)
				if _, ok := books[store.Name][b]; !ok {
					if err := p.readBucket(books, store.Name, b, "key="+url.QueryEscape(b.name)); err != nil {
						return nil, err
					}
				}
			}
			for _, shared := range []string{overflowBucket, unknownBucket} {
				if err := p.readBucket(books, store.Name, pairBucket{zone, shared}, "client_key="+url.QueryEscape(shared)); err != nil {
					return nil, err
				}
			}
		}
	}
	return books, nil
}

// primary returns the primary's bucket, and whether it has one.
func (s *bucketServers) primary() (b heldBucket, found bool, err error) {
	for _, server := range s.Servers {
		if server.Role != "primary" {
			continue
		}
		if server.Error != "" {
			return b, false, errors.New(server.Error)
		}
		if st := server.State; st != nil {
			return heldBucket{used: st.Used, penalized: st.Penalty != 0}, true, nil
		}
	}
	return b, false, nil
}

func (p *pairRun) readBucket(books pairBooks, store string, b pairBucket, query string) error {
	p.t.Helper()
	a := bucketsOf(p.caddy, http.MethodGet, b.zone+"?store="+store+"&"+query)
	if len(a.Buckets) != 1 {
		return fmt.Errorf("client %.40q has %d buckets in zone %s", b.name, len(a.Buckets), b.zone)
	}
	found := &a.Buckets[0]
	if l := found.Ledger; l != nil && (l.InFlight != 0 || l.Unsent != 0 || l.Reserved != 0) {
		return fmt.Errorf("of client %.40q in zone %s the ledger has %+v", b.name, b.zone, *l)
	}
	held, _, err := found.primary()
	if err == nil && found.Previous != nil {
		// Both owners count what is served while both are asked, and the former one what was before.
		var former heldBucket
		former, _, err = found.Previous.primary()
		held.used, held.penalized = max(held.used, former.used), held.penalized || former.penalized
	}
	if found.Local != nil {
		held.local = found.Local.Used
	}
	books[store][b] = held
	return err
}

// doubt is what may or may not have been counted, by the metrics.
type doubt struct {
	// missing is how many of the served requests may lack a count, extra how many may count on top.
	missing, extra int64
	// lost is what should have counted and did not.
	lost int64
	text string
}

// doubts reads the metrics. Only a server that was down may cause doubt.
func (p *pairRun) doubts() doubt {
	p.t.Helper()
	_, text := p.caddy.AdminCall(http.MethodGet, "/metrics", "", "")
	m, err := caddyproc.ParseMetrics(text)
	must(p.t, "metrics", err)
	undelivered := func(labels ...string) int64 {
		return int64(m.Sum("caddy_rate_limit_undelivered_total", labels...))
	}
	charges := undelivered(`operation="charge"`, `outcome="uncertain"`)
	refunds := undelivered(`operation="refund"`)
	takes := int64(0)
	if p.bounds().takes {
		// An open breaker sends nothing, and a server that dies loses no more takes than were in
		// flight.
		takes = int64(m.Sum("caddy_rate_limit_store_errors_total") - m.Sum("caddy_rate_limit_store_errors_total", `kind="breaker"`))
		takes = min(takes, int64(pairWorkers*len(p.site().zonesOf())))
	}
	return doubt{
		missing: charges + takes, extra: (takes + refunds) * p.bounds().tokens,
		lost: undelivered(`operation="charge"`) - charges,
		text: fmt.Sprintf("uncertain: %d charges, %d refunds, %d takes", charges, refunds, takes),
	}
}

// settle waits until the counts equal what was served, except for what is in doubt, and returns a
// summary.
func (p *pairRun) settle() (found string) {
	p.t.Helper()
	p.await("what was served is what is counted", func() error {
		books, err := p.read()
		if err != nil {
			return err
		}
		p.books = books
		d := p.doubts()
		if !p.bounds().faults && d.missing+d.extra != 0 {
			p.t.Fatalf("no server was down, but %s", d.text)
		}
		if d.lost != 0 {
			p.t.Fatalf("%d charges were lost or expired, by the metric", d.lost)
		}
		served, total := p.served()
		counted := p.counted()
		var missing, extra int64
		var texts []string
		for _, purse := range slices.SortedFunc(maps.Keys(served), func(a, b pairBucket) int { return strings.Compare(a.zone+a.name, b.zone+b.name) }) {
			n, either := served[purse].certain, served[purse].perhaps
			short, long := max(n-counted[purse], 0), max(counted[purse]-n-either, 0)
			if short+long > 0 {
				texts = append(texts, fmt.Sprintf("%s of %.30q: %d (or %d more) served, %d counted", purse.zone, purse.name, n, either, counted[purse]))
			}
			missing, extra = missing+short, extra+long
		}
		found = fmt.Sprintf("%s; %d missing, %d too many; %s; %d loads, %d hang-ups", total, missing, extra, d.text, p.loads.Load(), p.hangUps.Load())
		if missing > d.missing || extra > d.extra {
			return fmt.Errorf("%s\n%s", found, strings.Join(texts, "\n"))
		}
		return nil
	})
	return found
}

// purse returns the key under which counts are compared: a bucket, or all clients together if they
// may share one.
func (p *pairRun) purse(b pairBucket) pairBucket {
	if p.bounds().shared {
		b.name = "all clients"
	}
	return b
}

type servedCount struct{ certain, perhaps int64 }

// served returns what was served from Redis, and what may have been.
func (p *pairRun) served() (by map[pairBucket]servedCount, text string) {
	by = map[pairBucket]servedCount{}
	statuses := map[int]int{}
	for i := range p.answers {
		a := &p.answers[i]
		statuses[a.status]++
		for _, zone := range p.site().zonesOf() {
			purse := p.purse(a.bucket(zone))
			n := by[purse]
			switch {
			case !a.served():
			case a.life%2 == 0:
				n.certain++
			case p.bounds().either:
				n.perhaps++
			}
			by[purse] = n
		}
	}
	return by, fmt.Sprint(statuses)
}

// counted returns the sums over all stores.
func (p *pairRun) counted() map[pairBucket]int64 {
	sums := map[pairBucket]int64{}
	for _, buckets := range p.books {
		for b, held := range buckets {
			sums[p.purse(b)] += held.used
		}
	}
	return sums
}

// capacity returns what the client may use of its bucket in a zone.
func (p *pairRun) capacity(c *pairClient, zone string) int64 {
	limit := map[string]int64{zoneAPI: pairLimit, zoneGroup: groupLimit, zoneInner: innerLimit}[zone]
	if c.key == valued.key && zone == zoneAPI {
		limit = valuedLimit
	}
	if p.has("reserve") && !c.staff && (zone == zoneAPI || p.alike) {
		limit -= limit * reservePercent / 100
	}
	if c.key == favoured.key && zone == zoneAPI {
		limit += grantedEvents
	}
	return limit
}

// complain reports the first few failures.
func (p *pairRun) complain(format string, args ...any) {
	p.t.Helper()
	const most = 10
	if p.complaints++; p.complaints <= most {
		p.t.Errorf(format, args...)
	}
}

// check verifies the invariants on all answers and counts.
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
			if bucket.name == unknownBucket {
				// It decides nothing, so nothing limits it.
				continue
			}
			if bucket.name == overflowBucket {
				most = map[string]int64{zoneAPI: pairLimit, zoneGroup: groupLimit, zoneInner: innerLimit}[bucket.zone]
				unchecked[bucket] = slices.Max(append(slices.Collect(maps.Values(unchecked)), 0))
			}
			if held.local > most {
				p.complain("%s of %.30q: %d counted while store %s was down, at most %d may be", bucket.zone, bucket.name, held.local, store, most)
			}
			if most = most*b.limits + unchecked[bucket]; held.used > most {
				p.complain("%s of %.30q in store %s: %d counted, at most %d may be", bucket.zone, bucket.name, store, held.used, most)
			}
		}
	}
	if p.has("max_new_buckets") {
		p.checkNewBuckets()
	}
	if p.has("limits differ") {
		p.checkLowLimit()
	}
	if p.has("cost of the response") {
		p.checkCosts()
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

// checkNewBuckets verifies that few made-up clients have a bucket of their own.
func (p *pairRun) checkNewBuckets() {
	p.t.Helper()
	for store, buckets := range p.books {
		opened := map[string]int{}
		for _, c := range p.strangers {
			for _, zone := range p.site().zonesOf() {
				if b := c.bucket(zone); b.name == c.key && buckets[b].used > 0 {
					opened[zone]++
				}
			}
		}
		for zone, n := range opened {
			if float64(n) > p.newBuckets {
				p.complain("zone %s of store %s has opened %d buckets for made-up clients, at most %.1f may be", zone, store, n, p.newBuckets)
			}
		}
	}
}

// probe sends one request of each regular client, one after the other: those that fit are served,
// the others refused. No earlier request is in flight.
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

// countsInRedis reports whether the default store is in Redis.
func (p *pairRun) countsInRedis() bool { return p.life%2 == 0 }

// spareBytes allows for stopped timers, and for blocks shared with small live objects. It is less
// than a few buckets take.
const spareBytes = 4 << 10

// unload removes the limiter from the config and requires that its goroutines end and its memory is
// freed.
func (p *pairRun) unload() {
	p.t.Helper()
	status, text := p.caddy.Load(unlimitedSite)
	must(p.t, "unload: "+text, want("status", status, http.StatusOK))
	// A reverse proxy's connection keeps the config that made it.
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
		p.t.Error("the log has a panic")
	}
}

// exactHeap, set in the environment of a test's Caddy, makes it profile every allocation.
const exactHeap = "SHARDLIMIT_TEST_EXACT_HEAP"

func init() {
	if os.Getenv(exactHeap) != "" {
		runtime.MemProfileRate = 1
	}
	caddy.RegisterModule(holdingsAPI{})
}

// holdings are the live goroutines and allocations of this module, and of the libraries that it
// alone uses.
type holdings struct {
	Goroutines int
	// Bytes is what the code of stores has allocated.
	Bytes int64
	// Stacks has the stacks of both.
	Stacks []string
}

// holdingsAPI serves them at /test/holdings of a test's Caddy.
type holdingsAPI struct{}

// CaddyModule implements [caddy.Module].
func (holdingsAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.test_holdings", New: func() caddy.Module { return holdingsAPI{} }}
}

// Routes implements [caddy.AdminRouter].
func (holdingsAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: "/test/holdings", Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		h := holdings{Stacks: caddytest.Goroutines(module, "redis/go-redis")}
		h.Goroutines = len(h.Stacks)
		h.countBytes()
		return json.NewEncoder(w).Encode(h)
	})}}
}

const module = "github.com/shardlimit/caddy-shardlimit"

func (h *holdings) countBytes() {
	// Pooled memory survives the first collection.
	runtime.GC()
	runtime.GC()
	records := make([]runtime.MemProfileRecord, 1000)
	for n, ok := runtime.MemProfile(records, false); !ok; n, ok = runtime.MemProfile(records, false) {
		records = make([]runtime.MemProfileRecord, n+1000)
	}
	for i := range records {
		r := &records[i]
		if r.InUseBytes() == 0 {
			continue
		}
		// Allocations of libraries, such as series of metrics, do not count.
		var stack []string
		isKept := false
		for frames := runtime.CallersFrames(r.Stack()); ; {
			frame, more := frames.Next()
			// The runtime keeps the memory of waiters and timers for reuse.
			isKept = isKept || frame.Function == "runtime.acquireSudog" || strings.HasPrefix(frame.Function, "runtime.(*timers).")
			if len(stack) > 0 || !strings.HasPrefix(frame.Function, "runtime.") && !strings.HasPrefix(frame.Function, "internal/runtime/") {
				stack = append(stack, frame.Function)
			}
			if !more {
				break
			}
		}
		if len(stack) > 0 && !isKept && strings.HasPrefix(stack[0], module+"/store/") {
			h.Bytes += r.InUseBytes()
			h.Stacks = append(h.Stacks, fmt.Sprintf("%d bytes: %s", r.InUseBytes(), strings.Join(stack, " < ")))
		}
	}
}

// holdingsOf returns those of a test's Caddy.
func holdingsOf(c *caddytest.Caddy) (h holdings) {
	c.T.Helper()
	c.AdminJSON(http.MethodGet, "/test/holdings", "", &h)
	return h
}

var _ caddy.AdminRouter = holdingsAPI{}
