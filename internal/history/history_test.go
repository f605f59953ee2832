package history

import (
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// clock is a machine whose clock can be set, and which can be suspended.
type clock struct {
	wall    time.Time
	running time.Duration
}

func (c *clock) run(d time.Duration)  { c.wall, c.running = c.wall.Add(d), c.running+d }
func (c *clock) step(d time.Duration) { c.wall = c.wall.Add(d) }
func (c *clock) now() Instant         { return Instant{c.wall, c.running} }

// newClock begins a moment after a whole hour, as a sampler's timer does.
func newClock() *clock { return &clock{wall: time.Unix(1_800_000_000, 3_000_000)} }

func reading(zones map[string]Totals) Reading {
	return Reading{Zones: zones, Stores: map[string]Calls{}}
}

func api(allowed int64) Reading { return reading(map[string]Totals{"api": {Allowed: allowed}}) }

// allowed returns the requests allowed in the last n steps of a range; -1 for a gap.
func allowed(h *History, zone string, r Range, n int, now time.Time) (list []int64) {
	_, steps := h.Steps(zone, r, now, h.Partial(r, now))
	for _, s := range steps[len(steps)-n:] {
		if s == nil {
			list = append(list, -1)
		} else {
			list = append(list, int64(s.Allowed))
		}
	}
	return list
}

func wantAllowed(t *testing.T, h *History, r Range, now time.Time, want ...int64) {
	t.Helper()
	if got := allowed(h, "api", r, len(want), now); !slices.Equal(got, want) {
		t.Errorf("%s: allowed are %v, want %v", r.Name, got, want)
	}
}

// TestSteps have what was counted between two samples, the first of which counts nothing.
func TestSteps(t *testing.T) {
	h, c := new(History), newClock()
	var total int64 = 500
	for i := range int64(31) {
		h.sample(c.now(), api(total))
		total += i + 1
		c.run(fineStep)
	}
	c.wall = c.wall.Add(-5 * time.Second) // between two samples
	if got := allowed(h, "api", Ranges[0], 31, c.wall); got[0] != -1 || got[30] != 30 || got[1] != 1 {
		t.Errorf("allowed are %v", got)
	}
	wantAllowed(t, h, Ranges[1], c.wall, -1, 465)
	wantAllowed(t, h, Ranges[2], c.wall, -1, 465)
	for _, r := range Ranges {
		partial := h.Partial(r, c.wall)
		start, steps := h.Steps("api", r, c.wall, partial)
		if len(steps) != r.Steps || partial != 0 || start.Unix()%int64(r.Step.Seconds()) != 0 || c.wall.Sub(start) < r.Step*time.Duration(r.Steps) || c.wall.Sub(start) >= r.Step*time.Duration(r.Steps+1) {
			t.Errorf("%s begins at %v with %d steps, of the last %v are known", r.Name, start, len(steps), partial)
		}
	}
	if s, isKnown := latest(h, "api", c.wall); !isKnown || s.Allowed != 30 {
		t.Errorf("the latest step is %+v, %v", s, isKnown)
	}
	if _, isKnown := latest(h, "api", c.wall.Add(time.Minute)); isKnown {
		t.Error("a step of a minute ago is the latest")
	}
}

// TestUnfinishedStep is the last of the long ranges, with how much of it is known.
func TestUnfinishedStep(t *testing.T) {
	h, c := new(History), newClock()
	c.run(2 * fineStep)
	total := int64(0)
	for range 35 {
		h.sample(c.now(), api(total))
		total++
		c.run(fineStep)
	}
	// Five minutes and 60 seconds, of which the first 20 and the last ten are not known.
	for want, at := range map[time.Duration]time.Time{6 * fineStep: c.wall, 5 * fineStep: c.wall.Add(-2 * fineStep), 0: c.wall.Add(-7 * fineStep)} {
		for _, r := range Ranges[1:] {
			partial := h.Partial(r, at)
			start, steps := h.Steps("api", r, at, partial)
			if partial != want || len(steps) != r.Steps {
				t.Errorf("%s at %v has %d steps, of the last %v are known, want %v", r.Name, at, len(steps), partial, want)
			}
			if end := start.Add(r.Step * time.Duration(r.Steps)); end.After(at) != (want > 0) {
				t.Errorf("%s at %v ends at %v", r.Name, at, end)
			}
		}
	}
	wantAllowed(t, h, Ranges[1], c.wall, -1, 28, 6)
	wantAllowed(t, h, Ranges[2], c.wall, -1, 28, 6)
	if partial := h.Partial(Ranges[0], c.wall); partial != 0 {
		t.Errorf("of a step of ten seconds that is not over, %v are known", partial)
	}
	// What is not known of a step is no part of its length.
	c.run(6 * fineStep)
	h.sample(c.now(), api(total))
	c.run(fineStep)
	h.sample(c.now(), api(total+5))
	wantAllowed(t, h, Ranges[1], c.wall, 28, 11)
	if partial := h.Partial(Ranges[1], c.wall); partial != 7*fineStep {
		t.Errorf("after a gap %v are known, want %v", partial, 7*fineStep)
	}
}

// TestRingsForget what is older than they are long.
func TestRingsForget(t *testing.T) {
	h, c := new(History), newClock()
	for i := range 400 {
		h.sample(c.now(), api(int64(i)))
		c.run(fineStep)
	}
	for _, n := range allowed(h, "api", Ranges[0], 360, c.wall.Add(-fineStep)) {
		if n != 1 {
			t.Fatalf("a step has %d", n)
		}
	}
}

// TestGaps: of a time in which the machine was suspended, the clock was set or the sampler did not run,
// nothing is known, and what was counted then appears nowhere.
func TestGaps(t *testing.T) {
	for name, gap := range map[string]struct {
		pass func(*clock)
		want []int64
	}{
		"suspended":       {func(c *clock) { c.step(30 * time.Second); c.run(fineStep) }, []int64{1, -1, -1, -1, -1, 1}},
		"late":            {func(c *clock) { c.run(4 * fineStep) }, []int64{1, -1, -1, -1, -1, 1}},
		"set forward":     {func(c *clock) { c.run(fineStep); c.step(20 * time.Second) }, []int64{1, -1, -1, -1, 1}},
		"set backward":    {func(c *clock) { c.run(fineStep); c.step(-20 * time.Second) }, []int64{1, 1}},
		"a moment late":   {func(c *clock) { c.run(fineStep + 3*time.Second) }, []int64{1, 1000, 1}},
		"a little slewed": {func(c *clock) { c.run(fineStep); c.step(200 * time.Millisecond) }, []int64{1, 1000, 1}},
	} {
		h, c := new(History), newClock()
		total := int64(0)
		sample := func(n int64) {
			total += n
			h.sample(c.now(), api(total))
		}
		sample(0)
		for range 9 {
			c.run(fineStep)
			sample(1)
		}
		gap.pass(c)
		sample(1000)
		c.run(fineStep)
		sample(1)
		wantAllowed(t, h, Ranges[0], c.wall, gap.want...)
		if name == "set backward" {
			c.run(time.Minute)
			// Nor is anything there of the time that was wrong.
			wantAllowed(t, h, Ranges[0], c.wall, 1, -1, -1, -1, -1, -1, -1)
		}
	}
}

// TestCountsThatBeginAnew are those of a zone that was out of use: it keeps its history meanwhile, until
// that is a week old.
func TestCountsThatBeginAnew(t *testing.T) {
	h, c := new(History), newClock()
	for _, r := range []Reading{api(100), api(110), reading(nil), reading(nil), api(7), api(3)} {
		h.sample(c.now(), r)
		c.run(fineStep)
	}
	wantAllowed(t, h, Ranges[0], c.wall.Add(-fineStep), 10, 0, 0, 7, 3)
	for range 2015 * 30 {
		h.sample(c.now(), reading(nil))
		c.run(fineStep)
	}
	if zones := h.Zones(); !slices.Equal(zones, []string{"api"}) {
		t.Errorf("after less than a week there is %v", zones)
	}
	for range 60 {
		h.sample(c.now(), reading(nil))
		c.run(fineStep)
	}
	if zones := h.Zones(); len(zones) != 0 {
		t.Errorf("after a week there is %v", zones)
	}
}

// TestSeries are each in their place, and the latency is that of the zone's stores.
func TestSeries(t *testing.T) {
	h, c := new(History), newClock()
	h.sample(c.now(), Reading{Zones: map[string]Totals{"idle": {Stores: []string{"a"}}}, Stores: map[string]Calls{"a": {10, 1}, "b": {5, 5}}})
	c.run(fineStep)
	h.sample(c.now(), Reading{
		Zones:  map[string]Totals{"api": {1, 2, 3, 4, math.MaxInt64, []string{"a", "c"}}, "idle": {Stores: []string{"a"}}},
		Stores: map[string]Calls{"a": {14, 1.5}, "b": {50, 50}, "c": {2, 0.25}},
	})
	got, isKnown := latest(h, "api", c.wall)
	if want := (Step{1, 2, 3, 4, math.MaxUint32, 6, 0.75}); !isKnown || got != want {
		t.Errorf("the step is %+v, want %+v", got, want)
	}
	if got, isKnown := latest(h, "idle", c.wall); !isKnown || got != (Step{}) {
		t.Errorf("the step of a zone without requests is %+v, %v", got, isKnown)
	}
}

// TestMemoryIsBounded: zones beyond the bound have no history unless one is out of use, and a zone takes
// as much as docs/design.md says.
func TestMemoryIsBounded(t *testing.T) {
	h, c := new(History), newClock()
	all := map[string]Totals{}
	sample := func() {
		c.run(fineStep)
		for name, totals := range all {
			totals.Allowed++
			all[name] = totals
		}
		h.sample(c.now(), reading(maps.Clone(all)))
	}
	h.sample(c.now(), reading(nil))
	for i := range MaxZones {
		all[fmt.Sprint("zone-", i)] = Totals{}
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	sample()
	runtime.GC()
	runtime.ReadMemStats(&after)
	if each := (after.HeapAlloc - before.HeapAlloc) / MaxZones; each < 70_000 || each > 85_000 {
		t.Errorf("a zone takes %d bytes", each)
	}
	all["one-more"] = Totals{}
	sample()
	if zones := h.Zones(); len(zones) != MaxZones || slices.Contains(zones, "one-more") {
		t.Errorf("there are %d zones", len(zones))
	}
	wantGap := func(name string, want bool) {
		t.Helper()
		if _, isKnown := latest(h, name, c.wall); isKnown == want {
			t.Errorf("zone %s has a history: %v", name, isKnown)
		}
	}
	wantGap("one-more", true)
	delete(all, "zone-3")
	sample()
	wantGap("one-more", false)
	wantGap("zone-3", true)
	if n := len(h.Zones()); n != MaxZones {
		t.Errorf("there are %d zones", n)
	}
}

// TestSampler samples at whole tens of seconds, once however many have started it, and while one of them
// has not stopped it. Its sleeps move the clock of a bubble.
func TestSampler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := new(History)
		reads := int64(0)
		read := func() Reading {
			reads++
			return api(reads)
		}
		time.Sleep(3 * time.Second)
		first := h.Start(read)
		time.Sleep(58 * time.Second) // a sample at once, and six
		second := h.Start(read)
		first()
		first()
		time.Sleep(time.Minute)
		synctest.Wait()
		if reads != 13 {
			t.Errorf("%d samples", reads)
		}
		wantAllowed(t, h, Ranges[0], time.Now(), -1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
		second()
		time.Sleep(time.Hour)
		synctest.Wait()
		if reads != 13 {
			t.Errorf("%d samples after the end", reads)
		}
		third := h.Start(read)
		time.Sleep(30 * time.Second)
		third()
		synctest.Wait()
		wantAllowed(t, h, Ranges[0], time.Now(), -1, 1, 1, 1)
		h.Forget()
		if zones := h.Zones(); len(zones) != 0 {
			t.Errorf("zones %v are not forgotten", zones)
		}
	})
}

// latest returns what has happened in a zone in the last step of ten seconds, or the one before if that is not
// stored yet. It reports false if neither is known.
func latest(h *History, name string, now time.Time) (s Step, isKnown bool) {
	_, steps := h.Steps(name, Range{Step: fineStep, Steps: 2, ring: fine}, now, 0)
	for _, step := range slices.Backward(steps) {
		if step != nil {
			return *step, true
		}
	}
	return Step{}, false
}
