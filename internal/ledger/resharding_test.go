package ledger

import (
	"context"
	"errors"
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
	// skew is by how much each shard's clock is ahead of that of the shard before it: whole minutes.
	skew time.Duration
	// silent is a shard that does not answer.
	silent string
}

// silence is how long a call waits for a shard that does not answer.
const silence = time.Second

// nameOf returns the name of a bucket.
func nameOf(r *store.Request) string { return r.Shard() + "/" + r.Limit.Zone }

func newServers(seed uint64) *servers {
	return &servers{
		rng: rand.New(rand.NewPCG(seed, 8)), buckets: map[string]algorithm.Bucket{}, held: map[string]*algorithm.Held{}, silent: "none",
	}
}

// now is the time by the clock of a shard.
func (s *servers) now(shard string) int64 {
	return time.Now().Add(s.skew * time.Duration(shard[0]-'b')).UnixMicro()
}

// sharded is a store of these shards. The first letter of owners is the client's owner, the others were.
type sharded struct {
	*servers
	owners string
}

func (s *sharded) run(op algorithm.Operation, asks []*store.Ask) {
	s.mu.Lock()
	there, back, silent := s.rng.IntN(10), s.rng.IntN(10), s.silent
	s.mu.Unlock()
	pass(time.Duration(1+there) * time.Millisecond)
	if slices.ContainsFunc(asks, func(a *store.Ask) bool { return a.Shard() == silent }) {
		pass(silence)
	}
	s.mu.Lock()
	for _, a := range asks {
		if a.Shard() == s.silent {
			a.State = store.State{Err: errDown}
			continue
		}
		b := s.buckets[nameOf(&a.Request)]
		if b == nil {
			b = algorithm.New(a.Request.Limit)
			s.buckets[nameOf(&a.Request)] = b
		}
		a.State = op.Run(b, &a.Request, s.now(a.Shard()))
		s.held[nameOf(&a.Request)] = s.held[nameOf(&a.Request)].After(op, &a.Request, &a.State)
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
	delete(s.buckets, nameOf(&r))
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
	h.servers = newServers(seed)
	// No, or ten minutes ahead or behind.
	h.skew = time.Duration(int(seed+1)%3-1) * 10 * time.Minute //nolint:gosec // few
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
	a, began := &store.Ask{Request: r}, time.Now().UnixMicro()
	isLease := algorithm.Of(h.limit.Algorithm).Lease
	if h.takes {
		o.Take(context.Background(), []*store.Ask{a})
	} else {
		o.Admit(context.Background(), []*store.Ask{a})
	}
	spent := h.judge(&r, &a.State, began)
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
// windows end when the answers have said, and its events come when the requests began: owners forget none earlier.
func (h *history) judge(r *store.Request, st *store.State, began int64) store.Receipt {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.underWay--
	now := time.Now().UnixMicro()
	seen, reset := *r, int64(0)
	if opensByRequest(&h.limit) {
		reset = st.Reset - (time.Duration(st.Now-now) * time.Microsecond).Round(time.Minute).Microseconds()
		seen.Ends = reset
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
			} else if by := end - reset; h.takes && max(by, -by) > atOnce.Microseconds() {
				h.wobble = fmt.Sprintf("a window ends at %d and at %d", end, reset)
			}
		}
		h.resets[reset] = true
	}
	charged := seen
	if traits := algorithm.Of(h.limit.Algorithm); traits.NeedsID && !traits.Lease {
		algorithm.Charge.Run(h.reference, &charged, began)
	} else {
		algorithm.Charge.Run(h.reference, &charged, now)
	}
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
					// never pauses has that less. Of other requests up to four in a hundred meet a refund on its way.
					isMore := refused*20 > requests
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

// twoOwners runs a test in a bubble with the owners of a client that moves from shard a to b.
func twoOwners(t *testing.T, test func(t *testing.T, s *sharded, o *Owners)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &sharded{newServers(1), "ba"}
		o := NewOwners(New(NewRegistry(nil), s, Options{}))
		test(t, s, o)
		pass(time.Minute)
		o.Leave()
	})
}

// clientOf returns a request of the client in a zone.
func clientOf(zone string, events int64) store.Request {
	return store.Request{Limit: &store.Limit{Zone: zone, Window: time.Minute}, ClientKey: "k", Events: events, Cost: 1}
}

// at runs an operation on the bucket at a shard.
func (s *sharded) at(shard string, op algorithm.Operation, r store.Request) store.State {
	r.At = &store.Place{Shard: shard}
	asks := store.Asks([]store.Request{r})
	s.run(op, asks)
	return asks[0].State
}

// TestWaitingOpensWithTheOthersEnd: what is asked for a request in line opens no window that ends later than that of
// the other owner.
func TestWaitingOpensWithTheOthersEnd(t *testing.T) {
	twoOwners(t, func(t *testing.T, s *sharded, o *Owners) {
		r := clientOf("zone", 1)
		s.at("a", algorithm.Charge, r)
		pass(50 * time.Second)
		if st := o.CheckAhead(t.Context(), r, time.Minute); st.Err != nil || st.Allowed {
			t.Errorf("although an owner is full: %+v", st)
		}
		was, now := s.at("a", algorithm.Peek, r), s.at("b", algorithm.Peek, r)
		if by := time.Duration(now.Content[1]-was.Content[1]) * time.Microsecond; by.Abs() > atOnce {
			t.Errorf("the window of the other owner ends %v later", by)
		}
	})
}

// TestRefusalEndsATake: a zone asks none of its further owners once another zone has refused, and gives back what the
// first one gave.
func TestRefusalEndsATake(t *testing.T) {
	twoOwners(t, func(t *testing.T, s *sharded, o *Owners) {
		r, full := clientOf("zone", 5), clientOf("full", 1)
		s.at("a", algorithm.Charge, full)
		asks := store.Asks([]store.Request{r, full})
		if o.Take(t.Context(), asks); asks[0].Allowed || asks[0].Err != nil || asks[1].Allowed || asks[1].RetryAfter == 0 {
			t.Errorf("the answers are %+v and %+v", asks[0].State, asks[1].State)
		}
		pass(time.Second)
		if st := s.at("a", algorithm.Peek, r); st.Used != 0 {
			t.Errorf("the first owner has %d", st.Used)
		}
		if st := s.at("b", algorithm.Peek, r); st.Content != (store.Content{}) {
			t.Errorf("the second owner has %+v", st.Content)
		}
	})
}

// TestSilentOwnerIsWaitedForOnce: a request that one owner does not answer waits no longer than others, and opens
// nothing at the other owner.
func TestSilentOwnerIsWaitedForOnce(t *testing.T) {
	for name, ask := range map[string]func(o *Owners, ctx context.Context, asks []*store.Ask){"take": (*Owners).Take, "check": (*Owners).Admit} {
		for _, silent := range []string{"a", "b"} {
			twoOwners(t, func(t *testing.T, s *sharded, o *Owners) {
				s.silent = silent
				asks, began := store.Asks([]store.Request{clientOf("zone", 5)}), time.Now()
				if ask(o, t.Context(), asks); asks[0].Err == nil {
					t.Errorf("%s, %s is silent: %+v", name, silent, asks[0].State)
				}
				if waited := time.Since(began); waited > silence*3/2 {
					t.Errorf("%s, %s is silent: it waits %v", name, silent, waited)
				}
				s.silent = ""
				for _, shard := range []string{"a", "b"} {
					if st := s.at(shard, algorithm.Peek, clientOf("zone", 5)); st.Content != (store.Content{}) {
						t.Errorf("%s, %s is silent: %s has %+v", name, silent, shard, st.Content)
					}
				}
			})
		}
	}
}

// TestMovedClientIsShownOnce, with what its fuller bucket has, and a refusal of all owners is one.
func TestMovedClientIsShownOnce(t *testing.T) {
	twoOwners(t, func(t *testing.T, s *sharded, o *Owners) {
		r := clientOf("zone", 5)
		r.Cost = 4
		s.at("a", algorithm.Charge, r)
		r.Cost = 1
		o.Take(t.Context(), store.Asks([]store.Request{r}))
		var shown []int64
		o.Walk([]store.Request{r}, hasLimit, func(_ int, _ string, st *store.State) { shown = append(shown, st.Used) })
		if !slices.Equal(shown, []int64{5}) {
			t.Errorf("it is shown to have used %v", shown)
		}
		r.Cost = 5
		o.Take(t.Context(), store.Asks([]store.Request{r}))
		before := o.Figures().LocalRefusals
		if !o.RefuseKnown(store.Asks([]store.Request{r})) || o.Figures().LocalRefusals != before+1 {
			t.Errorf("%d refusals are counted", o.Figures().LocalRefusals-before)
		}
	})
}

// TestClocksOfOwnersMayDiffer: a bucket opens for as long as the other owner's, whatever their clocks say.
func TestClocksOfOwnersMayDiffer(t *testing.T) {
	for _, kind := range []store.Algorithm{store.FixedWindow, store.GCRA} {
		for _, skew := range []time.Duration{-10 * time.Minute, 0, 10 * time.Minute} {
			for _, takes := range []bool{true, false} {
				twoOwners(t, func(t *testing.T, s *sharded, o *Owners) {
					s.skew = skew
					r := clientOf("zone", 100)
					r.Limit.Algorithm, r.Cost = kind, 20
					s.at("a", algorithm.Charge, r)
					pass(2 * time.Second)
					asks := store.Asks([]store.Request{r})
					if takes {
						o.Take(t.Context(), asks)
					} else if o.Admit(t.Context(), asks); asks[0].Allowed {
						o.Settle([]*store.Request{&asks[0].Request}, nil)
					}
					pass(time.Second)
					r.Cost = 1
					was, now := s.at("a", algorithm.Peek, r), s.at("b", algorithm.Peek, r)
					left := func(st store.State) int64 { return algorithm.Known{Content: st.Content}.Left(r.Limit, st.Now) }
					if by := time.Duration(left(now)-left(was)) * time.Microsecond; by.Abs() > 2*atOnce || !asks[0].Allowed {
						t.Errorf("%s, clocks %v apart, takes %v: the bucket of the new owner ends %v later; %+v", kind, skew, takes, by, asks[0].State)
					}
				})
			}
		}
	}
}

// TestPresentOwnerSaysWhenItResets, in whatever order the owners are asked.
func TestPresentOwnerSaysWhenItResets(t *testing.T) {
	answer := func(shard string, reset int64) *store.Ask {
		r := clientOf("zone", 5)
		r.At = &store.Place{Shard: shard}
		return &store.Ask{Request: r, State: store.State{Allowed: true, Now: 1, Reset: reset}}
	}
	was, is := answer("a", 10), answer("b", 20)
	for _, of := range [][]*store.Ask{{was, is}, {is, was}} {
		if st := joined(of, "b"); st.Reset != 20 {
			t.Errorf("the client is told that it resets at %d, want 20", st.Reset)
		}
	}
}

// TestAnswersOfTwoOwners: what one of them may have spent is no refusal, a penalty ends by the clock of the other, and
// one that is gone has nothing to give back.
func TestAnswersOfTwoOwners(t *testing.T) {
	of := func(states ...store.State) (all []*store.Ask) {
		for i, st := range states {
			all = append(all, &store.Ask{Request: store.Request{At: &store.Place{Shard: string(rune('a' + i))}}, State: st})
		}
		return all
	}
	refused := store.State{Now: 1000, RetryAfter: time.Second}
	if st := joined(of(refused, store.State{Err: store.ErrUncertain}), "a"); !errors.Is(st.Err, store.ErrUncertain) {
		t.Errorf("a refusal beside an uncertain take: %+v", st)
	}
	penalized := store.State{Now: 501_000, Penalty: 502_000, RetryAfter: time.Millisecond}
	if st := joined(of(store.State{Now: 1000, Allowed: true}, penalized), "a"); st.Penalty != 2000 {
		t.Errorf("a penalty of a millisecond ends at %d, want 2000", st.Penalty)
	}
	if st := refunded(of(store.State{Now: 1000}, store.State{Err: store.ErrGone}), "a"); st.Err != nil {
		t.Errorf("a refund at a shard that is gone: %v", st.Err)
	}
	taken := of(store.State{Now: 1000, Allowed: true}, store.State{Err: store.ErrUncertain})
	a := &store.Ask{State: joined(taken, "a")}
	back := (&parts{of: [][]*store.Ask{taken}}).taken(0, a)
	if a.Shard() != "b" || len(back) != 1 || back[0].Shard() != "a" {
		t.Errorf("an uncertain take is one of shard %q, and %d are given back", a.Shard(), len(back))
	}
}

// TestUncertainTakeIsChargedElsewhere: only where it was taken may it count already.
func TestUncertainTakeIsChargedElsewhere(t *testing.T) {
	twoOwners(t, func(t *testing.T, s *sharded, o *Owners) {
		r := clientOf("zone", 5)
		r.At = &store.Place{Shard: "a"}
		o.SettleUnknown([]*store.Request{&r}, []int64{0}, []*store.Late{nil})
		pass(time.Second)
		if a, b := s.at("a", algorithm.Peek, r).Used, s.at("b", algorithm.Peek, r).Used; a != 0 || b != 1 {
			t.Errorf("%d and %d are used, want 0 and 1", a, b)
		}
	})
}

// TestWindowThatIsAboutToEndIsClosed: a call that comes once it has would open one of which the other owner lacks the end.
func TestWindowThatIsAboutToEndIsClosed(t *testing.T) {
	limit, left := clientOf("zone", 5).Limit, closing.Microseconds()
	if soon, later := openFor(limit, left), openFor(limit, left+1); soon != 0 || later != left+1 {
		t.Errorf("windows are taken to last %d and %d more, want 0 and %d", soon, later, left+1)
	}
}

// TestChargeGoesToTheOwnersOfTheLatestConfig, also to one that the config of the request does not know.
func TestChargeGoesToTheOwnersOfTheLatestConfig(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry, before := NewRegistry(nil), &sharded{newServers(1), "a"}
		old := New(registry, before, Options{})
		latest := New(registry, &sharded{before.servers, "ba"}, Options{})
		latest.Run()
		r := clientOf("zone", 5)
		NewOwners(old).Settle([]*store.Request{&r}, []int64{0})
		pass(time.Second)
		if a, b := before.at("a", algorithm.Peek, r).Used, before.at("b", algorithm.Peek, r).Used; a != 1 || b != 1 {
			t.Errorf("%d and %d are used, want 1 each", a, b)
		}
		old.Leave()
		latest.Leave()
	})
}

// TestLastOwnerHasTheChargeAlone: if its shard is gone then, the charge is lost.
func TestLastOwnerHasTheChargeAlone(t *testing.T) {
	twoOwners(t, func(t *testing.T, s *sharded, o *Owners) {
		latest := New(o.registry, &sharded{s.servers, "b"}, Options{})
		defer latest.Leave()
		for w, want := range map[*Ledger]bool{o.Ledger: true, latest: false} {
			var all settled
			o.settle(&all, w, new(clientOf("zone", 5)), 1, nil)
			for _, part := range all.reqs {
				if part.Cost > 0 && part.Shared != want {
					t.Errorf("a charge at %s is shared: %t", part.Shard(), part.Shared)
				}
			}
		}
	})
}

// goneShard is a shard that is in the config no more.
type goneShard struct {
	*simulation
	charges int
}

func (s *goneShard) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.charges += len(reqs)
	go func() {
		for i := range reqs {
			report(i, store.State{Err: store.ErrGone})
		}
	}()
}

// TestChargeThatOthersHaveIsNotLost: operators are told of no charge that is gone with a former owner.
func TestChargeThatOthersHaveIsNotLost(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		shard := &goneShard{simulation: s}
		gone := New(l.registry, shard, Options{OnUndelivered: func(_ string, _ *store.Limit, op algorithm.Operation, n int64, err error) {
			t.Errorf("%d undelivered: %s, %v", n, op, err)
		}})
		gone.Run()
		gone.ChargeDetached([]*store.Request{new(requestOf("alice", 5))})
		pass(time.Second)
		gone.Leave()
		if shard.charges != 1 {
			t.Errorf("the shard got %d charges, want 1", shard.charges)
		}
	})
}
