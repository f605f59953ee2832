package storetest

import (
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// History holds a store to the arithmetic of package algorithm, field by field,
// over long random histories: all operations, costs, changing limits, while the
// clock stands still, steps, jumps and runs back, and after it was far ahead. With the tag check a
// history that goes wrong is made as short as it can be; else there are few of them.
type History struct {
	// Limit is the kind of bucket; its zone does not matter.
	Limit store.Limit
	// Operations is the least number of requests of all histories; zero means 5,000.
	Operations int
}

// allHistories is rapid's default number of histories.
const allHistories = 100

// Run makes a store go through histories.
func (h History) Run(t *testing.T, open Open) {
	if h.Operations == 0 {
		h.Operations = 5_000
	}
	f := newFixture(t, open)
	each, number, done := h.Operations/allHistories, 0, 0
	n := histories(t, func(d draws) {
		number++
		m := h.newModel(f, d, number)
		m.damage()
		for m.done <= each {
			m.call()
			m.passTime()
		}
		done += m.done
	})
	if !t.Failed() && done < n*each {
		t.Errorf("made %d requests, want at least %d", done, n*each)
	}
}

// lifetime is how long a store that expires buckets in real time certainly keeps them: a
// second.
const lifetime = 700 * time.Millisecond

// model is the expected state of the store.
type model struct {
	draws
	*History
	fixture *fixture
	name    string
	began   time.Time
	limits  []*store.Limit
	buckets map[bucketID]algorithm.Bucket
	held    map[bucketID]*algorithm.Held
	// expired is the last end of a bucket that the clock has passed: a store may
	// have forgotten that bucket, so the clock must not run back as far.
	expired int64
	// penalty is how long penalties last, or 0 if requests do not say. Zones of other
	// configs have shorter ones.
	penalty time.Duration
	// holds is set if something may come back. Requests of a call have that in common.
	holds bool
	// taken is what can be refunded.
	taken []store.Request
	ids   int
	done  int
}

type bucketID struct {
	limit  *store.Limit
	client string
}

func (h *History) newModel(f *fixture, d draws, number int) *model {
	m := &model{draws: d, History: h, fixture: f, penalty: pick(d, "penalties", 0, time.Hour)}
	m.holds = !algorithm.Of(h.Limit.Algorithm).Lease && d.Draw("holds", 0, 3) > 0
	m.restart(fmt.Sprint("history", number))
	return m
}

// restart begins with other, empty buckets.
func (m *model) restart(name string) {
	m.name, m.began = name, time.Now()
	m.buckets, m.held, m.expired, m.taken, m.limits = map[bucketID]algorithm.Bucket{}, map[bucketID]*algorithm.Held{}, 0, nil, nil
	for _, zone := range []string{"a", "b"} {
		limit := m.Limit
		limit.Zone = name + zone + "." + m.fixture.id
		m.limits = append(m.limits, &limit)
	}
}

func (m *model) call() {
	if time.Since(m.began) > lifetime {
		m.restart(m.name + "again")
	}
	op := pick(m, "operation",
		algorithm.Check, algorithm.Check, algorithm.Charge, algorithm.Take, algorithm.Take, algorithm.Refund, algorithm.Penalize,
	)
	reqs := m.requests(op)
	m.noteExpired()
	states := m.ask(op, reqs)
	if time.Since(m.began) > lifetime {
		// The machine stood still: the buckets may have expired.
		m.restart(m.name + "again")
		return
	}
	for i, got := range states {
		r := &reqs[i]
		want, id := op.Run(m.bucket(r), r, m.now()), bucketID{r.Limit, r.ClientKey}
		m.held[id] = m.held[id].After(op, r, &want)
		if got != want {
			m.Fatalf("%s %d of %d in one call, %s, %+v:\n got %+v\nwant %+v", op, i+1, len(reqs), describe(*r), *r, got, want)
		}
		if op == algorithm.Take && got.Allowed {
			taken := *r
			taken.Receipt = got.Receipt
			m.taken = append(m.taken, taken)
		}
	}
	m.done += len(reqs)
}

func (m *model) ask(op algorithm.Operation, reqs []store.Request) []store.State {
	s, ctx := m.fixture.store, m.fixture.Context()
	switch op {
	case algorithm.Check:
		return answers(ctx, s.Check, reqs)
	case algorithm.Charge:
		return answers(ctx, s.Charge, reqs)
	case algorithm.Take:
		return answers(ctx, s.Take, reqs)
	case algorithm.Refund:
		return answers(ctx, s.Refund, reqs)
	default:
		return answers(ctx, s.Penalize, reqs)
	}
}

// requests draws requests for a few buckets.
func (m *model) requests(op algorithm.Operation) []store.Request {
	reqs := make([]store.Request, m.Draw("requests", 1, 8))
	kept := reqs[:0]
	for range reqs {
		if op != algorithm.Refund {
			kept = append(kept, m.request(op))
			continue
		}
		if len(m.taken) == 0 {
			break
		}
		i := m.Draw("taken", 0, int64(len(m.taken)-1))
		kept = append(kept, m.taken[i])
		m.taken = append(m.taken[:i], m.taken[i+1:]...)
	}
	return kept
}

func (m *model) request(op algorithm.Operation) store.Request {
	r := store.Request{
		Limit:     pick(m, "limit", m.limits...),
		ClientKey: pick(m, "client", client, "2001:db8::/64", "\x00\xff{}"),
		Penalty:   m.penalty,
		Cost:      m.Draw("cost", 0, 4),
	}
	if m.ids++; algorithm.Of(m.Limit.Algorithm).Lease {
		// Leases are renewed.
		r.ID = fmt.Sprintf("%08d", m.Draw("id", 0, 9))
	} else {
		r.ID = fmt.Sprintf("%08d", m.ids)
	}
	many := int64(store.MaxInteger)
	if algorithm.Of(m.Limit.Algorithm).NeedsID {
		many = 2_000
	}
	if m.holds {
		r.Hold = uint32(m.Draw("hold", store.HearsHeld, 9))
	}
	// Few values, so that buckets are used at the same rate again.
	r.Events = pick(m, "events", 1, 3, 7, 7, 20, 20, 20, 999_983%many, many)
	switch m.Draw("odd", 0, 19) {
	case 0:
		r.Cost = m.Draw("any cost", 0, many)
	case 1:
		r.Cost = m.Draw("high cost", 0, min(2*r.Events, many))
	case 2:
		r.Reserved = m.Draw("reserved", 0, min(r.Events, 30))
	case 3:
		r.Burst = m.Draw("burst", 1, min(2*r.Events, many))
	case 4, 5:
		if op == algorithm.Check {
			r.Ahead = m.Draw("ahead", 0, 10)
		}
	}
	if m.penalty > 0 && m.Draw("other config", 0, 3) == 0 {
		r.Penalty = time.Second
	}
	if op == algorithm.Penalize {
		r.Until = m.now() + m.Draw("penalty", 1, micros(time.Hour))
	}
	if algorithm.Of(m.Limit.Algorithm).Drains() && m.Draw("opens", 0, 3) == 0 {
		r.Ends = m.now() + m.Draw("arrival", 0, r.Limit.Window.Microseconds()) - 1
	}
	return r
}

func (m *model) bucket(r *store.Request) algorithm.Bucket {
	id := bucketID{r.Limit, r.ClientKey}
	b, ok := m.buckets[id]
	if !ok {
		b = algorithm.New(r.Limit)
		m.buckets[id] = b
	}
	return b
}

func (m *model) now() int64 { return m.fixture.now() }

// far is how far ahead a clock is that damages buckets: no window is as long.
const far = 40 * 24 * time.Hour

// damage fills the buckets, or does not, by a clock that is far ahead.
func (m *model) damage() {
	calls := m.Draw("calls ahead", 0, 6)
	if calls == 0 {
		return
	}
	m.fixture.clock.Advance(far)
	defer m.fixture.clock.Advance(-far)
	for range calls {
		m.call()
	}
}

// passTime moves the clock, or does not.
func (m *model) passTime() {
	window := int64(m.Limit.Window)
	span := func(name string, most int64) time.Duration {
		return time.Duration(m.Draw(name, 0, most))
	}
	switch p := m.Draw("time", 0, 19); {
	case p < 8: // it stands still
	case p < 14:
		m.fixture.clock.Advance(span("step", window/20))
	case p < 16:
		m.fixture.clock.Advance(span("leap", 2*window))
	case p < 17:
		m.fixture.clock.Advance(span("jump", 5*window))
	case p < 18:
		m.fixture.clock.Advance(-span("back", min(window/50, m.sinceExpiry())))
	default:
		m.approachEnd()
	}
}

// noteExpired notes the ends that the clock has passed, before a call extends buckets.
func (m *model) noteExpired() {
	for id, b := range m.buckets {
		if e := b.Expiry(id.limit); e <= m.now() {
			m.expired = max(m.expired, e)
		}
	}
}

// sinceExpiry is how long ago a bucket expired.
func (m *model) sinceExpiry() int64 {
	m.noteExpired()
	return max(m.now()-m.expired, 0) * int64(time.Microsecond)
}

// approachEnd moves the clock to the next end of a bucket, or to right before it.
func (m *model) approachEnd() {
	nearest := int64(0)
	for id, b := range m.buckets {
		if e := b.Expiry(id.limit); e > m.now() && (nearest == 0 || e < nearest) {
			nearest = e
		}
	}
	before := m.Draw("before", 0, 1)
	if ahead := nearest - m.now(); nearest > 0 && ahead <= 5*micros(m.Limit.Window) {
		m.fixture.clock.Advance(time.Duration(ahead-before) * time.Microsecond)
	}
}
