package simulation

import (
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
)

// Run is one history: zones with their clients, two Caddys, and what goes wrong.
type Run struct {
	*world
	zones []*zone
	// takes is set if all requests take, and mixed if some do, in the same buckets.
	takes, mixed bool
	onError      string
	// waits is set if some refused requests wait.
	waits bool
	net   *network
	// opts are the options of all processes, and former the processes that have ended.
	opts           ledger.Options
	caddys, former []*process
	clients        []*client
	end            int64
	// sequential is set if each client sends its next request once the last one has ended.
	sequential bool
	// faults is set if messages are lost or servers are away, resets if operators reset, crowded if processes forget
	// buckets that are not in use.
	faults, resets, crowded bool
	// leaves is the part of requests whose client leaves while they wait.
	leaves  float64
	failure string
	// Trace, if set, gets a line for each step.
	Trace io.Writer
	// requests is how many requests were made; unanswered, how many of them wait for an answer.
	requests, unanswered int
}

// The ways of on_error.
const (
	allow = "allow"
	deny  = "deny"
	local = "local"
)

// windows is about how many windows a history lasts.
const windows = 20

// NewRun returns the history of a seed, on servers of that kind.
func NewRun(seed uint64, at Servers) *Run {
	w := newWorld(seed)
	rng := w.rng
	s := &Run{world: w, sequential: rng.chance(0.1)}
	s.takes, s.waits = s.sequential || rng.chance(0.4), !s.sequential && rng.chance(0.3)
	s.mixed = !s.takes && !s.waits && seed%2 == 0
	for i := range oneOf(rng, 1, 1, 1, 2) {
		s.zones = append(s.zones, s.newZone("zone"+strconv.Itoa(i)))
	}
	s.end = windows * s.zones[0].limit.Window.Microseconds()
	s.onError = oneOf(rng, allow, deny, local, local)
	s.net = &network{
		world: w, skew: rng.between(-2*time.Hour, 2*time.Hour).Truncate(time.Microsecond), ran: s.ran, sent: map[string]int{},
		lag: oneOf(rng, 0, 0, time.Millisecond, 50*time.Millisecond, 3*time.Second),
	}
	s.net.servers = at(s.net.skew)
	s.faults, s.resets = rng.chance(0.5), rng.chance(0.2)
	s.opts.Trust = oneOf(rng, ledger.NoTrust, time.Second/2, time.Second, time.Second, time.Second)
	s.opts.ChargeDelay = oneOf(rng, 0, 25*time.Millisecond, 50*time.Millisecond)
	if !s.sequential {
		s.leaves = oneOf(rng, 0, 0.01, 0.05)
		// A process asks replicas for a bucket that it has forgotten. Where messages are lost, it counts anew, and
		// forgets refunds too.
		s.crowded = s.net.lag == 0 && !s.faults || s.faults && rng.chance(0.3)
	}
	for i := range 1 + rng.IntN(3) {
		var beside []*client
		key := "client" + strconv.Itoa(i)
		own := w.stream(key, 0)
		for _, z := range s.zones {
			beside = append(beside, &client{zone: z, key: key, rng: own, resets: map[int64]int64{}})
		}
		for _, c := range beside {
			c.beside = beside
		}
		s.clients = append(s.clients, beside...)
	}
	caddys := oneOf(rng, 1, 2, 2)
	if s.sequential {
		caddys = 1
	}
	for i := range caddys {
		s.caddys = append(s.caddys, s.newProcess("caddy"+strconv.Itoa(i), rng))
	}
	for _, c := range s.clients {
		if c == c.beside[0] {
			s.come(c.beside)
		}
	}
	s.repeat(s.faults, s.window(), "fault", s.fault)
	s.repeat(s.resets, 3*s.window(), "reset", s.reset)
	s.repeat(rng.chance(0.3), 3*s.window(), "reload", s.reload)
	// The counts of a process are not known once it has ended.
	s.repeat(s.faults && rng.chance(0.3), 5*s.window(), "restart", s.restart)
	s.repeat(s.crowded, s.window()/4, "crowd", s.crowdOut)
	return s
}

func (s *Run) fail(format string, args ...any) {
	if s.failure == "" {
		s.failure = fmt.Sprintf("seed %d at %v (%s): ", s.seed, s.age(), s) + fmt.Sprintf(format, args...)
	}
}

// String describes what is simulated.
func (s *Run) String() string {
	return fmt.Sprintf("%v, takes %v, mixed %v, sequential %v, on_error %s, waits %v, "+
		"%d caddys, trust %v, delay %v, lag %v, faults %v, resets %v, crowded %v",
		s.zones, s.takes, s.mixed, s.sequential, s.onError, s.waits,
		len(s.caddys), s.opts.Trust, s.opts.ChargeDelay, s.net.lag, s.faults, s.resets, s.crowded)
}

// note adds a line to the trace, if there is one.
func (s *Run) note(format string, args ...any) {
	if s.Trace != nil {
		fmt.Fprintf(s.Trace, "%v "+format+"\n", append([]any{s.age()}, args...)...)
	}
}

func (s *Run) age() time.Duration { return time.Since(s.began) }

// Length is how long the history lasts.
func (s *Run) Length() time.Duration { return time.Duration(s.end) * time.Microsecond }

// Do runs the history, in a bubble of testing/synctest, and returns what was broken, or nothing. The failure names the
// seed.
func (s *Run) Do() (failure string) {
	s.pass(s.Length())
	s.mu.Lock()
	s.net.heal()
	s.mu.Unlock()
	// Requests that wait may go on later.
	for range 2 * int(s.longestWindow()/rest) {
		if s.pass(rest); !s.isBusy() {
			break
		}
	}
	s.pass(rest)
	s.mu.Lock()
	s.atEnd()
	for _, p := range s.caddys {
		p.full.Leave()
		p.leave(p.view)
	}
	s.mu.Unlock()
	// Activity after a failure ends too.
	time.Sleep(s.longestWindow() + rest) // in the bubble's time
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// rest is how long all that is in flight takes at most.
const rest = 30 * time.Second

// pass lets time pass, unless the history has failed.
func (s *Run) pass(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		time.Sleep(min(s.window(), time.Until(end))) // in the bubble's time
		s.mu.Lock()
		failed := s.failure != ""
		s.mu.Unlock()
		if failed {
			return
		}
	}
}

// window is that of the first zone.
func (s *Run) window() time.Duration { return s.zones[0].limit.Window }

func (s *Run) longestWindow() (longest time.Duration) {
	for _, z := range s.zones {
		longest = max(longest, z.limit.Window)
	}
	return longest
}

// isBusy reports whether a request is in flight somewhere.
func (s *Run) isBusy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.caddys {
		if p.registry.Figures().InFlight > 0 {
			return true
		}
	}
	return s.unanswered > 0
}
