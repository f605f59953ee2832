package ledger

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// simulation is a remote store in a synctest bubble: a primary and a replica that
// run the algorithms, a slow network that loses replies, and outages. Tests with
// Redis cover Redis itself; this one covers the interleavings that the ledger meets.
type simulation struct {
	mu  sync.Mutex
	rng *rand.Rand
	// skew is how much the store's clock is ahead of this process's.
	skew    time.Duration
	primary map[string]algorithm.Bucket
	replica map[string]algorithm.Bucket
	// ran is when the primary ran its last operation.
	ran int64
	// strays are what plain charges have counted where no bucket was.
	strays map[string]int64
	// lag is how far the replica is behind.
	lag time.Duration
	// lossy is the part of replies that are lost; down is set in an outage of
	// all, away while the replica answers alone.
	lossy      float64
	down, away bool
	// checks and writes count the calls; orphans, the charges of a window that was said
	// to be open and was not stored.
	checks, writes, orphans int
	// sizes are the numbers of charges in the detached calls.
	sizes []int
	// asking counts the checks in flight for each bucket; most is their maximum.
	asking map[string]int
	most   int
	// touched is called with mu held whenever the primary has changed, and when a
	// charge vanishes; landed is the cost concerned.
	touched func(landed int64, vanished bool)
	// said receives the primary's answers when they arrive.
	said func(st *store.State)
}

func newSimulation(seed uint64) *simulation {
	rng := rand.New(rand.NewPCG(seed, 1))
	return &simulation{
		rng: rng, skew: time.Duration(rng.Int64N(int64(4*time.Hour))) - 2*time.Hour,
		primary: map[string]algorithm.Bucket{}, replica: map[string]algorithm.Bucket{}, strays: map[string]int64{}, asking: map[string]int{},
		touched: func(int64, bool) {}, said: func(*store.State) {},
	}
}

// simulated runs a test in a bubble, with a ledger of a simulated store.
func simulated(t *testing.T, test func(t *testing.T, s *simulation, l *Ledger)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewRegistry(nil), s, Options{})
		test(t, s, l)
		l.Leave()
	})
}

// pass lets d pass on the clock of the bubble that the test runs in. Outside of one it would
// sleep: the clocks of bubbles begin in the year 2000.
func pass(d time.Duration) {
	if time.Now().Year() > 2010 {
		panic("pass outside of a synctest bubble")
	}
	time.Sleep(d) // in the bubble's time
}

func (s *simulation) now() int64 { return time.Now().Add(s.skew).UnixMicro() }

// travel delays a message.
func (s *simulation) travel() {
	s.mu.Lock()
	d := time.Duration(20+s.rng.IntN(800)) * time.Microsecond
	s.mu.Unlock()
	pass(d)
}

// setDown begins or ends an outage of the store, or of the primary alone.
func (s *simulation) setDown(down, away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down, s.away = down, away
}

func (s *simulation) chance(p float64) bool { return s.rng.Float64() < p }

func keyOf(r *store.Request) string { return r.Limit.Zone + "/" + r.ClientKey }

func bucketIn(m map[string]algorithm.Bucket, r *store.Request) algorithm.Bucket {
	b, ok := m[keyOf(r)]
	if !ok {
		b = algorithm.New(r.Limit)
		m[keyOf(r)] = b
	}
	return b
}

// delivery is how long a charge may take: one of a window that is said to be open for longer
// is a plain one, which calls no script.
const delivery = 100 * time.Millisecond

// stray reports whether a charge is a plain one that finds no bucket, and counts it. mu is
// held.
func (s *simulation) stray(op algorithm.Operation, r *store.Request) bool {
	if op != algorithm.Charge || r.Until <= s.now()+delivery.Microseconds() || bucketIn(s.primary, r).(*algorithm.FixedWindow).IsOpen(s.now()) {
		return false
	}
	s.orphans++
	s.strays[keyOf(r)] += r.Cost
	s.touched(r.Cost, false)
	return true
}

// mend gives a stray charge its window, by a script that charges nothing.
func (s *simulation) mend(r store.Request) store.State {
	r.Cost, r.Until = 0, 0
	st := s.run(algorithm.Charge, []store.Request{r})[0]
	if st.Err != nil {
		st.Err = errLost
	}
	return st
}

// write runs an operation of this process in the primary. mu is held.
func (s *simulation) write(op algorithm.Operation, r store.Request) store.State {
	landed := int64(0)
	if b, ok := bucketIn(s.primary, &r).(*algorithm.FixedWindow); ok && op == algorithm.Charge && r.Until > s.now() && !b.IsOpen(s.now()) {
		s.orphans++
	}
	if op == algorithm.Charge {
		landed = r.Cost
	}
	st := s.replicate(op, r)
	s.touched(landed, false)
	return st
}

// others runs an operation of another process.
func (s *simulation) others(op algorithm.Operation, r store.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replicate(op, r)
	s.touched(0, false)
}

// sent is the number of writes so far.
func (s *simulation) sent() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writes
}

// callSizes returns how many charges each detached call has brought so far.
func (s *simulation) callSizes() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.sizes)
}

// used is the cost spent in the primary.
func (s *simulation) used(r store.Request) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bucketIn(s.primary, &r).View(&r, s.now(), false).Used + s.strays[keyOf(&r)]
}

// replicate runs an operation in the primary and, later, in the replica. mu is
// held.
func (s *simulation) replicate(op algorithm.Operation, r store.Request) store.State {
	// A server runs one script at a time, and none in less than a microsecond.
	now := max(s.now(), s.ran+1)
	s.ran = now
	if stray := s.strays[keyOf(&r)]; stray > 0 {
		// A script that finds a stray charge gives it its window.
		delete(s.strays, keyOf(&r))
		adopted := r
		adopted.Cost = stray
		s.replicate(algorithm.Charge, adopted)
	}
	st := op.Run(bucketIn(s.primary, &r), &r, now)
	if lag := s.lag; lag == 0 {
		op.Run(bucketIn(s.replica, &r), &r, now)
	} else {
		time.AfterFunc(lag, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			op.Run(bucketIn(s.replica, &r), &r, now)
		})
	}
	return st
}

// reset is an operator's reset.
func (s *simulation) reset(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.primary, key)
	delete(s.strays, key)
	time.AfterFunc(s.lag, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.replica, key)
	})
	s.touched(0, false)
}

var (
	errDown = fmt.Errorf("%w: simulated outage", store.ErrNotExecuted)
	errLost = fmt.Errorf("%w: simulated loss", store.ErrUncertain)
)

func (s *simulation) Check(ctx context.Context, asks []*store.Ask) {
	s.begin(requestsOf(asks), 1)
	defer s.begin(requestsOf(asks), -1)
	s.travel()
	s.mu.Lock()
	s.checks++
	down, lost := s.down, s.chance(s.lossy)
	for i := range asks {
		r := &asks[i].Request
		now := s.now()
		b := bucketIn(s.replica, r)
		switch asks[i].State = b.View(r, now, false); {
		case (!r.Primary || s.away) && asks[i].Reset != 0:
			asks[i].Replica = true
		case s.away:
			asks[i].State = store.State{Err: errDown}
		default:
			asks[i].State = s.write(algorithm.Check, *r)
		}
	}
	s.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		failAll(asks, ctx.Err())
		return
	case down:
		pass(20 * time.Millisecond)
		failAll(asks, errDown)
		return
	case lost:
		pass(50 * time.Millisecond)
		failAll(asks, errDown)
		return
	}
	s.travel()
	for _, a := range asks {
		s.tell(&a.State)
	}
}

// deliver passes the primary's answers to said.
func (s *simulation) deliver(states []store.State) {
	for i := range states {
		s.tell(&states[i])
	}
}

func (s *simulation) tell(st *store.State) {
	if !st.Replica && st.Err == nil {
		s.said(st)
	}
}

func requestsOf(asks []*store.Ask) (reqs []store.Request) {
	for _, a := range asks {
		reqs = append(reqs, a.Request)
	}
	return reqs
}

func failAll(asks []*store.Ask, err error) {
	for _, a := range asks {
		a.State = store.State{Err: err}
	}
}

// answer makes writes, and waits for them.
func (s *simulation) answer(op algorithm.Operation, asks []*store.Ask) {
	for i, st := range s.run(op, requestsOf(asks)) {
		asks[i].State = st
	}
}

func (s *simulation) begin(reqs []store.Request, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range reqs {
		key := keyOf(&reqs[i])
		s.asking[key] += n
		s.most = max(s.most, s.asking[key])
	}
}

func fail(states []store.State, err error) {
	for i := range states {
		states[i] = store.State{Err: err}
	}
}

// run makes writes and waits for them.
func (s *simulation) run(op algorithm.Operation, reqs []store.Request) []store.State {
	states := make([]store.State, len(reqs))
	s.travel()
	s.mu.Lock()
	s.writes++
	if s.down || s.away {
		s.mu.Unlock()
		pass(20 * time.Millisecond)
		fail(states, errDown)
		return states
	}
	lost := s.chance(s.lossy)
	if lost && s.chance(0.5) {
		for i := range reqs {
			s.touched(reqs[i].Cost, true)
		}
		s.mu.Unlock()
		pass(50 * time.Millisecond)
		fail(states, errLost)
		return states
	}
	var strays []int
	for i := range reqs {
		if s.stray(op, &reqs[i]) {
			strays = append(strays, i)
		} else {
			states[i] = s.write(op, reqs[i])
		}
	}
	s.mu.Unlock()
	if lost {
		pass(50 * time.Millisecond)
		fail(states, errLost)
		return states
	}
	s.travel()
	for _, i := range strays {
		states[i] = s.mend(reqs[i])
	}
	s.deliver(states)
	return states
}

func (s *simulation) Charge(_ context.Context, asks []*store.Ask) {
	s.answer(algorithm.Charge, asks)
}

func (s *simulation) Take(_ context.Context, asks []*store.Ask) {
	s.answer(algorithm.Take, asks)
}

func (s *simulation) Refund(_ context.Context, asks []*store.Ask) {
	s.answer(algorithm.Refund, asks)
}

func (s *simulation) Penalize(_ context.Context, asks []*store.Ask) {
	s.answer(algorithm.Penalize, asks)
}

func (s *simulation) Peek(ctx context.Context, asks []*store.Ask) {
	s.Check(ctx, asks)
}

func (s *simulation) PenalizeDetached(reqs []*store.Request) {
	go s.run(algorithm.Penalize, storetest.Posted(reqs))
}

func (s *simulation) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	s.mu.Lock()
	s.sizes = append(s.sizes, len(reqs))
	s.mu.Unlock()
	go func() {
		pass(2 * time.Millisecond)
		reportAll(s.run(algorithm.Charge, storetest.Posted(reqs)), report)
	}()
}

func (s *simulation) RefundReported(reqs []*store.Request, report func(i int, st store.State)) {
	go func() {
		pass(2 * time.Millisecond)
		reportAll(s.run(algorithm.Refund, storetest.Posted(reqs)), report)
	}()
}

// reportAll reports states, unless nobody wants to know.
func reportAll(states []store.State, report func(i int, st store.State)) {
	for i, st := range states {
		if report != nil {
			report(i, st)
		}
	}
}

func (*simulation) Owner(string) string { return "shard" }

func (*simulation) Owners(string) []string { return []string{"shard"} }

func (*simulation) Hurry(string) {}

func (*simulation) Warm(context.Context) {}

var _ store.Remote = (*simulation)(nil)
