package ledger

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger/core"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

var (
	seeds     = flag.Int("ledger.seeds", 0, "how many interleavings TestModel goes through; 0 for a sample")
	firstSeed = flag.Uint64("ledger.seed", 1, "the first of them")
)

// interleavings is how many TestModel goes through; with the build tag check it is more.
var interleavings = 400

// TestModel runs one process against a simulated store, in random interleavings
// of requests, settlements, lagging replicas, lost replies, outages, windows
// that end and buckets that an operator resets, so that plain charges stray. At
// every step it holds the ledger to the truth, which only the test knows. Package simulation
// does the same to the core, in more histories; this test covers the goroutines that drive it.
func TestModel(t *testing.T) {
	const groups = 4
	n := *seeds
	if n == 0 {
		n = sweep.Size(interleavings, 100_000)
	}
	for group := range groups {
		t.Run(fmt.Sprint(group), func(t *testing.T) {
			t.Parallel()
			for seed := *firstSeed + uint64(group); seed < *firstSeed+uint64(n) && !t.Failed(); seed += groups {
				synctest.Test(t, func(t *testing.T) { newModel(t, seed).run() })
			}
		})
	}
}

// kinds are the algorithms with charges after the response.
var kinds = func() []store.Limit {
	all := []store.Limit{{Algorithm: store.FixedWindow}} // counted twice
	for a := range store.Algorithms {
		if t := algorithm.Of(a); !t.Lease {
			all = append(all, store.Limit{Algorithm: a})
			if t.Windowed() {
				all = append(all, store.Limit{Algorithm: a, Align: true})
			}
		}
	}
	return all
}()

// lookback is how old a truth may justify a refusal: the delay of messages, and the
// time a request waits for a charge.
const lookback = 120 * time.Millisecond

// model is the truth that the ledger has to match.
type model struct {
	*testing.T
	seed   uint64
	rng    *rand.Rand
	sim    *simulation
	ledger *Ledger
	limit  store.Limit
	events int64
	cost   int64

	mu sync.Mutex
	// unlanded is the cost that was admitted or has to be charged, and is neither in
	// the primary nor given up.
	unlanded int64
	// vanished is the cost that was lost on its way; uncertain is the most that the
	// ledger has reported as such.
	vanished, uncertain int64
	// ghosts is the vanished cost that the ledger cannot know of yet.
	ghosts int64
	// shared is set if other processes charge as well; heard is the primary's highest
	// answer since a reset.
	shared bool
	heard  map[int64]int64
	// truth is the cost spent or about to be, at each of its changes within the
	// lookback; last is the latest.
	truth []moment
	// Until excused, refusals need no justification by the truth, because a replica may
	// predate an operator's reset. wasReset is the time of that reset by the registry's
	// clock.
	excused  time.Time
	wasReset int64
	// wasAway is set once a replica had to answer alone, resets once an operator has
	// reset a bucket; ages, once charges may have waited so long that they count for less.
	wasAway, resets, ages atomic.Bool

	last int64
	// spent is what the primary had spent at the last note, and over, when that last became less, what
	// it was before.
	spent int64
	over  moment
}

type moment struct {
	at   time.Time
	used int64
}

func newModel(t *testing.T, seed uint64) *model {
	rng := rand.New(rand.NewPCG(seed, 0))
	m := &model{T: t, seed: seed, rng: rng, sim: newSimulation(seed)}
	m.limit = kinds[rng.IntN(len(kinds))]
	m.limit.Zone = "zone"
	m.limit.Window = []time.Duration{300 * time.Millisecond, time.Second, 4 * time.Second, time.Minute}[rng.IntN(4)]
	m.events = []int64{1, 2, 5, 20}[rng.IntN(4)]
	m.cost = []int64{1, 1, 1, 2, 3}[rng.IntN(5)]
	m.sim.lag = []time.Duration{0, 0, time.Millisecond, 50 * time.Millisecond, 3 * time.Second, 5 * time.Second}[rng.IntN(6)]
	m.sim.lossy = []float64{0, 0, 0.02, 0.2}[rng.IntN(4)]
	m.sim.touched = m.noteTruth
	m.ages.Store(m.sim.lossy > 0 && !algorithm.Of(m.limit.Algorithm).Windowed()) // while a lost reply is awaited
	m.shared, m.heard = rng.IntN(3) == 0, map[int64]int64{}
	m.sim.said = m.noteWord
	trust := []time.Duration{NoTrust, DefaultTrust / 2, DefaultTrust, DefaultTrust}[rng.IntN(4)]
	m.ledger = New(NewRegistry(time.Now), m.sim, Options{Trust: trust, ChargeDelay: time.Duration(rng.IntN(3)) * 25 * time.Millisecond, OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, requests int64, err error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if errors.Is(err, store.ErrUncertain) {
			m.uncertain += requests * m.cost
			m.ghosts = max(m.ghosts-requests*m.cost, 0)
		} else {
			m.unlanded -= requests * m.cost
		}
	}})
	return m
}

func (m *model) request(rng *rand.Rand) store.Request {
	return store.Request{Limit: &m.limit, ClientKey: "client", Events: m.events, Cost: m.cost, ID: fmt.Sprint(rng.Uint64())}
}

// used is the cost spent in the primary. The simulation's lock is held.
func (m *model) used() int64 {
	r := store.Request{Limit: &m.limit, ClientKey: "client", Events: m.events}
	return bucketIn(m.sim.primary, &r).View(&r, m.sim.now(), false).Used + m.sim.strays[keyOf(&r)]
}

// justOver is for how long a window that has ended may be known as open.
const justOver = 5 * time.Millisecond

func (m *model) run() {
	var wg sync.WaitGroup
	for range 1 + m.rng.IntN(12) {
		rng := rand.New(rand.NewPCG(m.seed, m.rng.Uint64()))
		wg.Go(func() { m.client(rng, 5+rng.IntN(25)) })
	}
	rng := rand.New(rand.NewPCG(m.seed, 2))
	ctx, stop := context.WithCancel(context.Background())
	var weather sync.WaitGroup
	weather.Go(func() { m.weather(ctx, rng) })
	others := rand.New(rand.NewPCG(m.seed, 3))
	weather.Go(func() { m.neighbours(ctx, others) })
	wg.Wait()
	stop()
	weather.Wait()
	m.sim.setDown(false, false)
	m.ledger.Flush(context.Background())
	pass(10 * time.Second)
	m.atEnd()
	m.ledger.Leave()
}

// noteWord notes an answer of the primary. In a window, spent cost never decreases
// before a reset.
func (m *model) noteWord(st *store.State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.limit.Algorithm == store.FixedWindow && m.wasReset == 0 {
		m.heard[st.Reset] = max(m.heard[st.Reset], st.Used)
	}
}

// words are the answers of the primary.
func (m *model) words() map[int64]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.wasReset > 0 {
		return nil
	}
	return maps.Clone(m.heard)
}

// neighbours are other processes.
func (m *model) neighbours(ctx context.Context, rng *rand.Rand) {
	for m.shared && ctx.Err() == nil {
		pass(time.Duration(rng.Int64N(2*int64(m.limit.Window)/m.events + 1)))
		m.sim.others(algorithm.Charge, m.request(rng))
	}
}

// weather injects faults from time to time.
func (m *model) weather(ctx context.Context, rng *rand.Rand) {
	if rng.IntN(2) == 0 {
		return
	}
	for ctx.Err() == nil {
		pass(time.Duration(rng.Int64N(int64(2 * time.Second))))
		what := rng.IntN(4)
		if (what == 1 || what == 2) && !algorithm.Of(m.limit.Algorithm).Windowed() {
			m.ages.Store(true)
		}
		switch what {
		case 0:
			m.excuse(m.sim.lag + DefaultTrust + lookback)
			m.resets.Store(true)
			m.sim.reset("zone/client")
			m.mu.Lock()
			m.wasReset = m.ledger.registry.now()
			m.mu.Unlock()
		case 1:
			m.sim.setDown(true, false)
			pass(time.Duration(rng.Int64N(int64(3 * time.Second))))
			m.sim.setDown(false, false)
		case 2:
			// No primary can confirm a replica's answer.
			m.wasAway.Store(true)
			m.excuse(time.Hour)
			m.sim.setDown(false, true)
			pass(time.Duration(rng.Int64N(int64(3 * time.Second))))
			m.sim.setDown(false, false)
			m.excuse(m.sim.lag + DefaultTrust + lookback)
		}
	}
}

// excuse exempts refusals from justification for d.
func (m *model) excuse(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.excused = time.Now().Add(d)
}

// noteTruth notes the truth from now on, and until now. The simulation's lock is
// held.
func (m *model) noteTruth(landed int64, vanished bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unlanded -= landed
	if vanished {
		m.vanished += landed
		m.ghosts += landed
	}
	m.note()
}

func (m *model) note() {
	now := time.Now()
	for len(m.truth) > 0 && now.Sub(m.truth[0].at) > lookback {
		m.truth = m.truth[1:]
	}
	m.truth = append(m.truth, moment{now, m.last})
	used := m.used()
	if used < m.spent {
		m.over = moment{now, m.spent}
	}
	m.spent, m.last = used, used+m.unlanded
	m.truth = append(m.truth, moment{now, m.last})
}

// change changes the unlanded cost, and returns the new truth.
func (m *model) change(by int64) int64 {
	m.sim.mu.Lock()
	defer m.sim.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unlanded += by
	m.note()
	return m.last
}

// client makes requests one after the other.
func (m *model) client(rng *rand.Rand, requests int) {
	pause := int64(m.limit.Window) / m.events
	if rng.IntN(3) == 0 {
		pause = int64(5 * time.Millisecond)
	}
	for range requests {
		pass(time.Duration(rng.Int64N(2*pause + 1)))
		r := m.request(rng)
		before := m.words()
		st := admit(m.ledger, r)
		held := int64(0)
		switch {
		case st.Err != nil:
		case !st.Allowed:
			m.isJustified(&st)
			continue
		default:
			held = m.cost
			// While the primary is away, this process cannot add what a replica lacks
			// of a log, or of a window that began after an operator's reset if its own
			// charge may have counted, or counts in a window that ends before.
			begins := m.limit.Algorithm == store.FixedWindow && !m.limit.Align
			lacks := m.wasAway.Load() && (st.Replica && m.limit.Algorithm == store.SlidingLog || m.resets.Load() && (m.sim.lossy > 0 || begins))
			if used := m.change(m.cost); used > m.events && !m.shared && !lacks && !m.ages.Load() {
				m.fail("admitted although %d of %d are used with it: %+v", used, m.events, st)
			}
			if least := before[st.Reset]; st.Used < least && !m.resets.Load() {
				// After a reset, before is empty. A reset during the call may lower the count.
				m.fail("admitted on a count below the primary's %d: %+v", least, st)
			}
		}
		pass(time.Duration(rng.Int64N(int64(50 * time.Millisecond))))
		switch free := rng.IntN(4) == 0; {
		case held == 0 && !free:
			// on_error allow.
			m.change(m.cost)
			m.ledger.ChargeDetached([]*store.Request{new(r)})
		case held > 0 && free:
			m.change(-m.cost)
			r.Cost = 0
			m.ledger.Settle([]*store.Request{new(r)}, []int64{held})
		case held > 0:
			m.ledger.Settle([]*store.Request{new(r)}, nil)
		}
	}
}

// isJustified requires that a refusal matches the truth, or a recent truth.
func (m *model) isJustified(st *store.State) {
	// A request admitted at the same instant reports first.
	pass(time.Nanosecond)
	m.sim.mu.Lock()
	defer m.sim.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	r := store.Request{Limit: &m.limit, ClientKey: "client", Events: m.events}
	// A window that has just ended may be known as open.
	b := bucketIn(m.sim.primary, &r)
	most := max(b.View(&r, m.sim.now()-justOver.Microseconds(), false).Used, m.used()) + m.unlanded + m.ghosts
	if time.Since(m.over.at) <= justOver {
		// What has landed in the next one since is added to it.
		most += m.over.used
	}
	for _, was := range m.truth {
		if time.Since(was.at) <= lookback {
			most = max(most, was.used+m.ghosts)
		}
	}
	if m.limit.Algorithm == store.GCRA {
		// A charge in flight has not begun to drain, as far as the ledger knows.
		most += 1 + int64(lookback)*m.events/int64(m.limit.Window)
	}
	switch {
	case st.InFlight && m.limit.Algorithm == store.SlidingLog && m.sim.lossy > 0:
		// A charge whose reply decides may be lost; requests stop waiting for it.
	case st.RetryAfter <= 0:
		m.fail("refused without a time to wait: %+v", *st)
	case m.cost > m.events && st.RetryAfter != store.Never:
		m.fail("refused for some time only, although it never fits: %+v", *st)
	case most+m.cost <= m.events && time.Now().After(m.excused) && !m.waitsForWord():
		m.fail("refused although of %d at most %d were used: %+v", m.events, most, *st)
	}
}

// waitsForWord reports whether an answer of the primary is missing that would show
// a reset or the outcome of a charge: it has not arrived, it overlapped with another
// charge, or a replica may have shown the bucket as it was before the reset since.
func (m *model) waitsForWord() bool {
	r := store.Request{Limit: &m.limit, ClientKey: "client"}
	e := m.ledger.look(&r)
	if e == nil {
		return false
	}
	defer e.stripe.mu.Unlock()
	disturbed, trusted := inside(e, "disturbed").Int(), inside(e, "trusted").Int()
	return isReturning(e) || disturbed > 0 && trusted <= disturbed || m.wasReset > 0 && trusted < m.wasReset+m.sim.lag.Microseconds()
}

// atEnd requires that nothing is in flight, nothing was lost or counted twice, and
// vanished charges were reported.
func (m *model) atEnd() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.unlanded != 0 && (m.unlanded < 0 || !m.ages.Load()) {
		m.fail("%d are neither charged nor given up; less than 0 were charged twice", m.unlanded)
	}
	if m.vanished > m.uncertain {
		m.fail("%d vanished, but only %d are reported as uncertain", m.vanished, m.uncertain)
	}
	if m.sim.orphans > 0 && !m.resets.Load() {
		m.fail("%d charges were said to be of a window that is not stored", m.sim.orphans)
	}
	if n := m.sim.strays["zone/client"]; n > m.uncertain {
		m.fail("%d are charged without a window, but only %d are reported as uncertain", n, m.uncertain)
	}
	if m.sim.most > 1 {
		m.fail("the store was asked %d times about the bucket at once", m.sim.most)
	}
	if f := m.ledger.Figures(); f.InFlight != 0 || f.Unsent != 0 {
		m.fail("figures at the end: %+v", f)
	}
	r := store.Request{Limit: &m.limit, ClientKey: "client"}
	if e := m.ledger.look(&r); e != nil {
		defer e.stripe.mu.Unlock()
		now := m.ledger.moment()
		if e.Worth(&now) > core.Alone {
			m.fail("left at the end: %+v", e.Bucket)
		}
	}
	if n := m.ledger.registry.owing.Load(); n != 0 {
		m.fail("%d buckets have pending charges at the end", n)
	}
}

func (m *model) fail(format string, args ...any) {
	m.Errorf("seed %d, %s, window %v, %d events at %d, lag %v, loss %v: "+format, append([]any{m.seed, m.limit.Algorithm, m.limit.Window,
		m.events, m.cost, m.sim.lag, m.sim.lossy}, args...)...)
}
