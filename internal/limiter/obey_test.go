package limiter

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestObeyASlowResponse: the time that it names begins with the response, and not with the request.
func TestObeyASlowResponse(t *testing.T) {
	now := time.Now()
	clock := func() time.Time { return now }
	h := newTestHandler(t, &Zone{ObeyUpstream: true}, memory.New(memory.NewBuckets(), memory.Options{Now: clock}))
	h.Now = clock
	w := h.answered(func(w http.ResponseWriter, _ *http.Request) {
		now = now.Add(30 * time.Second)
		w.Header().Set("Retry-After", "10")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	if got := w.Header(); got.Get("X-RateLimit-Remaining") != "0" || got.Get("Retry-After") != "10" {
		t.Errorf("the response says %v", got)
	}
	for after, want := range map[time.Duration]int{9900 * time.Millisecond: http.StatusTooManyRequests, 10 * time.Second: http.StatusOK} {
		began := now
		now = now.Add(after)
		if got := h.answeredWith(http.StatusOK).Code; got != want {
			t.Errorf("%v later the status is %d, want %d", after, got, want)
		}
		now = began
	}
}

// TestWhatIsObeyed by the calls of the store: whoever is not limited is not kept refused.
func TestWhatIsObeyed(t *testing.T) {
	notExecuted := fmt.Errorf("%w: connection refused", store.ErrNotExecuted)
	for name, test := range map[string]struct {
		zone   *Zone
		err    error
		status int
		asked  []string
	}{
		"too many requests":        {&Zone{ObeyUpstream: true}, nil, 429, []string{"charge 1", "penalize 1"}},
		"unavailable":              {&Zone{ObeyUpstream: true, ChargeBefore: true}, nil, 503, []string{"penalize 1"}},
		"another status":           {&Zone{ObeyUpstream: true}, nil, 500, []string{"charge 1"}},
		"without the option":       {&Zone{}, nil, 429, []string{"charge 1"}},
		"only observed":            {&Zone{ObeyUpstream: true, Enforce: new(float64)}, nil, 429, []string{"charge 1"}},
		"a store that is away":     {&Zone{ObeyUpstream: true, ChargeBefore: true, OnError: stores.OnErrorAllow}, notExecuted, 429, []string{"charge 1"}},
		"settled at the end":       {&Zone{ObeyUpstream: true, SettleAtEnd: true}, nil, 429, []string{"penalize 1", "charge 1"}},
		"what costs nothing there": {&Zone{ObeyUpstream: true, ChargeBefore: true, Free: freeStatus(429)}, nil, 429, []string{"refund 1", "penalize 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &deafStore{takeError: test.err}
			newTestHandler(t, test.zone, s).answered(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "10")
				w.WriteHeader(test.status)
			})
			if err := s.wasAsked(test.asked...); err != nil {
				t.Error(err)
			}
		})
	}
}

func freeStatus(code int) (s StatusSet) {
	s.Add(code)
	return s
}
