package ledger

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// reshardings is how many histories of each case are simulated.
var reshardings = 4

const (
	reshardingLimit  = 20
	reshardingWindow = 10 * time.Second
	// mostCost is the most that a request of a history costs.
	mostCost = 3
	// atOnce is how long two calls may take: a config with the old shards may open a window while others do.
	atOnce = 50 * time.Millisecond
)

// servers are shards in a bubble, each with a bucket of the client.
type servers struct {
	mu      sync.Mutex
	rng     *rand.Rand
	buckets map[string]algorithm.Bucket
	held    map[string]*algorithm.Held
}

// sharded is a store of these shards. The first letter of owners is the client's owner, the others were.
type sharded struct {
	*servers
	owners string
}

func (s *sharded) run(op algorithm.Operation, asks []*store.Ask) {
	s.mu.Lock()
	there, back := s.rng.IntN(10), s.rng.IntN(10)
	s.mu.Unlock()
	pass(time.Duration(1+there) * time.Millisecond)
	s.mu.Lock()
	for _, a := range asks {
		b := s.buckets[a.Shard()]
		if b == nil {
			b = algorithm.New(a.Request.Limit)
			s.buckets[a.Shard()] = b
		}
		a.State = op.Run(b, &a.Request, time.Now().UnixMicro())
		s.held[a.Shard()] = s.held[a.Shard()].After(op, &a.Request, &a.State)
	}
	s.mu.Unlock()
	pass(time.Duration(1+back) * time.Millisecond)
}

func (s *sharded) report(op algorithm.Operation, reqs []*store.Request, report func(i int, st store.State)) {
	asks := store.Asks(storetest.Posted(reqs))
	go func() {
		s.run(op, asks)
		reportAll(store.States(asks), report)
	}()
}

func (s *sharded) Check(_ context.Context, asks []*store.Ask)    { s.run(algorithm.Check, asks) }
func (s *sharded) Charge(_ context.Context, asks []*store.Ask)   { s.run(algorithm.Charge, asks) }
func (s *sharded) Take(_ context.Context, asks []*store.Ask)     { s.run(algorithm.Take, asks) }
func (s *sharded) Refund(_ context.Context, asks []*store.Ask)   { s.run(algorithm.Refund, asks) }
func (s *sharded) Penalize(_ context.Context, asks []*store.Ask) { s.run(algorithm.Penalize, asks) }
func (s *sharded) Peek(_ context.Context, asks []*store.Ask)     { s.run(algorithm.Peek, asks) }

func (s *sharded) Reset(_ context.Context, r store.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.buckets, r.Shard())
	return nil
}

func (s *sharded) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.report(algorithm.Charge, reqs, report)
}

func (s *sharded) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.report(algorithm.Refund, reqs, report)
}

func (s *sharded) PenalizeDetached(reqs []*store.Request) {
	s.report(algorithm.Penalize, reqs, nil)
}

func (s *sharded) Owner(string) string { return s.owners[:1] }

func (s *sharded) Owners(string) []string {
	owners := strings.Split(s.owners, "")
	slices.Sort(owners)
	return owners
}

func (*sharded) Hurry(string) {}

func (*sharded) Warm(context.Context) {}

var _ store.Remote = (*sharded)(nil)

// reshardingCase is a resharding. Each config has its owners; within spread all processes have loaded it.
type reshardingCase struct {
	name    string
	configs []string
	gap     func(rng *rand.Rand) time.Duration
	spread  func(rng *rand.Rand) time.Duration
	// drained is what more may pass where what was spent drains: what configs with the old shards have admitted
	// after the second bucket opened.
	drained int64
}

func between(least, most time.Duration) func(*rand.Rand) time.Duration {
	return func(rng *rand.Rand) time.Duration { return least + time.Duration(rng.Int64N(int64(most-least)+1)) }
}

func reshardingCases() []reshardingCase {
	const w = reshardingWindow
	quick, soon := between(w/5, w/2), between(0, w/5)
	return []reshardingCase{
		{"moved within two windows", []string{"a", "ba"}, quick, between(2*w, 2*w), 0},
		{"moved back", []string{"a", "ba", "ab"}, quick, soon, 0},
		{"undone", []string{"a", "ba", "a"}, quick, soon, 0},
		{"several at once", []string{"a", "ba", "ab", "ba"}, quick, between(w, w), 0},
		{"two steps", []string{"a", "ba", "cba"}, quick, soon, 0},
		{"ended after two windows", []string{"a", "ba", "b"}, between(3*w, 3*w), between(w, w), reshardingLimit},
		{"not moved", []string{"a"}, quick, soon, 0},
	}
}

// history is one client's requests to some processes while they are reloaded.
type history struct {
	*servers
	limit store.Limit
	takes bool

	mu        sync.Mutex
	reference algorithm.Bucket
	underWay  int
	// over is the most that was admitted beyond the limit; refused counts refusals while there was room, and room is
	// the most that there was.
	over, room        int64
	requests, refused int
	// resets are the ends of windows that were told.
	resets map[int64]bool
	wobble string
	// stayHeld are the shards where something is held in the end.
	stayHeld []string
}

// run simulates the history with a seed.
func (h *history) run(c reshardingCase, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	h.servers = &servers{rng: rand.New(rand.NewPCG(seed, 8)), buckets: map[string]algorithm.Bucket{}, held: map[string]*algorithm.Held{}}
	h.reference, h.resets = algorithm.New(&h.limit), map[int64]bool{}
	processes := 1
	if h.takes {
		processes += rng.IntN(4)
	}
	var all sync.WaitGroup
	current := make([]*Owners, processes)
	var mu sync.Mutex
	at, last := reshardingWindow/2+time.Duration(rng.Int64N(int64(reshardingWindow))), time.Duration(0)
	registries := make([]*Registry, processes)
	open := func(k int, owners string) {
		l := New(registries[k], &sharded{h.servers, owners}, Options{})
		l.Run()
		mu.Lock()
		before := current[k]
		current[k] = NewOwners(l)
		mu.Unlock()
		if before != nil {
			before.Stop()
			pass(reshardingWindow)
			before.Leave()
		}
	}
	for k := range registries {
		registries[k] = NewRegistry(nil)
		open(k, c.configs[0])
	}
	loads := make([]time.Duration, processes)
	for _, owners := range c.configs[1:] {
		spread := c.spread(rng)
		for k := range registries {
			// No process loads an earlier config after a later one.
			when := max(at+time.Duration(rng.Int64N(int64(spread)+1)), loads[k]+time.Millisecond)
			loads[k], last = when, max(last, when)
			all.Go(func() {
				pass(when)
				open(k, owners)
			})
		}
		at += c.gap(rng)
	}
	speed := []float64{.03, .06, .2}[rng.IntN(3)]
	for tick := range int((last + 2*reshardingWindow) / (10 * time.Millisecond)) {
		pass(10 * time.Millisecond)
		chance := speed
		if tick/300%3 == 0 {
			chance *= 4
		}
		if rng.Float64() >= chance {
			continue
		}
		cost, isFree, lasts := []int64{1, 1, 1, 2, mostCost}[rng.IntN(5)], rng.IntN(10) == 0, time.Duration(50+rng.IntN(1450))*time.Millisecond
		mu.Lock()
		o := current[rng.IntN(processes)]
		mu.Unlock()
		r := store.Request{Limit: &h.limit, ClientKey: "k", Events: reshardingLimit, Cost: cost, ID: fmt.Sprint(tick)}
		if h.takes && !algorithm.Of(h.limit.Algorithm).Lease {
			r.Hold = uint32(store.HearsHeld + 1 + tick) //nolint:gosec // few
		}
		all.Go(func() { h.request(o, r, isFree, lasts) })
	}
	all.Wait()
	pass(time.Minute)
	for _, o := range current {
		o.Stop()
		o.Leave()
	}
	for shard, held := range h.held {
		if held != nil {
			h.stayHeld = append(h.stayHeld, shard)
		}
	}
}

func (h *history) request(o *Owners, r store.Request, isFree bool, lasts time.Duration) {
	h.mu.Lock()
	h.requests++
	h.underWay++
	h.mu.Unlock()
	a := &store.Ask{Request: r}
	isLease := algorithm.Of(h.limit.Algorithm).Lease
	if h.takes {
		o.Take(context.Background(), []*store.Ask{a})
	} else {
		o.Admit(context.Background(), []*store.Ask{a})
	}
	spent := h.judge(&r, &a.State)
	if !a.Allowed {
		return
	}
	if isFree || isLease || !h.takes {
		pass(lasts)
	}
	settled := a.Request
	settled.Receipt = a.State.Receipt
	settled.NoteHold(&a.State)
	switch {
	case !h.takes && isFree:
		settled.Cost = 0
		o.Settle([]*store.Request{&settled}, []int64{r.Cost})
	case !h.takes:
		o.Settle([]*store.Request{&settled}, nil)
	case isFree || isLease:
		o.RefundDetached([]*store.Request{&settled})
	case settled.MayHold():
		settled.Cost = 0
		o.RefundDetached([]*store.Request{&settled})
	}
	if isFree || isLease {
		h.mu.Lock()
		defer h.mu.Unlock()
		r.Receipt = spent
		algorithm.Refund.Run(h.reference, &r, time.Now().UnixMicro())
	}
}

// judge compares an answer with a bucket in which all counts that was admitted, wherever it was counted. Its
// windows end when the answers have said.
func (h *history) judge(r *store.Request, st *store.State) store.Receipt {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.underWay--
	now := time.Now().UnixMicro()
	seen := *r
	if opensByRequest(&h.limit) {
		seen.Ends = st.Reset
	}
	before := algorithm.Peek.Run(h.reference, &seen, now)
	if !st.Allowed {
		if before.Allowed && h.underWay == 0 && !st.InFlight {
			h.refused++
			h.room = max(h.room, reshardingLimit-before.Used)
		}
		return store.Receipt{}
	}
	h.over = max(h.over, before.Used+r.Cost-reshardingLimit)
	if opensByRequest(&h.limit) {
		for end := range h.resets {
			if end <= now {
				delete(h.resets, end)
			} else if by := end - st.Reset; h.takes && max(by, -by) > atOnce.Microseconds() {
				h.wobble = fmt.Sprintf("a window ends at %d and at %d", end, st.Reset)
			}
		}
		h.resets[st.Reset] = true
	}
	charged := seen
	algorithm.Charge.Run(h.reference, &charged, now)
	return h.reference.View(&seen, now, true).Receipt
}

// TestReshardingKeepsLimits, whatever is loaded in which order, with every algorithm: never more than the limit
// and one cost between two calls. Where what was spent drains, configs with the old shards are counted once more
// when the new one has no shard from before.
func TestReshardingKeepsLimits(t *testing.T) {
	for _, c := range reshardingCases() {
		for _, limit := range storetest.Limits {
			for _, takes := range []bool{true, false} {
				if limit.Window = reshardingWindow; algorithm.Of(limit.Algorithm).Lease && !takes || limit.Calendar.Unit != "" {
					continue
				}
				limit.Zone = "zone"
				t.Run(fmt.Sprintf("%s/%s/%v/takes %v", c.name, limit.Algorithm, limit.Align, takes), func(t *testing.T) {
					over, room, refused, requests := int64(0), int64(0), 0, 0
					for seed := range uint64(reshardings) { //nolint:gosec // few
						h := &history{limit: limit, takes: takes}
						synctest.Test(t, func(*testing.T) { h.run(c, seed) })
						most := int64(mostCost)
						if algorithm.Of(limit.Algorithm).Drains() {
							most += c.drained
						}
						if h.over > most || h.wobble != "" {
							t.Errorf("history %d: %d beyond the limit, want at most %d; %s", seed, h.over, most, h.wobble)
						}
						if h.stayHeld != nil {
							t.Errorf("history %d: something stays held at %v", seed, h.stayHeld)
						}
						over, room = max(over, h.over), max(room, h.room)
						refused, requests = refused+h.refused, requests+h.requests
					}
					t.Logf("%d beyond the limit; %d of %d were refused with room for up to %d", over, refused, requests, room)
					// A bucket that drains was opened with what others then took, or gave back elsewhere: a client that
					// never pauses has that less.
					isMore := refused*25 > requests
					if algorithm.Of(limit.Algorithm).Drains() {
						isMore = room > 2*mostCost
					}
					if takes && isMore {
						t.Errorf("%d of %d requests were refused although there was room for up to %d", refused, requests, room)
					}
				})
			}
		}
	}
}
