package limiter

import (
	"sync"
	"testing"
	"time"
)

func newRoom() *waitingRoom { return &waitingRoom{lines: map[lineID][]*waiter{}} }

// arrival is an instant, in seconds.
func arrival(s int64) time.Time { return time.Unix(1_000_000+s, 0) }

func isFirst(w *waiter) bool {
	select {
	case <-w.first:
		return true
	default:
		return false
	}
}

// mustJoin joins a line for 1, of at most 100.
func mustJoin(t *testing.T, m *waitingRoom, clientKey string, at int64) *waiter {
	t.Helper()
	w, _ := m.join(lineID{clientKey: clientKey}, 1, arrival(at), 100)
	if w == nil {
		t.Fatalf("%s may not wait", clientKey)
	}
	return w
}

// calls requires that waiters are called in this order, each once the previous one has
// left.
func calls(t *testing.T, m *waitingRoom, order ...*waiter) {
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
		m.leave(w)
	}
}

func TestWaitersAreCalledByArrival(t *testing.T) {
	m := newRoom()
	a := mustJoin(t, m, "k", 1)
	d := mustJoin(t, m, "k", 4)
	b := mustJoin(t, m, "k", 2)
	c := mustJoin(t, m, "k", 3)
	calls(t, m, a, b, c, d)
}

func TestWaitersThatArrivedTogetherAreCalledAsTheyJoined(t *testing.T) {
	m := newRoom()
	a, b, c := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 1)
	calls(t, m, a, b, c)
}

// TestNoWaiterOvertakesTheFirst: it has been called already.
func TestNoWaiterOvertakesTheFirst(t *testing.T) {
	m := newRoom()
	first := mustJoin(t, m, "k", 5)
	early := mustJoin(t, m, "k", 1)
	late := mustJoin(t, m, "k", 9)
	calls(t, m, first, early, late)
}

func TestWaitersLearnTheCostAhead(t *testing.T) {
	m := newRoom()
	for i, step := range []struct{ arrived, cost, ahead int64 }{
		{arrived: 1, cost: 3, ahead: 0},
		{arrived: 4, cost: 5, ahead: 3},
		{arrived: 2, cost: 7, ahead: 3},
		{arrived: 5, cost: 0, ahead: 15},
		{arrived: 0, cost: 1, ahead: 3},
	} {
		w, ahead := m.join(lineID{clientKey: "k"}, step.cost, arrival(step.arrived), 100)
		if w == nil || ahead != step.ahead {
			t.Errorf("step %d: %d is ahead, want %d", i, ahead, step.ahead)
		}
	}
	if _, ahead := m.join(lineID{clientKey: "other"}, 1, arrival(9), 100); ahead != 0 {
		t.Errorf("%d of other clients is ahead", ahead)
	}
}

func TestLinesAreOneForEachClient(t *testing.T) {
	m := newRoom()
	a, b := mustJoin(t, m, "a", 1), mustJoin(t, m, "b", 2)
	if !isFirst(a) || !isFirst(b) || !m.hasLine(lineID{clientKey: "a"}) || !m.hasLine(lineID{clientKey: "b"}) || m.hasLine(lineID{clientKey: "c"}) {
		t.Error("one client waits for another")
	}
	m.leave(a)
	if m.hasLine(lineID{clientKey: "a"}) || !m.hasLine(lineID{clientKey: "b"}) {
		t.Error("the wrong line is gone")
	}
}

func TestRoomHoldsNoMoreThanItsBound(t *testing.T) {
	m := newRoom()
	first, _ := m.join(lineID{clientKey: "a"}, 1, arrival(1), 2)
	second, _ := m.join(lineID{clientKey: "b"}, 1, arrival(2), 2)
	if first == nil || second == nil {
		t.Fatal("two waiters do not fit a bound of two")
	}
	for _, clientKey := range []string{"a", "b", "c"} {
		if w, ahead := m.join(lineID{clientKey: clientKey}, 1, arrival(3), 2); w != nil || ahead != 0 {
			t.Errorf("a third may wait in the line of %s, behind %d", clientKey, ahead)
		}
	}
	if m.hasLine(lineID{clientKey: "c"}) {
		t.Error("a rejected waiter is in a line")
	}
	m.leave(first)
	if w, _ := m.join(lineID{clientKey: "c"}, 1, arrival(4), 2); w == nil {
		t.Error("a freed place stays closed")
	}
	if w, _ := m.join(lineID{clientKey: "c"}, 1, arrival(5), 3); w == nil {
		t.Error("a larger bound admits no waiter")
	}
}

func TestLeavingFromTheMiddle(t *testing.T) {
	m := newRoom()
	a, b, c := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 2), mustJoin(t, m, "k", 3)
	m.leave(b)
	if isFirst(b) || isFirst(c) {
		t.Error("a waiter is called while the first is there")
	}
	d := mustJoin(t, m, "k", 2)
	calls(t, m, a, d, c)
}

func TestLeavingFromTheEnd(t *testing.T) {
	m := newRoom()
	a, b := mustJoin(t, m, "k", 1), mustJoin(t, m, "k", 2)
	m.leave(b)
	calls(t, m, a)
}

func TestRoomEmpties(t *testing.T) {
	m := newRoom()
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			w, _ := m.join(lineID{clientKey: string(rune('a' + i%5))}, 1, arrival(int64(i)), 100)
			if i%3 != 0 {
				<-w.first
			}
			m.leave(w)
		})
	}
	wg.Wait()
	if m.held != 0 || len(m.lines) != 0 {
		t.Errorf("%d are held in %d lines after all have left", m.held, len(m.lines))
	}
}
