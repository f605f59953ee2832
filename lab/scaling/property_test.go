package scaling

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// settings are those of the document, with windows that do not take long.
func settings() (all []setting) {
	for _, s := range []setting{afterSticky, afterAny, afterTight, beforeAny, beforeTight, batchAuto, batchFixed} {
		s.processes, s.window = caddys, 4*second
		all = append(all, s)
	}
	return all
}

// cost is what a request costs of one client that comes so often.
func cost(s setting, rate float64) calls {
	if s.processes == 0 {
		s.processes = caddys
	}
	s.window = 4 * second
	return simulate(&s, rate, seed).perRequest()
}

// TestNothingIsLostOrDoubled requires that what was admitted was charged, or
// taken and not given back, and that no more was taken than the limit.
func TestNothingIsLostOrDoubled(t *testing.T) {
	for _, s := range settings() {
		for _, rate := range []float64{1, 50, 1_000, 10_000} {
			c := newClient(&s, seed, 0)
			c.run(random(rand.New(rand.NewPCG(seed, 1)), rate), 0, 9*second)
			if !c.isDone() {
				t.Errorf("%s, %v/s: something is on its way still", s.name, rate)
			}
			switch {
			case c.number == 0 || c.admitted == 0:
				t.Errorf("%s, %v/s: nothing came", s.name, rate)
			case !s.before && c.charged != c.admitted:
				t.Errorf("%s, %v/s: %d charged, %d admitted", s.name, rate, c.charged, c.admitted)
			case s.before && (c.kept() < 0 || s.batch == 0 && c.kept() > 0):
				t.Errorf("%s, %v/s: %d taken, %d given back, %d admitted", s.name, rate, c.fetched, c.given, c.admitted)
			case s.before && c.most > s.limit:
				t.Errorf("%s, %v/s: %d taken in a window", s.name, rate, c.most)
			}
		}
	}
}

// TestOneSeedTellsOneStory requires the same of the same seed, and something
// else of another.
func TestOneSeedTellsOneStory(t *testing.T) {
	s := afterAny
	s.processes, s.window = caddys, 4*second
	first, second, other := simulate(&s, 20, 1), simulate(&s, 20, 1), simulate(&s, 20, 2)
	if first != second || first == other {
		t.Errorf("%+v, %+v, another seed %+v", first, second, other)
	}
}

// TestLedgerSavesCalls are the savings that the document tells of.
func TestLedgerSavesCalls(t *testing.T) {
	if alone, spread := cost(afterSticky, 40), cost(afterAny, 40); alone.made[check] > 0.5*spread.made[check] {
		t.Errorf("%.2f checks a request of a client that comes to one Caddy, %.2f otherwise", alone.made[check], spread.made[check])
	}
	if c := cost(afterAny, 50_000); c.made[charge] > 0.2 || c.made[check] > 0.5 {
		t.Errorf("a hot client costs %.2f charges and %.2f checks a request", c.made[charge], c.made[check])
	}
	const rate = 20_000
	for _, s := range []setting{afterTight, beforeTight} {
		// Until it is full, and what each Caddy asks about a client that is.
		if c := cost(s, rate); rate*c.sum() > 3*(float64(tight)/4+caddys) {
			t.Errorf("%s: a client that is over its limit costs %.0f calls a second", s.name, rate*c.sum())
		}
	}
}

// TestBatchesServeHotClientsOnly requires that batches cut the takes of a hot
// client to a fraction, and make a rare one dearer.
func TestBatchesServeHotClientsOnly(t *testing.T) {
	if c := cost(batchFixed, 10_000); c.sum() > 0.01 {
		t.Errorf("batch: %.4f calls a request of a hot client", c.sum())
	}
	auto := batchAuto
	auto.limit = 40_000
	if c := cost(auto, 8_000); c.sum() > 0.1 {
		t.Errorf("batch auto: %.4f calls a request of a client near its limit", c.sum())
	}
	for _, s := range []setting{batchAuto, batchFixed} {
		if c := cost(s, 0.02); c.sum() < 1.5 {
			t.Errorf("%s: %.2f calls a request of a client that comes once", s.name, c.sum())
		}
	}
}

// TestBatchAutoShrinksFarBelowTheLimit: what is left of a batch when its window
// ends halves the next, and nothing makes it grow again.
func TestBatchAutoShrinksFarBelowTheLimit(t *testing.T) {
	s := setting{processes: 4, route: anyCaddy, before: true, batch: store.BatchAuto, limit: 40_000, window: 4 * second}
	if near, far := cost(s, 9_000), cost(s, 1_000); far.sum() < 5*near.sum() {
		t.Errorf("%.4f calls a request at 90 %% of the limit, %.4f at 10 %%", near.sum(), far.sum())
	}
}

// TestAnchorsHold compares with what was measured with Redis.
func TestAnchorsHold(t *testing.T) {
	m, err := readMeasured("../../docs/evidence/calls.md")
	if err != nil {
		t.Fatal(err)
	}
	all, err := anchors(m)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if !a.isHeld() {
			t.Errorf("%s: %v measured, %v simulated", a.name, a.measured, a.simulated)
		}
	}
}

// TestCurveIsWhatItsClientsCost requires that the sum by the points of a curve is
// that of clients simulated one by one, each at its own rate.
func TestCurveIsWhatItsClientsCost(t *testing.T) {
	p := newPopularity(exampleS, 300, 1_000)
	for _, s := range []setting{afterSticky, afterAny, beforeTight} {
		s.processes, s.window = caddys, 4*second
		v := newCurve(&s, p.rates[0], seed)
		var single calls
		for i, r := range p.rates {
			c := newClient(&s, seed+1, uint64(i))
			for range 4 {
				c.start()
				single.add(c.run(random(c.random, r), acquaintance, acquaintance+s.window), 1)
			}
		}
		got, want := total(p.each(v)).perRequest(), single.perRequest()
		for k := range got.made {
			if math.Abs(got.made[k]-want.made[k]) > 0.05*want.made[k]+0.01 {
				t.Errorf("%s: %.3f %ss a request by the curve, %.3f one by one", s.name, got.made[k], kindNames[k], want.made[k])
			}
		}
	}
}

// tolerance is how far a simulated number of calls per request may be from the
// measured one: a third of it, or so much.
const (
	tolerance  = 1.0 / 3
	negligible = 0.0025
)

func (a anchor) isHeld() bool {
	return math.Abs(a.simulated-a.measured) <= max(tolerance*a.measured, negligible)
}

func (c *client) kept() int64 { return c.fetched - c.given - c.admitted }

func (c *client) isDone() bool {
	return !slices.ContainsFunc(c.lines[:], func(l line) bool { return !l.isEmpty() }) &&
		!slices.ContainsFunc(c.books, func(b book) bool {
			return b.flight+b.waiting+b.asking+b.next+b.held+b.coming+b.refunds > 0 || b.sent
		})
}
