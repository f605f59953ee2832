package limiter

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// told is what a refusal tells its client: when to come again.
type told struct {
	retryAfter, t time.Duration
	reset         time.Time
}

func toldBy(t *testing.T, h http.Header) told {
	t.Helper()
	seconds := func(text string) time.Duration {
		if text == "" {
			return 0
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatalf("%v in %v", err, h)
		}
		return time.Duration(n) * time.Second
	}
	list, err := httpsfv.UnmarshalList(h["Ratelimit"])
	if err != nil || len(list) != 1 {
		t.Fatalf("RateLimit is %q: %v", h["Ratelimit"], err)
	}
	wait, _ := list[0].(httpsfv.Item).Params.Get("t")
	n, _ := wait.(int64)
	return told{seconds(h.Get("Retry-After")), time.Duration(n) * time.Second, time.Unix(int64(seconds(h.Get("X-RateLimit-Reset"))/time.Second), 0)}
}

// refusing is a handler that shows both families of headers, by a clock that stands still.
func refusing(t *testing.T, z *Zone, jitter float64) (l *Limiter, clock *time.Time) {
	t.Helper()
	now := time.Unix(1_800_000_000, 234_567_000)
	at := func() time.Time { return now }
	l = newTestHandler(t, z, memory.New(memory.NewBuckets(), memory.Options{Now: at}))
	l.Headers, l.Jitter, l.Now = HeadersBoth, jitter, at
	return l, &now
}

// TestRefusalShowsOneTime: whatever a client obeys, it does not come too early, and not a second later
// than it has to.
func TestRefusalShowsOneTime(t *testing.T) {
	for a := range store.Algorithms {
		if a == store.Concurrency {
			continue
		}
		for _, before := range []bool{false, true} {
			for _, jitter := range []float64{0, 3} {
				for obeyed := range 3 {
					t.Run(fmt.Sprintf("%s, charge before %t, jitter %v, header %d", a, before, jitter, obeyed), func(t *testing.T) {
						l, now := refusing(t, &Zone{Algorithm: a, ChargeBefore: before}, jitter)
						w := l.answeredWith(http.StatusOK)
						for ; w.Code == http.StatusOK; w = l.answeredWith(http.StatusOK) {
							*now = now.Add(700 * time.Millisecond)
						}
						told := toldBy(t, w.Header())
						until := told.reset.Sub(*now)
						if told.t != told.retryAfter || until > told.retryAfter+time.Second || told.retryAfter > until+time.Second {
							t.Errorf("%v: Retry-After is %v, t %v, and the reset is %v away", w.Header(), told.retryAfter, told.t, until)
						}
						*now = now.Add([]time.Duration{told.retryAfter, until, told.t}[obeyed])
						if w := l.answeredWith(http.StatusOK); w.Code != http.StatusOK {
							t.Errorf("after obeying it, the status is %d: %v", w.Code, w.Header())
						}
					})
				}
			}
		}
	}
}

// TestRefusalWithoutAnEnd has a reset ahead: without one some clients ask again at once.
func TestRefusalWithoutAnEnd(t *testing.T) {
	for name, test := range map[string]struct {
		zone           *Zone
		limit, cost    int64
		wait, mayReset time.Duration
	}{
		"a slot":      {&Zone{Algorithm: store.Concurrency}, 1, 1, time.Second, time.Second},
		"limit of 0":  {&Zone{}, 0, 1, 0, time.Hour},
		"never fits":  {&Zone{ChargeBefore: true}, 10, 11, 0, time.Hour},
		"gcra":        {&Zone{Algorithm: store.GCRA}, 10, 11, 0, time.Hour},
		"sliding_log": {&Zone{Algorithm: store.SlidingLog}, 10, 11, 0, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			l, now := refusing(t, test.zone, 0)
			l.Zones[0].Events.Number, l.Zones[0].Cost.Number = test.limit, test.cost
			refused := func() {
				w := l.answeredWith(http.StatusOK)
				// Whole seconds are rounded up.
				late := told{retryAfter: test.wait, t: test.mayReset, reset: now.Add(test.mayReset + time.Second).Truncate(time.Second)}
				if got := toldBy(t, w.Header()); w.Code != http.StatusTooManyRequests || got != late {
					t.Errorf("status %d, %v", w.Code, w.Header())
				}
			}
			if test.zone.Algorithm != store.Concurrency {
				refused()
				return
			}
			w := l.answered(func(http.ResponseWriter, *http.Request) { refused() })
			if w.Header().Get("X-RateLimit-Reset") != "" {
				t.Errorf("a slot that was given has the headers %v", w.Header())
			}
		})
	}
}

// TestHeadersStayAsTheyAre while those of other responses are made.
func TestHeadersStayAsTheyAre(t *testing.T) {
	var all sync.WaitGroup
	for first := range int64(4) {
		all.Go(func() {
			var kept []http.Header
			for n := range int64(1000) {
				h := http.Header{}
				new(tracker).setLimitHeaders(h, &Zone{Name: "api"}, &store.State{Limit: first * 10_000, Used: n})
				kept = append(kept, h)
			}
			for n, h := range kept {
				if h.Get("X-RateLimit-Limit") != strconv.FormatInt(first*10_000, 10) || h.Get("X-RateLimit-Used") != strconv.Itoa(n) {
					t.Errorf("headers of response %d are %v", n, h)
				}
			}
		})
	}
	all.Wait()
}
