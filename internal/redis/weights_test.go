package redis

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestWeights are what a config has, and all that another process needs to know of it: by its own weights it is apart
// from nobody, with each step of a resharding.
func TestWeights(t *testing.T) {
	t.Parallel()
	shard := newShard(t, ShardOptions{Primary: "127.0.0.1:1"})
	storeOf := func(steps ...map[string]int) *Store {
		var all [][]Member
		for _, step := range steps {
			var members []Member
			for name, weight := range step {
				members = append(members, Member{Name: name, Weight: weight, Shard: shard})
			}
			all = append(all, members)
		}
		return New(Options{Members: all[0], Previous: all[1:]})
	}
	type step = map[string]int
	two, three, both := storeOf(step{"a": 1, "b": 1}), storeOf(step{"a": 1, "b": 1, "c": 1}), storeOf(step{"a": 1, "b": 1, "c": 1}, step{"a": 1, "b": 1})
	for _, c := range []struct {
		name        string
		here, other *Store
		weights     string
		names       map[string]string
		apart       float64
	}{
		{"alike", two, two, "map[a:1 b:1]", nil, 0},
		{"a shard more", two, three, "map[a:1 b:1 c:1]", nil, 1. / 3},
		{"a shard less", three, two, "map[a:1 b:1]", nil, 1. / 3},
		{"a step of a resharding there", two, both, "map[a:1 b:1 c:1 was 0]", nil, 0},
		{"a step of a resharding here", both, two, "map[a:1 b:1]", nil, 0},
		{"the end of a resharding", three, both, "map[a:1 b:1 c:1 was 0]", nil, 0},
		{"three steps", three, storeOf(step{"a": 2}, step{"a": 3, "b": 1}, step{"c": 1}), "map[a:2 was 3 0 b:0 was 1 0 c:0 was 0 1]", nil, 0.1325},
		{"a weight", two, storeOf(step{"a": 3, "b": 1}), "map[a:3 b:1]", nil, 1. / 4},
		{"names that were swapped", two, two, "map[a:1 b:1]", map[string]string{"a": "b", "b": "a"}, 1},
		{"a name", two, storeOf(step{"a": 1, "bb": 1}), "map[a:1 bb:1]", map[string]string{"bb": "b"}, 1. / 3},
		{"a server", two, two, "map[a:1 b:1]", map[string]string{"a": ""}, 1. / 2},
	} {
		weights := c.other.Weights()
		share, ok := c.here.Apart(weights, c.names)
		if got := fmt.Sprint(weights); got != c.weights || !ok || math.Abs(share-c.apart) > 0.04 || (share == 0) != (c.apart == 0) {
			t.Errorf("%s: %s, %v apart (%v), want %s, %v", c.name, got, share, ok, c.weights, c.apart)
		}
	}
	many, deep := store.Details{}, store.Details{}
	for i := range mostWeights + 1 {
		many[fmt.Sprint(i)] = "1"
	}
	for i := range mostWeights / 16 {
		deep[fmt.Sprint(i)] = "1 was" + strings.Repeat(" 1", 16)
	}
	for _, foreign := range []store.Details{nil, {"a": ""}, {"a": "x"}, {"a": "-1"}, {"a": "0"}, {"a": "1 was 0"}, {"a": "1 was x"}, many, deep} {
		if _, ok := two.Apart(foreign, nil); ok {
			t.Errorf("%d weights, %v, are believed", len(foreign), foreign["a"])
		}
	}
}
