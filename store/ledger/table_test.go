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
			if tab.count != len(want) || 4*tab.count > 3*len(tab.slots) {
				t.Fatalf("seed %d: %d entries in %d slots, want %d", seed, tab.count, len(tab.slots), len(want))
			}
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
	}
	if e := new(table).next(); e != nil {
		t.Errorf("an empty table has %v", e)
	}
}
