package redis

import (
	"fmt"
	"math"
	"slices"
	"testing"
)

func names(n int) (names []string, weights []int) {
	for i := range n {
		names = append(names, fmt.Sprintf("shard-%c", 'a'+i))
		weights = append(weights, 1)
	}
	return names, weights
}

func membersOf(names []string, weights []int) (members []Member) {
	for i, name := range names {
		members = append(members, Member{Name: name, Weight: weights[i]})
	}
	return members
}

func TestAddingAShardMovesOnlyItsShare(t *testing.T) {
	const keys = 100_000
	for n := 2; n <= 8; n++ {
		old := newRendezvous(membersOf(names(n - 1)))
		now := newRendezvous(membersOf(names(n)))
		moved := 0
		for i := range keys {
			key := fmt.Sprintf("x7Q:client-%d", i)
			was, is := old.owner(key), now.owner(key)
			if was != is {
				moved++
				if is != n-1 {
					t.Fatalf("%s moved from shard %d to shard %d, although both are old", key, was, is)
				}
			}
		}
		if share := float64(moved) / keys; share > 1/float64(n)+0.02 || share < 1/float64(n)-0.02 {
			t.Errorf("shard %d took %.3f of the keys, want %.3f", n, share, 1/float64(n))
		}
	}
}

// TestStoreKeepsItsMembers, whatever their slice is used for afterwards.
func TestStoreKeepsItsMembers(t *testing.T) {
	members := []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: "127.0.0.1:1"})}}
	s := New(Options{Members: members, Previous: steps(members)})
	members[0].Name = "b"
	if owner := s.Owner("k"); owner != "a" {
		t.Errorf("the owner is %s, want a", owner)
	}
	if shards := s.Shards(); len(shards) != 1 || shards[0].Name != "a" {
		t.Errorf("the shards are %+v, want a", shards)
	}
}

func TestWeightsHold(t *testing.T) {
	const keys = 100_000
	weights := []int{1, 2, 5}
	shards, _ := names(len(weights))
	r := newRendezvous(membersOf(shards, weights))
	counts := make([]int, len(weights))
	for i := range keys {
		counts[r.owner(fmt.Sprintf("x7Q:client-%d", i))]++
	}
	for i, w := range weights {
		want, got := float64(w)/8, float64(counts[i])/keys
		if math.Abs(got-want) > 0.02 {
			t.Errorf("shard of weight %d has %.3f of the keys, want %.3f", w, got, want)
		}
	}
}

func TestOwnerDependsOnNamesOnly(t *testing.T) {
	shards, weights := names(4)
	r := newRendezvous(membersOf(shards, weights))
	reversed := slices.Clone(shards)
	slices.Reverse(reversed)
	other := newRendezvous(membersOf(reversed, weights))
	doubled := newRendezvous(membersOf(shards, []int{2, 2, 2, 2}))
	heavy := &rendezvous{seeds: r.seeds, weights: r.weights}
	for i := range 10_000 {
		key := fmt.Sprintf("client-%d", i)
		want := shards[r.owner(key)]
		if got := reversed[other.owner(key)]; got != want {
			t.Fatalf("%s belongs to %s, and to %s in another order", key, want, got)
		}
		if got := shards[doubled.owner(key)]; got != want {
			t.Fatalf("%s belongs to %s, and to %s with all weights doubled", key, want, got)
		}
		if got := shards[heavy.owner(key)]; got != want {
			t.Fatalf("%s belongs to %s, and to %s by the formula for unequal weights", key, want, got)
		}
	}
}
