package limiter

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// hungStore is a deafStore that answers no charge before its caller leaves.
type hungStore struct {
	*deafStore
	charging chan struct{}
}

func (s hungStore) Charge(ctx context.Context, asks []*store.Ask) {
	s.deafStore.Charge(ctx, asks)
	close(s.charging)
	<-ctx.Done()
	setAll(asks, store.State{Err: fmt.Errorf("%w: %w", store.ErrUncertain, ctx.Err())})
}

// TestEndOfTheProcess gives back slots of requests that still run, once, and does not wait for a renewal. Later ones
// give back theirs at once.
func TestEndOfTheProcess(t *testing.T) {
	for name, test := range map[string]struct {
		renews bool
		err    error
		asked  []string
	}{
		"idle":                       {false, nil, []string{"refund 1", "refund 1"}},
		"during a renewal":           {true, nil, []string{"charge 1", "refund 1", "refund 1"}},
		"a local slot, handed over":  {true, fmt.Errorf("%w: away", store.ErrNotExecuted), []string{"charge 1", "refund 1"}},
		"a slot that may be the own": {false, fmt.Errorf("%w: no answer", store.ErrUncertain), []string{"refund 1", "refund 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			defer func(all *leases) { running = all }(running)
			running = newLeases()
			s := hungStore{&deafStore{takeError: test.err}, make(chan struct{})}
			onError := stores.OnErrorLocal
			if errors.Is(test.err, store.ErrUncertain) {
				onError = stores.OnErrorAllow
			}
			h := newTestHandler(t, &Zone{OnError: onError, Algorithm: store.Concurrency}, s)
			h.answered(func(_ http.ResponseWriter, r *http.Request) {
				if test.renews {
					renewed := make(chan struct{})
					defer func() { <-renewed }()
					go func() {
						defer close(renewed)
						trackerOf(r).own[0].lease().renew()
					}()
					<-s.charging
				}
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					EndLeases(t.Context())
				}()
				select {
				case <-ended:
				case <-time.After(time.Minute):
					t.Error("it does not end")
				}
			})
			if w := h.answeredWith(http.StatusOK); w.Code != http.StatusOK {
				t.Errorf("a late request has status %d", w.Code)
			}
			if err := s.wasAsked(test.asked...); err != nil {
				t.Error(err)
			}
			if len(running.all) > 0 {
				t.Errorf("%d leases are left", len(running.all))
			}
		})
	}
}

// stuckStore answers a charge once it is released, although its caller has left.
type stuckStore struct {
	*deafStore
	charging, released chan struct{}
}

func (s stuckStore) Charge(ctx context.Context, asks []*store.Ask) {
	close(s.charging)
	<-s.released
	s.deafStore.Charge(ctx, asks)
}

// TestEndDoesNotWaitForAStore that does not return: the slot is given back later, if at all.
func TestEndDoesNotWaitForAStore(t *testing.T) {
	defer func(all *leases) { running = all }(running)
	running = newLeases()
	s := stuckStore{&deafStore{}, make(chan struct{}), make(chan struct{})}
	h := newTestHandler(t, &Zone{Algorithm: store.Concurrency}, s)
	h.answered(func(_ http.ResponseWriter, r *http.Request) {
		renewed := make(chan struct{})
		go func() {
			defer close(renewed)
			trackerOf(r).own[0].lease().renew()
		}()
		<-s.charging
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		EndLeases(ctx)
		if len(s.asked) > 0 {
			t.Errorf("the store is called to %q", s.asked)
		}
		close(s.released)
		<-renewed
	})
	if err := s.wasAsked("charge 1", "refund 1"); err != nil {
		t.Error(err)
	}
}

// TestLeasesAreForgotten once their requests have ended, refused ones too.
func TestLeasesAreForgotten(t *testing.T) {
	defer func(all *leases) { running = all }(running)
	running = newLeases()
	h := newTestHandler(t, &Zone{Algorithm: store.Concurrency}, &deafStore{})
	h.answered(func(http.ResponseWriter, *http.Request) {
		if n := len(running.all); n != 1 {
			t.Errorf("%d leases while a request runs", n)
		}
	})
	if n := len(running.all); n != 0 {
		t.Errorf("%d leases are left", n)
	}
}
