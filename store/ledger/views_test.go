package ledger

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestWaitingChargesGoToTheConfigThatRuns: not to one that may yet be rejected,
// nor to one of which only a long request is left.
func TestWaitingChargesGoToTheConfigThatRuns(t *testing.T) {
	for name, test := range map[string]struct {
		runs func(before, after *Ledger)
		want int
	}{
		"neither yet":     {func(_, _ *Ledger) {}, 0},
		"the one before":  {func(before, _ *Ledger) { before.Run() }, 0},
		"both, reloading": {func(before, after *Ledger) { before.Run(); after.Run() }, 1},
		"the rejected one has left": {func(before, after *Ledger) {
			before.Run()
			after.Run()
			after.Leave()
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// Two views on the same books, of configs that differ in their shards.
				stores := []*simulation{newSimulation(1), newSimulation(2)}
				books := NewBooks(nil)
				before, after := New(books, stores[0], Options{}), New(books, stores[1], Options{})
				for _, s := range stores {
					s.down = true
				}
				r := requestOf("alice", 100)
				before.ChargeDetached([]store.Request{r})
				time.Sleep(time.Second)
				test.runs(before, after)
				for _, s := range stores {
					s.mu.Lock()
					s.down = false
					s.mu.Unlock()
				}
				time.Sleep(3 * time.Second)
				synctest.Wait()
				for i, s := range stores {
					want := int64(0)
					if i == test.want {
						want = 1
					}
					if got := s.used(r); got != want {
						t.Errorf("store %d has %d, want %d", i, got, want)
					}
				}
				before.Leave()
				after.Leave()
			})
		})
	}
}
