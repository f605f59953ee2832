package shardlimit

import (
	"cmp"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestStoreThatDoesNotOpen, of two that a request needs: its zones follow their
// on_error, and those in the other store are asked and settled as ever.
func TestStoreThatDoesNotOpen(t *testing.T) {
	for _, broken := range []int{ownStore, rolloutStore} {
		for onError, status := range map[string]int{onErrorAllow: http.StatusOK, onErrorLocal: http.StatusOK, onErrorDeny: http.StatusServiceUnavailable} {
			for _, charge := range []bool{false, true} {
				s := new(deafStore)
				var uses [mostStores]*storeUse
				for in := range uses {
					uses[in] = &storeUse{name: t.Name(), module: deafModule{s}, logger: zap.NewNop()}
				}
				uses[broken].module = brokenModule{}
				moved := &movedShare{Store: uses[rolloutStore]}
				h := &Limiter{Config: Config{Logger: zap.NewNop(), Now: time.Now, Store: uses[ownStore], Rollout: moved}}
				for _, name := range []string{"a", "b"} {
					z := &compiledZone{
						Name: name, Key: []string{name}, Events: Quantity{Number: 10}, Cost: Quantity{Number: 1},
						Window: time.Hour, ChargeBefore: charge, OnError: onError, MaxWait: 1,
					}
					z.prepare()
					for in, use := range uses {
						z.countIn(in, use)
					}
					h.Zones = append(h.Zones, z)
				}
				// The clients are the same for all requests, and one is moved.
				place := func(z *compiledZone) uint64 { return rolloutPlace(z.clientKey(caddy.NewReplacer(), h)) }
				slices.SortFunc(h.Zones, func(a, b *compiledZone) int { return cmp.Compare(place(a), place(b)) })
				moved.bound = place(h.Zones[1])

				w := httptest.NewRecorder()
				r := caddyhttp.PrepareRequest(httptest.NewRequest(http.MethodGet, "/", nil), caddy.NewReplacer(), w, nil)
				err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
					w.WriteHeader(http.StatusOK)
					return nil
				}))
				got := w.Code
				if err != nil {
					got = statusOf(err)
				}
				asked := []string{"charge 1"}
				if status == http.StatusServiceUnavailable {
					asked = nil
				}
				if got != status || !slices.Equal(s.asked, asked) {
					t.Errorf("store %d does not open, on_error %s, charge before %v: status %d, the other one is asked to %q, want %d and %q",
						broken, onError, charge, got, s.asked, status, asked)
				}
				for in, use := range uses {
					if n := use.users.Load(); n != 0 {
						t.Errorf("store %d has %d users in the end", in, n)
					}
				}
			}
		}
	}
}

// brokenModule is a store module whose stores do not open.
type brokenModule struct{ deafModule }

func (brokenModule) OpenStore(string) (store.Store, error) { return nil, errors.New("out of order") }
