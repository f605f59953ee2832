package ledger

import (
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
)

// TestTableIsAMap inserts and removes entries at random, and compares the table with a map. The
// round of sweeps meets every entry.
func TestTableIsAMap(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 0))
		hashes := maphash.MakeSeed()
		var tab table
		want := map[identity.ID]*entry{}
		for range 5000 {
			id := identity.ID{Limit: rng.Uint32N(3), Key: fmt.Sprint(rng.IntN(200))}
			e, _ := tab.find(id, id.Hash(hashes))
			switch {
			case e != want[id]:
				t.Fatalf("seed %d: %v is %p, want %p", seed, id, e, want[id])
			case e == nil:
				want[id] = &entry{id: id}
				tab.insert(want[id], hashes)
			case rng.IntN(2) == 0:
				tab.remove(e, hashes)
				delete(want, id)
			}
			requireSize(t, &tab, len(want))
		}
		all, round := map[*entry]bool{}, map[*entry]bool{}
		for e := range tab.all {
			all[e] = true
		}
		for range tab.count {
			round[tab.next()] = true
		}
		for id, e := range want {
			if found, _ := tab.find(id, id.Hash(hashes)); found != e || !all[e] || !round[e] {
				t.Errorf("seed %d: %v is missing", seed, id)
			}
		}
		// After a flood.
		for id, e := range want {
			tab.remove(e, hashes)
			delete(want, id)
			requireSize(t, &tab, len(want))
			for id, e := range want {
				if found, _ := tab.find(id, id.Hash(hashes)); found != e {
					t.Fatalf("seed %d: %v is missing", seed, id)
				}
			}
		}
	}
	if e := new(table).next(); e != nil {
		t.Errorf("an empty table has %v", e)
	}
}

// requireSize requires so many entries, and slots for them that are neither too few nor too many.
func requireSize(t *testing.T, tab *table, entries int) {
	t.Helper()
	if n := len(tab.slots); tab.count != entries || 4*entries > 3*n || n > smallestTable && 8*entries <= n {
		t.Fatalf("%d entries in %d slots, want %d", tab.count, n, entries)
	}
}
