// Package history keeps what has happened in each zone of the process: in steps of 10 seconds for an
// hour, and of 5 minutes for a week. It outlives configs, and ends with the process.
//
// [History.Start] samples counters that exist. Between two samples a [History] stores what they have
// grown by.
package history

import (
	"math"
	"slices"
	"sync"
	"time"
)

// Totals are the counts of a zone since the process began.
type Totals struct {
	Allowed     int64
	WouldRefuse int64
	// Refused has the requests of blocked clients, and those that on_error refused.
	Refused int64
	// Unchecked are the requests that on_error let pass.
	Unchecked int64
	// Waited are the requests that were held until they fit or were refused.
	Waited int64
	// Stores are those in which the zone counts.
	Stores []string
}

// Calls are the calls of a store for which requests have waited.
type Calls struct {
	Count   int64
	Seconds float64
}

// Reading is what has happened until an instant: in the zones that are in use, and in their stores.
type Reading struct {
	Zones  map[string]Totals
	Stores map[string]Calls
}

// Step is what has happened in a zone during one step.
type Step struct {
	Allowed, WouldRefuse, Refused, Unchecked, Waited, Calls uint32
	CallSeconds                                             float32
}

// add adds counts. Those that do not fit stay at the most that do.
func (s *Step) add(o Step) {
	plus := func(sum *uint32, n uint32) { *sum = count(int64(*sum) + int64(n)) }
	plus(&s.Allowed, o.Allowed)
	plus(&s.WouldRefuse, o.WouldRefuse)
	plus(&s.Refused, o.Refused)
	plus(&s.Unchecked, o.Unchecked)
	plus(&s.Waited, o.Waited)
	plus(&s.Calls, o.Calls)
	s.CallSeconds += o.CallSeconds
}

// Range is how far a history goes back, and in which steps.
type Range struct {
	Name string
	Step time.Duration
	// Steps is their number.
	Steps int
	ring  int
}

// Ranges are the ranges that there are.
var Ranges = []Range{
	{"1h", fineStep, 360, fine},
	{"24h", coarseStep, 288, coarse},
	{"1w", coarseStep, 2016, coarse},
}

const (
	fineStep   = 10 * time.Second
	coarseStep = 5 * time.Minute
)

// The rings of a zone.
const (
	fine = iota
	coarse
	rings
)

// sizes are how many steps each ring has, and lengths how long these are.
var (
	sizes   = [rings]int{360, 2016}
	lengths = [rings]time.Duration{fineStep, coarseStep}
)

// MaxZones bounds how many zones have a history. Each takes 76,032 bytes, once a request has met it.
const MaxZones = 256

// slot is a step that began so many lengths after the epoch.
type slot struct {
	at uint32
	Step
}

// zone is the history of a zone. A ring is nil until the zone has something in it.
type zone struct {
	rings [rings][]slot
	// latest is the coarse step in which something happened last.
	latest uint32
}

func (z *zone) add(ring int, at uint32, s Step) {
	if z.rings[ring] == nil {
		z.rings[ring] = make([]slot, sizes[ring])
	}
	into := &z.rings[ring][int(at)%sizes[ring]]
	if into.at != at {
		*into = slot{at: at}
	}
	into.add(s)
}

// History is the history of the zones of a process. Its zero value is empty.
type History struct {
	mu    sync.Mutex
	zones map[string]*zone
	// sampled are the steps, in rings as those of a zone, of which anything is known.
	sampled [rings][]uint32
	last    Reading
	// lastAt is when last was read; zero if there was none since sampling began.
	lastAt  Instant
	sampler sampler
}

// Default is the history of this process.
var Default History

// Instant is a point in time by the clock of the machine, and by one that is never set and does not
// run while the machine is suspended.
type Instant struct {
	Wall    time.Time
	Running time.Duration
}

// What may lie between two samples. Where both clocks do not agree by more than mostStep, the clock was
// set, or the machine was suspended.
const (
	leastApart = fineStep / 2
	mostApart  = fineStep * 3 / 2
	mostStep   = time.Second
)

// sample stores what has happened since the last sample. It stores nothing if that is long ago by
// either clock, or the clock was set: it is not known then in which steps it happened.
func (h *History) sample(at Instant, now Reading) {
	h.mu.Lock()
	defer h.mu.Unlock()
	last, lastAt := h.last, h.lastAt
	wall, running := at.Wall.Round(0).Sub(lastAt.Wall.Round(0)), at.Running-lastAt.Running
	isContinuous := !lastAt.Wall.IsZero() && (wall-running).Abs() <= mostStep && running <= mostApart
	if isContinuous && running < leastApart {
		return
	}
	h.last, h.lastAt = now, at
	if wall < 0 {
		h.dropFrom(at.Wall)
	}
	if isContinuous {
		h.store(at.Wall.Add(-running/2), last, now)
	}
}

// store stores what has happened between two readings, in the steps that have the instant at.
func (h *History) store(at time.Time, last, now Reading) {
	var steps [rings]uint32
	for ring := range rings {
		steps[ring] = stepOf(ring, at)
		if h.sampled[ring] == nil {
			h.sampled[ring] = make([]uint32, sizes[ring])
		}
		h.sampled[ring][int(steps[ring])%sizes[ring]] = steps[ring]
	}
	for name, z := range h.zones {
		if z.latest+uint32(sizes[coarse]) <= steps[coarse] {
			delete(h.zones, name)
		}
	}
	for name, totals := range now.Zones {
		step := grown(last, now, last.Zones[name], totals)
		if step == (Step{}) {
			continue
		}
		z := h.zone(name, now)
		if z == nil {
			continue
		}
		z.latest = steps[coarse]
		for ring := range rings {
			z.add(ring, steps[ring], step)
		}
	}
}

// zone returns the history of a zone, to which something is added. It is nil if there are as many as may
// be and all of them are in use.
func (h *History) zone(name string, now Reading) *zone {
	if z := h.zones[name]; z != nil {
		return z
	}
	if len(h.zones) >= MaxZones {
		oldest, at := "", uint32(math.MaxUint32)
		for other, z := range h.zones {
			if _, inUse := now.Zones[other]; !inUse && z.latest < at {
				oldest, at = other, z.latest
			}
		}
		if oldest == "" {
			return nil
		}
		delete(h.zones, oldest)
	}
	if h.zones == nil {
		h.zones = map[string]*zone{}
	}
	z := new(zone)
	h.zones[name] = z
	return z
}

// dropFrom drops the steps that end after an instant to which the clock was set back.
func (h *History) dropFrom(at time.Time) {
	for ring := range rings {
		first := stepOf(ring, at)
		for i, at := range h.sampled[ring] {
			if at >= first {
				h.sampled[ring][i] = 0
			}
		}
		for _, z := range h.zones {
			z.latest = min(z.latest, stepOf(coarse, at))
			for i := range z.rings[ring] {
				if z.rings[ring][i].at >= first {
					z.rings[ring][i] = slot{}
				}
			}
		}
	}
}

func stepOf(ring int, at time.Time) uint32 {
	return uint32(max(0, at.Unix()) / int64(lengths[ring].Seconds()))
}

// grown returns what has happened in a zone between two readings. A count that is less than before has
// begun anew.
func grown(last, now Reading, was, is Totals) Step {
	s := Step{
		Allowed: since(was.Allowed, is.Allowed), WouldRefuse: since(was.WouldRefuse, is.WouldRefuse), Refused: since(was.Refused, is.Refused),
		Unchecked: since(was.Unchecked, is.Unchecked), Waited: since(was.Waited, is.Waited),
	}
	if s == (Step{}) {
		// Other zones have called the store.
		return s
	}
	for _, name := range is.Stores {
		before, after := last.Stores[name], now.Stores[name]
		if after.Count < before.Count {
			before = Calls{}
		}
		s.Calls = count(int64(s.Calls) + after.Count - before.Count)
		s.CallSeconds += float32(after.Seconds - before.Seconds)
	}
	return s
}

func since(was, is int64) uint32 {
	if is < was {
		return count(is)
	}
	return count(is - was)
}

func count(n int64) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }

// Zones returns the names of the zones of which something is kept, in alphabetical order.
func (h *History) Zones() (names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range h.zones {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Steps returns what has happened in a zone in a range, the oldest step first, and when that began. A step
// is nil if nothing is known of it. The last step is the present one if partial, which [History.Partial]
// returns for the same instant, is more than 0, and otherwise the one before. A zone without a history has
// had no request, unless others take all the room.
func (h *History) Steps(name string, r Range, now time.Time, partial time.Duration) (start time.Time, steps []*Step) {
	h.mu.Lock()
	defer h.mu.Unlock()
	end := int64(stepOf(r.ring, now))
	if partial > 0 {
		end++
	}
	first := max(0, end-int64(r.Steps))
	z := h.zones[name]
	isLeftOut := z == nil && len(h.zones) >= MaxZones
	for at := first; at < end; at++ {
		var s *Step
		i := int(at) % sizes[r.ring]
		if h.sampled[r.ring] != nil && h.sampled[r.ring][i] == uint32(at) && !isLeftOut {
			s = new(Step)
			if z != nil && z.rings[r.ring] != nil && z.rings[r.ring][i].at == uint32(at) {
				*s = z.rings[r.ring][i].Step
			}
		}
		steps = append(steps, s)
	}
	return time.Unix(first*int64(r.Step.Seconds()), 0), steps
}

// Partial returns how much is known of the present step of a range, in all zones alike.
func (h *History) Partial(r Range, now time.Time) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.knownOf(r.ring, int64(stepOf(r.ring, now)), now)
}

// knownOf returns how much is known of a step that is not over: the steps of ten seconds in it that are.
func (h *History) knownOf(ring int, step int64, now time.Time) (known time.Duration) {
	if h.sampled[fine] == nil {
		return 0
	}
	for at := step * int64(lengths[ring]/fineStep); at < int64(stepOf(fine, now)); at++ {
		if h.sampled[fine][int(at)%sizes[fine]] == uint32(at) {
			known += fineStep
		}
	}
	return known
}

// Forget drops everything. A process of tests that passes to another test begins anew.
func (h *History) Forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.zones, h.sampled, h.last, h.lastAt = nil, [rings][]uint32{}, Reading{}, Instant{}
}
