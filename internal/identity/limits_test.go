package identity

import (
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestLimitsAreNumberedOnce(t *testing.T) {
	const goroutines, zones = 16, 50
	var l Limits
	var numbers [goroutines][zones]uint32
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for z := range zones {
				numbers[g][z] = l.Number(&store.Limit{
					Zone: string(rune('A' + z)), Algorithm: store.FixedWindow, Window: time.Hour,
				})
			}
		})
	}
	wg.Wait()
	seen := map[uint32]bool{}
	for z := range zones {
		for g := range goroutines {
			if numbers[g][z] != numbers[0][z] {
				t.Fatalf("zone %d has numbers %d and %d", z, numbers[0][z], numbers[g][z])
			}
		}
		seen[numbers[0][z]] = true
	}
	again := store.Limit{Zone: "A", Algorithm: store.FixedWindow, Window: time.Hour}
	if n := l.find(&again, true).Number; n != numbers[0][0] {
		t.Errorf("limit numbered %d gets %d from a late registration", numbers[0][0], n)
	}
	if len(seen) != zones {
		t.Errorf("%d limits have %d numbers", zones, len(seen))
	}
}

// TestManyLimitsAreNotCopiedForEach numbers and finds them in memory that grows with their number.
func TestManyLimitsAreNotCopiedForEach(t *testing.T) {
	const many, most = 4000, 4 << 10
	var l Limits
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 3 {
		for i := range many {
			limit := store.Limit{Zone: strconv.Itoa(i), Algorithm: store.FixedWindow, Window: time.Hour}
			if n := l.Number(&limit); n != uint32(i) || *l.Limit(n) != limit {
				t.Fatalf("limit %d has number %d, which is %v", i, n, l.Limit(n))
			}
		}
	}
	runtime.ReadMemStats(&after)
	if bytes := (after.TotalAlloc - before.TotalAlloc) / many; bytes > most {
		t.Errorf("%d limits took %d bytes each, want %d at most", many, bytes, most)
	}
	if l.misses > 0 || len(l.fresh) > 0 {
		t.Errorf("%d limits are not in the table after %d lookups", len(l.fresh), l.misses)
	}
}

// TestUnusedNumbersAreGivenAgain: numbers stay while they are in use, also if their use began while
// the others ended, and the table stays as small as what is in use.
func TestUnusedNumbersAreGivenAgain(t *testing.T) {
	const many = 10_000
	limitOf := func(i int) *store.Limit { return &store.Limit{Zone: strconv.Itoa(i), Window: time.Hour} }
	var l Limits
	used, walks := map[uint32]bool{}, 0
	l.InUse = func(note func(number uint32)) {
		walks++
		if late := l.numberOf(many); walks == 2 && late != nil {
			used[late.Number] = true
		}
		for n := range used {
			note(n)
		}
	}
	kept := map[uint32]*store.Limit{}
	for i := range 10 {
		n := l.Number(limitOf(i))
		used[n], kept[n] = true, limitOf(i)
	}
	late, unused := l.Of(limitOf(many), true), l.Of(limitOf(-1), true)
	kept[late.Number] = limitOf(many)
	for i := range many {
		of := l.Of(limitOf(i), true)
		if of.HasEnded() || of.Limit != *limitOf(i) || *l.Limit(of.Number) != of.Limit {
			t.Fatalf("limit %d has number %d, which is %v", i, of.Number, l.Limit(of.Number))
		}
		if i >= 10 && kept[of.Number] != nil {
			t.Fatalf("limit %d gets number %d, which is in use", i, of.Number)
		}
	}
	for n, limit := range kept {
		if got := l.Number(limit); got != n || *l.Limit(n) != *limit {
			t.Errorf("limit %s had number %d, and has %d", limit.Zone, n, got)
		}
	}
	if n := len(l.table.Load().byNumber); walks < 4 || n > minLimits {
		t.Errorf("after %d walks there are %d numbers, want %d at most", walks, n, minLimits)
	}
	if !unused.HasEnded() || late.HasEnded() {
		t.Errorf("a number that is not in use has ended %t, one whose use began meanwhile %t", unused.HasEnded(), late.HasEnded())
	}
}

// numberOf returns a limit that has a number, or nil.
func (l *Limits) numberOf(i int) *Limit {
	zone := strconv.Itoa(i)
	for _, known := range l.table.Load().byNumber {
		if known != nil && known.Zone == zone {
			return known
		}
	}
	return nil
}

// TestLimitsInTurnStayNumbered: many limits that are each in use now and then keep their numbers, whose
// lookups take no memory.
func TestLimitsInTurnStayNumbered(t *testing.T) {
	const many = 50 * minLimits
	walks := 0
	l := Limits{InUse: func(func(uint32)) { walks++ }, Pause: time.Hour}
	limits := make([]store.Limit, many)
	for i := range limits {
		limits[i] = store.Limit{Zone: strconv.Itoa(i), Window: time.Hour}
	}
	round := func() {
		for i := range limits {
			if n := l.Of(&limits[i], true).Number; n != uint32(i) {
				t.Fatalf("limit %d has number %d", i, n)
			}
		}
	}
	round()
	round()
	if n := testing.AllocsPerRun(10, round); n > 0 || walks > 0 {
		t.Errorf("looking up %d limits takes %v allocations, and %d walks of what is in use", many, n, walks)
	}
}

// TestLookupsAddNothing: a limit that is only looked up gets no number.
func TestLookupsAddNothing(t *testing.T) {
	var l Limits
	known, unknown := store.Limit{Zone: "known"}, store.Limit{Zone: "unknown"}
	number := l.Number(&known)
	asked := l.Asked([]store.Request{{Limit: &unknown}, {Limit: &known}})
	if place, found := asked.Find(number); place != 1 || !found {
		t.Errorf("the request of a limit is at %d, found: %t", place, found)
	}
	if of := l.Of(&unknown, false); of != none || len(l.table.Load().byNumber) != 1 {
		t.Errorf("a lookup finds %+v of %d limits", of, len(l.table.Load().byNumber))
	}
}
