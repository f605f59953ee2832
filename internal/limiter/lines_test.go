package limiter

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// arrival is an instant, in seconds.
func arrival(s int64) time.Time { return time.Unix(1_000_000+s, 0) }

func isFirst(w *waiter) bool {
	return w.news().isFirst
}

var anyLimit = &store.Limit{Zone: "zone", Window: time.Hour}

// lineFor is the line of a client whose requests have a limit of 10.
func lineFor(clientKey string) lineID { return lineID{*anyLimit, clientKey, 10, 10} }

// newcomer is a request that has arrived, and stands nowhere.
func newcomer(m *waitingRoom, clientKey string, cost, at int64) *waiter {
	return &waiter{arrived: arrival(at), wants: []want{{m, anyLimit, clientKey, cost}}, bell: make(chan struct{}, 1)}
}

// mustJoin stands in a line for 1, of at most 100.
func mustJoin(t *testing.T, m *waitingRoom, clientKey string, at int64) *waiter {
	t.Helper()
	w := newcomer(m, clientKey, 1, at)
	if !m.stand(w, lineFor(clientKey), 100) {
		t.Fatalf("%s may not wait", clientKey)
	}
	return w
}

// calls requires that waiters are called in this order, each once the previous one has
// left.
func calls(t *testing.T, order ...*waiter) {
	t.Helper()
	for i, w := range order {
		if !isFirst(w) {
			t.Fatalf("the one at place %d is not called", i)
		}
		for j, other := range order[i+1:] {
			if isFirst(other) {
				t.Fatalf("the one at place %d is called before the one at place %d has left", i+1+j, i)
			}
		}
		w.leave()
	}
}

func TestWaitersAreCalledByArrival(t *testing.T) {
	m := newWaitingRoom()
	a := mustJoin(t, m, "k", 1)
	d := mustJoin(t, m, "k", 4)
	b := mustJoin(t, m, "k", 2)
	c := mustJoin(t, m, "k", 3)
	calls(t, a, b, c, d)
}

func TestWaitersThatArrivedTogetherAreCalledAsTheyJoined(t *testing.T) {
	m := newWaitingRoom()
	a, b, c := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 1)
	calls(t, a, b, c)
}

// TestOvertakenWaitersCheckTheirWait lets one stand in the middle of a line.
func TestOvertakenWaitersCheckTheirWait(t *testing.T) {
	m := newWaitingRoom()
	first, early, late := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 3), mustJoin(t, m, "k", 5)
	mustJoin(t, m, "k", 4)
	for name, c := range map[string]struct {
		w    *waiter
		want bool
	}{"first": {first, false}, "before": {early, false}, "behind": {late, true}} {
		if got := c.w.news().isOvertaken; got != c.want {
			t.Errorf("the one %s checks its wait again: %v, want %v", name, got, c.want)
		}
	}
}

// TestNoWaiterOvertakesTheFirst: it has been called already.
func TestNoWaiterOvertakesTheFirst(t *testing.T) {
	m := newWaitingRoom()
	first := mustJoin(t, m, "k", 5)
	early := mustJoin(t, m, "k", 1)
	late := mustJoin(t, m, "k", 9)
	calls(t, first, early, late)
}

func TestWaitersLearnTheCostAhead(t *testing.T) {
	m := newWaitingRoom()
	for i, step := range []struct{ arrived, cost, ahead int64 }{
		{arrived: 1, cost: 3, ahead: 0},
		{arrived: 4, cost: 5, ahead: 3},
		{arrived: 2, cost: 7, ahead: 3},
		{arrived: 5, cost: 0, ahead: 15},
		{arrived: 0, cost: 1, ahead: 3},
	} {
		w := newcomer(m, "k", step.cost, step.arrived)
		if ahead := aheadOf(w, lineFor("k")); ahead[0] != step.ahead {
			t.Errorf("step %d: %d is ahead, want %d", i, ahead[0], step.ahead)
		}
		m.stand(w, lineFor("k"), 100)
		if ahead := aheadOf(w, lineFor("k")); ahead[0] != step.ahead {
			t.Errorf("step %d: %d is ahead in the line, want %d", i, ahead[0], step.ahead)
		}
	}
	if ahead := aheadOf(newcomer(m, "other", 1, 9), lineFor("other")); ahead[0] != 0 {
		t.Errorf("%d of other clients is ahead", ahead[0])
	}
}

// aheadOf returns what is ahead of w in a line, for each of its wants.
func aheadOf(w *waiter, id lineID) []int64 {
	ahead := make([]int64, len(w.wants))
	w.wants[0].room.addAhead(id, w, ahead)
	return ahead
}

// TestWaitersLearnTheCostAheadInOtherBuckets: of those before them, and only where they share the
// bucket.
func TestWaitersLearnTheCostAheadInOtherBuckets(t *testing.T) {
	shared, own := newWaitingRoom(), newWaitingRoom()
	other := *anyLimit
	other.Window = time.Minute
	join := func(client string, at int64, limit *store.Limit) []int64 {
		w := newcomer(shared, "all", 2, at)
		w.wants = append(w.wants, want{own, limit, client, 3})
		ahead := aheadOf(w, lineFor("all"))
		shared.stand(w, lineFor("all"), 100)
		return ahead
	}
	for i, step := range []struct {
		client string
		limit  *store.Limit
		want   []int64
	}{
		{"alice", anyLimit, []int64{0, 0}},
		{"bob", anyLimit, []int64{2, 0}},
		{"alice", new(*anyLimit), []int64{4, 3}}, // an equal limit is the same one
		{"bob", anyLimit, []int64{6, 3}},
		{"alice", &other, []int64{8, 0}},
	} {
		if ahead := join(step.client, int64(i), step.limit); !slices.Equal(ahead, step.want) {
			t.Errorf("step %d: %d is ahead, want %d", i, ahead, step.want)
		}
	}
}

func TestLinesAreOneForEachClient(t *testing.T) {
	m := newWaitingRoom()
	a, b := mustJoin(t, m, "a", 1), mustJoin(t, m, "b", 2)
	if !isFirst(a) || !isFirst(b) || !m.hasLine(lineFor("a")) || !m.hasLine(lineFor("b")) || m.hasLine(lineFor("c")) {
		t.Error("one client waits for another")
	}
	a.leave()
	if m.hasLine(lineFor("a")) || !m.hasLine(lineFor("b")) {
		t.Error("the wrong line is gone")
	}
}

func TestRoomHoldsNoMoreThanItsBound(t *testing.T) {
	m := newWaitingRoom()
	first := newcomer(m, "a", 1, 1)
	if !m.stand(first, lineFor("a"), 2) || !m.stand(newcomer(m, "b", 1, 2), lineFor("b"), 2) {
		t.Fatal("two waiters do not fit a bound of two")
	}
	for _, clientKey := range []string{"a", "b", "c"} {
		if m.stand(newcomer(m, clientKey, 1, 3), lineFor(clientKey), 2) {
			t.Errorf("a third may wait in the line of %s", clientKey)
		}
	}
	if m.hasLine(lineFor("c")) {
		t.Error("a rejected waiter is in a line")
	}
	first.leave()
	if !m.stand(newcomer(m, "c", 1, 4), lineFor("c"), 2) {
		t.Error("a freed place stays closed")
	}
	if !m.stand(newcomer(m, "c", 1, 5), lineFor("c"), 3) {
		t.Error("a larger bound admits no waiter")
	}
}

// TestPlacesAreSharedFairly: a client may have all places while no other wants them; then the
// newest of those that have most give way, until no client can gain by it.
func TestPlacesAreSharedFairly(t *testing.T) {
	const places = 12
	m := newWaitingRoom()
	all := map[string][]*waiter{}
	at := int64(0)
	join := func(clientKey string) bool {
		at++
		w := newcomer(m, clientKey, 1, at)
		if !m.stand(w, lineFor(clientKey), places) {
			return false
		}
		all[clientKey] = append(all[clientKey], w)
		return true
	}
	for range places {
		if !join("a") {
			t.Fatal("a client alone may not have all places")
		}
	}
	if join("a") {
		t.Fatal("a client has more than all places")
	}
	for _, clients := range [][]string{{"b"}, {"c"}, {"d", "e", "f"}} {
		for range places {
			for _, clientKey := range clients {
				join(clientKey)
			}
		}
	}
	staying := map[string]int{}
	for clientKey, waiters := range all {
		seen := false
		for i := len(waiters) - 1; i >= 0; i-- {
			isDisplaced := waiters[i].news().isDisplaced
			if !isDisplaced {
				staying[clientKey]++
			} else if seen {
				t.Errorf("%s: an older request gave way to a newer one", clientKey)
			}
			seen = seen || !isDisplaced
			waiters[i].leave()
		}
	}
	for _, clientKey := range []string{"a", "b", "c", "d", "e", "f"} {
		if n := staying[clientKey]; n < 1 || n > 3 {
			t.Errorf("%s has %d of %d places: %v", clientKey, n, places, staying)
		}
	}
	checkEmpty(t, m)
}

// TestClientHasOneShareForAllItsLimits: a client whose requests have many limits has no more
// places than others.
func TestClientHasOneShareForAllItsLimits(t *testing.T) {
	m := newWaitingRoom()
	for n := range int64(10) {
		id := lineFor("a")
		id.events, id.capacity = n, n
		if !m.stand(newcomer(m, "a", 1, n), id, 10) {
			t.Fatal("there is no place")
		}
	}
	for n := range int64(4) {
		if !m.stand(newcomer(m, "b", 1, 10+n), lineFor("b"), 10) {
			t.Errorf("the other client has only %d places", n)
		}
	}
}

func checkEmpty(t *testing.T, m *waitingRoom) {
	t.Helper()
	if m.held != 0 || len(m.lines) != 0 || len(m.of) != 0 || len(m.shares)+len(m.within) != 0 || len(m.keys.places)+len(m.addresses.places) != 0 || m.keys.most()+m.addresses.most() != 0 {
		t.Errorf("after all have left the room is %+v", m)
	}
}

// TestPlaceIsNotTakenFromAClientWithAsMany: where another request of the same address can give way, one of a client
// that would have fewer places then does not.
func TestPlaceIsNotTakenFromAClientWithAsMany(t *testing.T) {
	m := newWaitingRoom()
	const places = 9
	join := func(clientKey, address string) *waiter {
		w := newcomer(m, clientKey, 1, int64(m.held))
		w.address = address
		if !m.stand(w, lineFor(clientKey), places) {
			t.Fatalf("%s may not wait", clientKey)
		}
		return w
	}
	var last *waiter
	for range 3 {
		last = join("a", "1")
	}
	join("b", "1")
	for range 5 {
		join("c", "2")
	}
	if join("b", "1"); !last.news().isDisplaced || m.keys.of("c") != 5 {
		t.Errorf("the client with as many has %d places, want 5", m.keys.of("c"))
	}
}

// TestChangingLines: a request stands in one line at a time, wherever it goes.
func TestChangingLines(t *testing.T) {
	m, other := newWaitingRoom(), newWaitingRoom()
	a, b := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 2)
	c := mustJoin(t, other, "k", 3)
	if !other.stand(a, lineFor("k"), 100) || isFirst(a) || !isFirst(b) || !isFirst(c) {
		t.Error("a request that changes lines overtakes a first one, or holds its old place")
	}
	c.leave()
	if !isFirst(a) {
		t.Error("it does not become the first")
	}
	a.leave()
	b.leave()
	checkEmpty(t, m)
	checkEmpty(t, other)
}

// TestWaking: of a client those that are first in their lines, or all.
func TestWaking(t *testing.T) {
	m := newWaitingRoom()
	a, b, c := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 2), mustJoin(t, m, "other", 3)
	woken := func() (woken []bool) {
		for _, w := range []*waiter{a, b, c} {
			is := w.news().isWoken
			woken = append(woken, is)
		}
		return woken
	}
	m.wake("k")
	m.wake("nobody")
	if got := woken(); !slices.Equal(got, []bool{true, false, false}) {
		t.Errorf("woken are %v", got)
	}
	m.wakeAll()
	if got := woken(); !slices.Equal(got, []bool{true, true, true}) {
		t.Errorf("woken are %v, want all", got)
	}
	if got := woken(); !slices.Equal(got, []bool{false, false, false}) {
		t.Errorf("woken are %v again", got)
	}
}

func TestLeavingFromTheMiddle(t *testing.T) {
	m := newWaitingRoom()
	a, b, c := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 2), mustJoin(t, m, "k", 3)
	b.leave()
	if isFirst(c) {
		t.Error("a waiter is called while the first is there")
	}
	d := mustJoin(t, m, "k", 2)
	calls(t, a, d, c)
}

func TestLeavingFromTheEnd(t *testing.T) {
	m := newWaitingRoom()
	a, b := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 2)
	b.leave()
	calls(t, a)
}

func TestRoomEmpties(t *testing.T) {
	m := newWaitingRoom()
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			clientKey := string(rune('a' + i%5))
			w := newcomer(m, clientKey, 1, int64(i))
			if !m.stand(w, lineFor(clientKey), 20) {
				return
			}
			for n := w.news(); i%3 != 0 && !n.isFirst && !n.isDisplaced; n = w.news() {
				<-w.bell
			}
			w.leave()
		})
	}
	wg.Wait()
	checkEmpty(t, m)
}

// TestAddressesOfAKeyShareItsPlaces, however many places the key has.
func TestAddressesOfAKeyShareItsPlaces(t *testing.T) {
	const places = 20
	m := newWaitingRoom()
	standing := map[string]int{}
	var all []*waiter
	for n := range 3 * places {
		address := "192.0.2.1"
		if n >= places && n%2 == 0 {
			address = "198.51.100.7"
		}
		w := newcomer(m, "everyone", 1, int64(n))
		w.address = address
		all = append(all, w)
		m.stand(w, lineFor("everyone"), places)
	}
	for _, w := range all {
		if w.room != nil && !w.news().isDisplaced {
			standing[w.address]++
		}
		w.leave()
	}
	if a, b := standing["192.0.2.1"], standing["198.51.100.7"]; a+b != places || a != b {
		t.Errorf("one address has %d places, and another one %d, of %d", a, b, places)
	}
	checkEmpty(t, m)
}

// TestMadeUpKeysTakeNoPlacesFromOthers: an address with a key for each request has no more places than another one,
// and one client has no more from many addresses.
func TestMadeUpKeysTakeNoPlacesFromOthers(t *testing.T) {
	const places = 20
	for name, hostile := range map[string]func(n int) (address, clientKey string){
		"keys of one address": func(n int) (string, string) { return "192.0.2.1", "made-up-" + strconv.Itoa(n) },
		"addresses of a key":  func(n int) (string, string) { return "2001:db8::" + strconv.Itoa(n), "hostile" },
	} {
		t.Run(name, func(t *testing.T) {
			m := newWaitingRoom()
			at := int64(0)
			var all []*waiter
			join := func(address, clientKey string) (*waiter, bool) {
				at++
				w := newcomer(m, clientKey, 1, at)
				w.address = address
				all = append(all, w)
				return w, m.stand(w, lineFor(clientKey), places)
			}
			for n := range places {
				if _, isIn := join(hostile(n)); !isIn {
					t.Fatal("the room has free places")
				}
			}
			var honest []*waiter
			for range places {
				if w, isIn := join("198.51.100.7", "honest"); isIn {
					honest = append(honest, w)
				}
			}
			for n := range 3 * places {
				join(hostile(places + n))
			}
			if len(honest) != places/2 {
				t.Errorf("the honest client got %d of %d places", len(honest), places)
			}
			for i, w := range honest {
				if w.news().isDisplaced {
					t.Errorf("its request %d gave way", i)
				}
			}
			for _, w := range all {
				w.leave()
			}
			checkEmpty(t, m)
		})
	}
}

// TestAddressSharesItsPlacesAmongItsKeys, where all come through one proxy.
func TestAddressSharesItsPlacesAmongItsKeys(t *testing.T) {
	m := newWaitingRoom()
	stand := func(clientKey string, at int64) bool {
		w := newcomer(m, clientKey, 1, at)
		w.address = "192.0.2.1"
		return m.stand(w, lineFor(clientKey), 10)
	}
	for n := range int64(10) {
		stand("a", n)
	}
	got := 0
	for n := range int64(10) {
		if stand("b", 10+n) {
			got++
		}
	}
	if got != 5 {
		t.Errorf("the other client of the address got %d of 10 places, want 5", got)
	}
}

// TestSumsAreWhatAWalkFinds, whoever joins and leaves.
func TestSumsAreWhatAWalkFinds(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	m, other := newWaitingRoom(), newWaitingRoom()
	id := lineFor("k")
	var line []*waiter // in order
	for range 5000 {
		if len(line) > 0 && random.IntN(3) == 0 {
			at := random.IntN(len(line))
			line[at].leave()
			line = slices.Delete(line, at, at+1)
			continue
		}
		w := newcomer(m, "k", random.Int64N(3), random.Int64N(50))
		w.wants = append(w.wants, want{other, anyLimit, string(rune('a' + random.IntN(3))), random.Int64N(4)})
		place := len(line)
		for place > 1 && line[place-1].arrived.After(w.arrived) {
			place--
		}
		ahead := make([]int64, len(w.wants))
		for _, before := range line[:place] {
			for n := range w.wants {
				if before.wants[n].sameBucket(&w.wants[n]) {
					ahead[n] += before.wants[n].cost
				}
			}
		}
		if got := aheadOf(w, id); !slices.Equal(got, ahead) {
			t.Fatalf("%d is ahead of a newcomer, want %d", got, ahead)
		}
		m.stand(w, id, 10_000)
		line = slices.Insert(line, place, w)
		if got := aheadOf(w, id); !slices.Equal(got, ahead) {
			t.Fatalf("%d is ahead in the line, want %d", got, ahead)
		}
	}
	for _, w := range line {
		w.leave()
	}
	checkEmpty(t, m)
}

// BenchmarkAhead is what a request costs that does not fit into a line.
func BenchmarkAhead(b *testing.B) {
	for _, length := range []int{10, 5000} {
		b.Run(strconv.Itoa(length), func(b *testing.B) {
			m := newWaitingRoom()
			for n := range length {
				m.stand(newcomer(m, "k", 1, int64(n)), lineFor("k"), length)
			}
			w := newcomer(m, "k", 1, int64(length))
			for b.Loop() {
				aheadOf(w, lineFor("k"))
			}
		})
	}
}
