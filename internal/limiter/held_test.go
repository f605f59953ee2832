package limiter

import (
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestRefusedWhileSomethingIsHeld: while a request runs that may turn out to be free, another one that has no room is
// told to come again soon, and earns no penalty.
func TestRefusedWhileSomethingIsHeld(t *testing.T) {
	for name, c := range map[string]struct {
		zone    *Zone
		status  int
		penalty bool
		room    bool
	}{
		"charged":                {&Zone{ChargeBefore: true}, http.StatusOK, true, false},
		"free":                   {&Zone{ChargeBefore: true}, http.StatusNotModified, true, true},
		"forgiving":              {&Zone{ChargeBefore: true}, http.StatusNoContent, true, true},
		"charged, no penalty":    {&Zone{ChargeBefore: true}, http.StatusOK, false, false},
		"in a log":               {&Zone{ChargeBefore: true, Algorithm: store.SlidingLog}, http.StatusOK, false, false},
		"in a sliding window":    {&Zone{ChargeBefore: true, Algorithm: store.SlidingWindow}, http.StatusNotModified, true, true},
		"with gcra":              {&Zone{ChargeBefore: true, Algorithm: store.GCRA}, http.StatusNotModified, true, true},
		"charged after":          {&Zone{}, http.StatusOK, true, false},
		"free, charged after":    {&Zone{}, http.StatusNotModified, true, true},
		"settled at the end":     {&Zone{ChargeBefore: true, SettleAtEnd: true}, http.StatusOK, true, false},
		"free, known at the end": {&Zone{ChargeBefore: true, SettleAtEnd: true}, http.StatusNotModified, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			z := c.zone
			z.Free.Add(http.StatusNotModified)
			z.Forgives.Add(http.StatusNoContent)
			if c.penalty {
				z.Penalty = 10 * time.Minute
			}
			m := newSite(t, z)
			z.Events.Number = 1
			ok := func(w http.ResponseWriter, _ *http.Request) error {
				w.WriteHeader(http.StatusOK)
				return nil
			}
			m.serve(t.Context(), func(w http.ResponseWriter, _ *http.Request) error {
				for range 3 {
					got := m.serve(t.Context(), ok)
					if got.Code != http.StatusTooManyRequests {
						t.Errorf("while another runs: status %d", got.Code)
					}
					if z.ChargeBefore && got.Header().Get("Retry-After") != "1" {
						t.Errorf("while another runs: Retry-After is %s", got.Header().Get("Retry-After"))
					}
					m.clock.Advance(time.Second)
				}
				w.WriteHeader(c.status)
				return nil
			})
			switch got := m.serve(t.Context(), ok); {
			case c.room != (got.Code == http.StatusOK):
				t.Errorf("afterwards: status %d, %v", got.Code, got.Header())
			case !c.room && got.Header().Get("Retry-After") == "1":
				t.Error("afterwards it is told to wait a second")
			}
		})
	}
}

// TestOnlyWhatMayComeBackIsHeld: requests that others' batches refuse hear of these, and in other zones of nothing.
func TestOnlyWhatMayComeBackIsHeld(t *testing.T) {
	const nothing, hears, holds = 0, store.HearsHeld, store.HearsHeld + 1
	var free StatusSet
	free.Add(http.StatusNotModified)
	for name, c := range map[string]struct {
		zone *Zone
		item *Item
		want uint32
	}{
		"charge after":         {&Zone{Free: free}, nil, nothing},
		"nothing is free":      {&Zone{ChargeBefore: true}, nil, nothing},
		"free":                 {&Zone{ChargeBefore: true, Free: free}, nil, holds},
		"forgiving":            {&Zone{ChargeBefore: true, Forgives: free}, nil, holds},
		"batches":              {&Zone{ChargeBefore: true, Batch: store.BatchAuto}, nil, hears},
		"batches and free":     {&Zone{ChargeBefore: true, Batch: 2, Free: free}, nil, holds},
		"cost of responses":    {&Zone{ChargeBefore: true, Cost: Quantity{Text: "{http.response.header.X-Cost}"}}, nil, holds},
		"slots":                {&Zone{Free: free, Algorithm: store.Concurrency}, nil, nothing},
		"a call that takes":    {&Zone{ChargeBefore: true, Batch: 2, Free: free}, new(Item), hears},
		"a call that reserves": {&Zone{ChargeBefore: true}, &Item{Reserves: true}, holds},
		"a call for slots":     {&Zone{Algorithm: store.Concurrency}, &Item{Reserves: true}, nothing},
	} {
		if c.zone.prepare(); min(c.zone.newHold(c.item), holds) != c.want {
			t.Errorf("%s: the hold is %d, want %d", name, c.zone.newHold(c.item), c.want)
		}
	}
}

// TestReservationThatIsNotKnownToBeTakenHoldsNothing: its record names nothing that would be ended.
func TestReservationThatIsNotKnownToBeTakenHoldsNothing(t *testing.T) {
	for phase, want := range map[storePhase]int{phaseTaken: 0, phaseUncertain: 1} {
		req := store.Request{Limit: &store.Limit{Zone: "zone", Algorithm: store.SlidingLog, Window: time.Hour}, Events: 10, Cost: 1, ID: "1", Hold: store.NewHold()}
		z := &inZone{ask: store.Ask{Request: req}, spend: spend{stored: phase}, rare: &rareZone{item: &Item{Reserves: true}}}
		var all settlements
		all.add(z, costsMore, 0, 1)
		if ends := all.store.refunds; len(ends) != want || want > 0 && (ends[0].Hold != req.Hold || ends[0].Cost != 0) {
			t.Errorf("phase %d: %d holds end, want %d", phase, len(ends), want)
		}
	}
}

// TestLostTakeInASharedBucket is not charged late there, but ends what it holds.
func TestLostTakeInASharedBucket(t *testing.T) {
	for of, want := range map[bucket][]int64{ownBucket: {1}, overflowBucket: {1, 0}} {
		req := store.Request{Limit: &store.Limit{Zone: "zone", Window: time.Hour}, Events: 10, Cost: 1, Hold: store.NewHold()}
		z := &inZone{ask: store.Ask{Request: req}, bucket: of, spend: spend{stored: phaseLost}, rare: &rareZone{end: new(store.Late)}}
		var all settlements
		all.add(z, costsMore, 0, 1)
		var got []int64
		for i, r := range all.store.unknown {
			got = append(got, r.Cost)
			if isLast := i == len(want)-1; isLast != (all.store.ends[i] == z.rare.end) || r.Hold != req.Hold || all.store.heldUnknown[i] != 0 {
				t.Errorf("bucket %d: %d of %d is %+v, with the end %v", of, i, len(want), *r, all.store.ends[i])
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("bucket %d: what may have been taken is %v, want %v", of, got, want)
		}
	}
}

// TestWhatHoldsNothingIsNotCopied, as most requests hold nothing when they settle.
func TestWhatHoldsNothingIsNotCopied(t *testing.T) {
	s, req := new(settlement), store.Request{Cost: 1, Hold: store.HearsHeld}
	if n := testing.AllocsPerRun(100, func() { s.endHold(req, phaseTaken, dueNothing) }); n > 0 || len(s.refunds) > 0 {
		t.Errorf("it makes %v allocations and %d refunds", n, len(s.refunds))
	}
}

// TestAloneWhileSomethingIsHeld: without the store as well, a client refused while a request runs that may turn out to be
// free is told to come again soon, and earns no penalty.
func TestAloneWhileSomethingIsHeld(t *testing.T) {
	z := &Zone{ChargeBefore: true, OnError: stores.OnErrorLocal, Penalty: time.Hour}
	l := newTestHandler(t, z, &deafStore{takeError: store.ErrNotExecuted})
	z.Events.Number = 1
	l.answered(func(w http.ResponseWriter, _ *http.Request) {
		if got := l.answeredWith(http.StatusOK); got.Code != http.StatusTooManyRequests || got.Header().Get("Retry-After") != "1" {
			t.Errorf("while another runs: status %d, %v", got.Code, got.Header())
		}
		w.WriteHeader(http.StatusNotModified)
	})
	if got := l.answeredWith(http.StatusOK); got.Code != http.StatusOK {
		t.Errorf("after a request that was free: status %d, %v", got.Code, got.Header())
	}
}

// TestRequestThatTakesAgainIsHeldAnew: the refund of its first take, which may arrive later, does not end what the second
// one holds.
func TestRequestThatTakesAgainIsHeldAnew(t *testing.T) {
	z := &Zone{Name: "zone", ChargeBefore: true, Counts: telemetry.Default.Zone("zone")}
	z.Free.Add(http.StatusNotModified)
	z.prepare()
	req := store.Request{Limit: &store.Limit{Zone: "zone", Window: time.Hour}, Events: 10, Cost: 1, Hold: store.NewHold()}
	in := &inZone{boundZone: &boundZone{Zone: z}, ask: store.Ask{Request: req}, spend: spend{stored: phaseTaken}}
	(&evaluation{zones: []*inZone{in}}).undo()
	if hold := in.ask.Hold; hold == req.Hold || hold <= store.HearsHeld {
		t.Errorf("it is held under %d, and was under %d", hold, req.Hold)
	}
}
