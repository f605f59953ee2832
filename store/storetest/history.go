package storetest

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// History holds a store to the arithmetic of [algorithm.FixedWindow], field by
// field, over a long random history of checks and charges, while the clock
// stands still, steps and jumps. The zero value is ready to use.
type History struct {
	// Operations is how many requests are made; zero means 10,000.
	Operations int
	// Seed chooses the history; zero means a random one, which a failure
	// tells.
	Seed uint64
}

// model is what the store has to be like.
type model struct {
	*fixture
	rand    *rand.Rand
	limits  []*store.Limit
	clients []string
	windows map[bucketID]algorithm.FixedWindow
}

type bucketID struct {
	limit  *store.Limit
	client string
}

// Run makes a store go through the history.
func (h History) Run(t *testing.T, open Open) {
	if h.Operations == 0 {
		h.Operations = 10_000
	}
	if h.Seed == 0 {
		h.Seed = rand.Uint64()
	}
	f := newFixture(t, open)
	m := &model{
		fixture: f,
		rand:    rand.New(rand.NewPCG(h.Seed, 0)),
		clients: []string{client, "2001:db8::/64", "", "\x00\xff{}", "token:abc"},
		windows: map[bucketID]algorithm.FixedWindow{},
	}
	for _, zone := range []string{"a", "b"} {
		for _, window := range []time.Duration{time.Minute, time.Hour, 24 * time.Hour} {
			m.limits = append(m.limits, f.limit(zone, window))
		}
	}
	for done := 0; done < h.Operations; {
		m.passTime()
		done += m.call()
		if t.Failed() {
			t.Fatalf("the history with seed %#x went wrong within its first %d operations", h.Seed, done)
		}
	}
}

// call makes one call and returns how many requests were in it.
func (m *model) call() int {
	reqs := make([]store.Request, 1+m.rand.IntN(2)*m.rand.IntN(4))
	for i := range reqs {
		reqs[i] = m.request()
	}
	var states []store.State
	kind := "check"
	if m.rand.IntN(2) == 0 {
		kind = "charge"
		states = m.store.Charge(m.Context(), reqs)
	} else {
		states = m.store.Check(m.Context(), reqs)
	}
	for i, s := range m.answer(states, len(reqs)) {
		r := reqs[i]
		if want := m.expect(kind, r); s != want {
			m.Errorf("%s %d of %d in one call, cost %d, %s:\n got %+v\nwant %+v",
				kind, i+1, len(reqs), r.Cost, describe(r), s, want)
		}
	}
	return len(reqs)
}

// request is about one of few buckets, mostly at a small cost.
func (m *model) request() store.Request {
	r := store.Request{
		Limit:     m.limits[m.rand.IntN(len(m.limits))],
		ClientKey: m.clients[m.rand.IntN(len(m.clients))],
		Events:    1 + m.rand.Int64N(20),
		Cost:      m.rand.Int64N(4),
	}
	switch m.rand.IntN(100) {
	case 0:
		r.Cost = m.rand.Int64N(store.MaxInteger)
	case 1, 2, 3:
		r.Cost = m.rand.Int64N(40)
	}
	switch m.rand.IntN(50) {
	case 0:
		r.Events = store.MaxInteger
	case 1, 2, 3:
		r.Events = 1 + m.rand.Int64N(1_000_000_000)
	}
	return r
}

// expect does to the model what r does to the store.
func (m *model) expect(kind string, r store.Request) store.State {
	id := bucketID{r.Limit, r.ClientKey}
	now := m.now()
	w := m.windows[id]
	if kind == "charge" {
		w = w.Charge(now, micros(r.Limit.Window), r.Cost)
		m.windows[id] = w
		return w.Charged(now, r.Events)
	}
	w = w.Open(now, micros(r.Limit.Window))
	m.windows[id] = w
	return w.Check(now, r.Events, r.Cost)
}

// passTime moves the clock, or does not.
func (m *model) passTime() {
	switch p := m.rand.IntN(1000); {
	case p < 700: // it stands still
	case p < 960:
		m.clock.Advance(time.Duration(m.rand.Int64N(int64(2 * time.Second))))
	case p < 970:
		m.clock.Advance(time.Duration(m.rand.Int64N(int64(2 * time.Minute))))
	case p < 972:
		m.clock.Advance(time.Duration(m.rand.Int64N(int64(2 * time.Hour))))
	case p < 973:
		m.clock.Advance(time.Duration(m.rand.Int64N(int64(48 * time.Hour))))
	default:
		m.approachReset()
	}
}

// approachReset moves the clock to the nearest reset that is ahead, or to
// right before it.
func (m *model) approachReset() {
	nearest := int64(0)
	for _, w := range m.windows {
		if w.IsOpen(m.now()) && (nearest == 0 || w.Reset < nearest) {
			nearest = w.Reset
		}
	}
	if nearest > 0 {
		m.clock.Advance(time.Duration(nearest-m.rand.Int64N(2)-m.now()) * time.Microsecond)
	}
}
