package shardlimit

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// returningStore is a deafStore that can be charged again.
type returningStore struct {
	*deafStore
	chargeError error
}

func (s *returningStore) Charge(ctx context.Context, reqs []store.Request) []store.State {
	states := s.deafStore.Charge(ctx, reqs)
	for i := range states {
		states[i].Err = s.chargeError
	}
	return states
}

// TestLocalSlotIsHandedOver to the store that is back, by the next renewal, and
// given back there at the end. One that never got there is not.
func TestLocalSlotIsHandedOver(t *testing.T) {
	notExecuted := fmt.Errorf("%w: connection refused", store.ErrNotExecuted)
	uncertain := fmt.Errorf("%w: no answer in time", store.ErrUncertain)
	for name, test := range map[string]struct {
		err   error
		asked []string
	}{
		"back":       {nil, []string{"charge 1", "charge 1", "refund 1"}},
		"maybe back": {uncertain, []string{"charge 1", "charge 1", "refund 1"}},
		"still away": {notExecuted, []string{"charge 1", "charge 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &returningStore{&deafStore{takeError: notExecuted}, test.err}
			h := newTestHandler(t, &compiledZone{OnError: onErrorLocal, Algorithm: "concurrency"}, s)
			repl := caddy.NewReplacer()
			w := httptest.NewRecorder()
			r := caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), repl, w, nil)
			err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
				p := trackerOf(r).parts[0]
				used := func() int64 { return p.open(0).local.Buckets.Peek(t.Context(), p.reqs)[0].Used }
				p.lease.renew()
				p.lease.renew()
				if n := used(); n != 1 {
					t.Errorf("%d slots are taken in the local counts, want 1", n)
				}
				return nil
			}))
			if err != nil {
				t.Error(err)
			}
			if !slices.Equal(s.asked, test.asked) {
				t.Errorf("the store is asked to %q, want %q", s.asked, test.asked)
			}
		})
	}
}
