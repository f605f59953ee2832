package limiter

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// slots is a zone with 3 slots, whose requests take a second and do not stop when their client
// leaves.
func slots(t *testing.T) *testSite {
	t.Helper()
	m := newSite(t, &Zone{Algorithm: store.Concurrency})
	m.Zones[0].Events.Number = 3
	return m
}

// end serves a request that ends after so long; abort serves one whose client leaves then. Both
// report whether it ran.
func (m *testSite) end(after time.Duration) bool {
	return m.serve(m.t.Context(), func(http.ResponseWriter, *http.Request) error {
		m.clock.Advance(after)
		return nil
	}).Code == http.StatusOK
}

func (m *testSite) abort(after time.Duration) (ran bool) {
	ctx, leave := context.WithCancel(m.t.Context())
	m.serve(ctx, func(w http.ResponseWriter, _ *http.Request) error {
		ran = true
		m.clock.Advance(after)
		leave()
		w.WriteHeader(499)
		return nil
	})
	return ran
}

// TestAbortedRequestsAreBounded: those of the time that requests commonly take, or of ten seconds
// if none has ended, and what runs, are twice the limit at most.
func TestAbortedRequestsAreBounded(t *testing.T) {
	for _, isKnown := range []bool{false, true} {
		t.Run(fmt.Sprint("known ", isKnown), func(t *testing.T) {
			m := slots(t)
			lasts := untilKnown
			if isKnown {
				lasts = time.Second
				m.end(lasts)
			}
			ran := 0
			for range 100 {
				if m.abort(time.Millisecond) {
					ran++
				}
			}
			if ran != 6 || m.used() != 0 {
				t.Errorf("%d of 100 ran, and %d hold a slot", ran, m.used())
			}
			w := m.serve(t.Context(), func(http.ResponseWriter, *http.Request) error { return nil })
			if w.Code != http.StatusTooManyRequests || w.Header().Get("X-RateLimit-Remaining") != "0" || w.Header().Get("Retry-After") != fmt.Sprint(int64(lasts/time.Second)) {
				t.Errorf("status %d, headers %v", w.Code, w.Header())
			}
			m.clock.Advance(lasts)
			for n := range 3 {
				if !m.abort(time.Millisecond) {
					t.Errorf("request %d is refused when the others have ended", n)
				}
			}
		})
	}
}

// TestShortRequestsHideNoAborted: requests that end soon do not make what was aborted count for
// less, nor what is aborted later count for nothing.
func TestShortRequestsHideNoAborted(t *testing.T) {
	m := slots(t)
	m.end(10 * time.Second)
	abortAll := func() (ran int) {
		for range 100 {
			if m.abort(15 * time.Millisecond) {
				ran++
			}
		}
		return ran
	}
	for range 5 {
		m.abort(15 * time.Millisecond)
	}
	for range 1000 {
		m.end(time.Millisecond)
	}
	if n := abortAll(); n != 1 {
		t.Errorf("%d ran beside 5 aborted ones, want 1", n)
	}
	m.clock.Advance(10 * time.Second)
	for range 3600 {
		m.end(10 * time.Millisecond)
		m.clock.Advance(time.Second)
	}
	for range 100 {
		m.end(time.Millisecond)
	}
	if n := abortAll(); n != 6 {
		t.Errorf("%d ran of those longer than most, want 6", n)
	}
}

// TestStreamsThatClientsEnd: where every request ends by its client's leaving, those that are left
// soon are forgotten soon, however long a slot may last.
func TestStreamsThatClientsEnd(t *testing.T) {
	m := slots(t)
	for n := range 100 {
		if !m.abort(time.Duration(n%10+2) * time.Second) {
			t.Fatalf("request %d is refused", n)
		}
	}
}

// TestAbortedCountForTheirOwnTime, whatever others take that end later.
func TestAbortedCountForTheirOwnTime(t *testing.T) {
	var a abortedRequests
	now := time.Unix(1_700_000_000, 0)
	a.note("client", 3, now, time.Minute)
	now = now.Add(10 * time.Second)
	a.note("client", 4, now, time.Second)
	if wait, cost := a.wait("client", 3, now); wait != time.Second || cost != 7 {
		t.Errorf("a cost of %d counts, the wait is %v", cost, wait)
	}
	now = now.Add(49 * time.Second)
	if wait, cost := a.wait("client", 0, now); wait != time.Second || cost != 3 {
		t.Errorf("after 59 s a cost of %d counts, the wait is %v", cost, wait)
	}
	if _, cost := a.wait("client", 0, now.Add(time.Second)); cost != 0 {
		t.Errorf("after a minute a cost of %d counts", cost)
	}
}

// TestCancelAndTryAgain: a client that cancels a request and sends it again is not refused.
func TestCancelAndTryAgain(t *testing.T) {
	m := slots(t)
	m.end(time.Second)
	for n := range 100 {
		if !m.abort(250 * time.Millisecond) {
			t.Fatalf("request %d is refused", n)
		}
	}
	if !m.end(time.Second) {
		t.Error("the last one is refused")
	}
}

// TestRunningAndAborted count together.
func TestRunningAndAborted(t *testing.T) {
	m := slots(t)
	m.end(time.Second)
	for range 4 {
		m.abort(0)
	}
	isRefused := false
	m.serve(t.Context(), func(http.ResponseWriter, *http.Request) error {
		m.serve(t.Context(), func(http.ResponseWriter, *http.Request) error {
			isRefused = m.serve(t.Context(), func(http.ResponseWriter, *http.Request) error { return nil }).Code == http.StatusTooManyRequests
			return nil
		})
		return nil
	})
	if used := m.used(); !isRefused || used != 0 {
		t.Errorf("the third beside 4 aborted ones is refused: %v; %d slots are held", isRefused, used)
	}
}

// TestWhatIsNotAborted: a whole response, one that has no body, one that took as long as others,
// and what a handler refuses leave nothing behind.
func TestWhatIsNotAborted(t *testing.T) {
	for name, next := range map[string]func(w http.ResponseWriter){
		"a whole response": func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "2")
			_, _ = w.Write([]byte("ok"))
		},
		"a whole response that is copied": func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "2")
			_, _ = io.Copy(w, strings.NewReader("ok"))
		},
		"without a body": func(w http.ResponseWriter) { w.WriteHeader(http.StatusNoContent) },
	} {
		t.Run(name, func(t *testing.T) {
			m := slots(t)
			for n := range 20 {
				ran := false
				ctx, leave := context.WithCancel(t.Context())
				m.serve(ctx, func(w http.ResponseWriter, _ *http.Request) error {
					ran = true
					next(w)
					leave()
					return nil
				})
				if !ran {
					t.Fatalf("request %d is refused", n)
				}
			}
		})
	}
	t.Run("a long stream", func(t *testing.T) {
		m := slots(t)
		m.end(10 * time.Millisecond)
		for n := range 20 {
			if !m.abort(time.Second) {
				t.Fatalf("request %d is refused", n)
			}
		}
	})
	for name, length := range map[string]string{"a stream that is cut": "", "a body shorter than declared": "1000"} {
		t.Run(name, func(t *testing.T) {
			m := slots(t)
			m.end(time.Second)
			ran := 0
			for range 20 {
				ctx, leave := context.WithCancel(t.Context())
				m.serve(ctx, func(w http.ResponseWriter, _ *http.Request) error {
					ran++
					if length != "" {
						w.Header().Set("Content-Length", length)
					}
					_, _ = w.Write([]byte("data: \n\n"))
					leave()
					return nil
				})
			}
			if ran != 6 {
				t.Errorf("%d ran, want 6", ran)
			}
		})
	}
}

// TestObservedSlotsOfAborted: a zone that only observes refuses nothing, and holds no slot for
// what it would have refused.
func TestObservedSlotsOfAborted(t *testing.T) {
	m := newSite(t, &Zone{Algorithm: store.Concurrency, Enforce: new(float64)})
	m.Zones[0].Events.Number = 3
	m.end(time.Second)
	for n := range 20 {
		if !m.abort(0) {
			t.Fatalf("request %d is refused", n)
		}
	}
	if used := m.used(); used != 0 {
		t.Errorf("%d slots are held", used)
	}
}

// TestAbortedRequestsFitInMemory, however many clients there are and however many they abort.
func TestAbortedRequestsFitInMemory(t *testing.T) {
	var a abortedRequests
	now := time.Unix(1_700_000_000, 0)
	for n := range 2 * maxAborting {
		a.note(fmt.Sprint("client ", n), 1, now, time.Second)
	}
	if n := len(a.clients); n != maxAborting {
		t.Errorf("%d clients are remembered, want %d", n, maxAborting)
	}
	for range 100_000 {
		now = now.Add(10 * time.Microsecond)
		a.note("flood", 1, now, time.Second)
	}
	if wait, cost := a.wait("flood", 10, now); cost != 100_000 || wait != time.Second {
		t.Errorf("a cost of %d is remembered, and the wait is %v", cost, wait)
	}
	if n := len(a.clients["flood"]); n > abortedPeriods+1 {
		t.Errorf("%d entries of one client", n)
	}
	now = now.Add(time.Second)
	a.note("late", 1, now, time.Second)
	if wait, cost := a.wait("flood", 10, now); cost != 0 || wait != 0 {
		t.Errorf("after a second a cost of %d counts", cost)
	}
	if wait, _ := a.wait("late", 0, now.Add(-time.Hour)); wait != 0 {
		t.Errorf("after the clock was set back the wait is %v", wait)
	}
}
