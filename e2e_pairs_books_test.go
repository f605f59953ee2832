package shardlimit_test

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

// overflowBucket is the client key of the bucket that new clients share.
const overflowBucket = "*overflow"

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

// books are all buckets, by store.
type pairBooks map[string]map[pairBucket]heldBucket

// clients are all that have come.
func (p *pairRun) clients() []pairClient { return append(slices.Clip(regulars), p.strangers...) }

// read asks the admin API for all buckets. It fails while a request is in flight,
// or a charge or part of a batch is on its way.
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
			if err := p.readBucket(books, store.Name, pairBucket{zone, overflowBucket}, "client_key="+url.QueryEscape(overflowBucket)); err != nil {
				return nil, err
			}
		}
	}
	return books, nil
}

// bucketsOfPair is what GET /rate_limit/buckets answers.
type bucketsOfPair struct {
	Buckets []struct {
		serversOfPair
		Former *serversOfPair
		Local  *stateOfPair
		Ledger *struct {
			InFlight int64 `json:"in_flight"`
			Unsent   int64
			Reserved int64
		}
	}
}

type serversOfPair struct {
	Servers []struct {
		Role  string
		State *stateOfPair
		Error string
	}
}

type stateOfPair struct {
	Used    int64
	Penalty float64
}

// primary returns what the primary has, and whether it has anything.
func (s *serversOfPair) primary() (b heldBucket, found bool, err error) {
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
	var a bucketsOfPair
	p.caddy.AdminJSON(http.MethodGet, "/rate_limit/buckets/"+b.zone+"?store="+store+"&"+query, "", &a)
	if len(a.Buckets) != 1 {
		return fmt.Errorf("client %.40q has %d buckets in zone %s", b.name, len(a.Buckets), b.zone)
	}
	found := &a.Buckets[0]
	if l := found.Ledger; l != nil && (l.InFlight != 0 || l.Unsent != 0 || l.Reserved != 0) {
		return fmt.Errorf("of client %.40q in zone %s the ledger has %+v", b.name, b.zone, *l)
	}
	held, ok, err := found.primary()
	if err == nil && !ok && found.Former != nil {
		// It is brought when the client comes again.
		held, _, err = found.Former.primary()
	}
	if found.Local != nil {
		held.local = found.Local.Used
	}
	books[store][b] = held
	return err
}

// doubt is what may have been counted or not, by the metrics.
type doubt struct {
	// missing is how much of what was served may be missing, extra how much more
	// may be counted.
	missing, extra int64
	// lost is what surely did not count, though it should.
	lost int64
	text string
}

// doubts reads them. Only where servers are away may there be any.
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
		// Where a breaker is open nothing was sent, and no more are on their way when
		// a server dies.
		takes = int64(m.Sum("caddy_rate_limit_store_errors_total") - m.Sum("caddy_rate_limit_store_errors_total", `kind="breaker"`))
		takes = min(takes, int64(pairWorkers*len(p.site().zonesOf())))
	}
	return doubt{
		missing: charges + takes, extra: (takes + refunds) * p.bounds().tokens,
		lost: undelivered(`operation="charge"`) - charges,
		text: fmt.Sprintf("uncertain: %d charges, %d refunds, %d takes", charges, refunds, takes),
	}
}

// settle waits until everything that was served is counted, and nothing else,
// but for what is in doubt, and returns what was found.
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
			p.t.Fatalf("no server was away, but %s", d.text)
		}
		if d.lost != 0 {
			p.t.Fatalf("%d charges were lost or expired, by the metric", d.lost)
		}
		served, total := p.served()
		counted := p.counted()
		var missing, extra int64
		var texts []string
		for _, purse := range slices.SortedFunc(maps.Keys(served), func(a, b pairBucket) int { return strings.Compare(a.zone+a.name, b.zone+b.name) }) {
			n, either := served[purse].surely, served[purse].perhaps
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

// purse is what is compared: a bucket, or all together if clients may share one.
func (p *pairRun) purse(b pairBucket) pairBucket {
	if p.bounds().shared {
		b.name = "all clients"
	}
	return b
}

type servedCount struct{ surely, perhaps int64 }

// served is what was served in Redis, and what perhaps was.
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
				n.surely++
			case p.bounds().either:
				n.perhaps++
			}
			by[purse] = n
		}
	}
	return by, fmt.Sprint(statuses)
}

// counted is what all stores have.
func (p *pairRun) counted() map[pairBucket]int64 {
	sums := map[pairBucket]int64{}
	for _, buckets := range p.books {
		for b, held := range buckets {
			sums[p.purse(b)] += held.used
		}
	}
	return sums
}
