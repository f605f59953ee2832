package admin

import (
	"fmt"
	"slices"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestNearestAreDistinct: a walk may visit a bucket twice. Only whole keys identify it.
func TestNearestAreDistinct(t *testing.T) {
	c := &nearest{into: &adminapi.Near{Percent: 80}, n: 4}
	visit := func(clientKey string, isWhole bool, used int64) {
		c.visit(clientKey, isWhole, &store.State{Limit: 100, Used: used})
	}
	for range 2 {
		visit("far", true, 79)
		visit("bob", true, 80)
		visit("alice", true, 99)
		visit("carol", true, 85)
	}
	visit("beginning", false, 90)
	visit("beginning", false, 90)
	visit("full", true, 100)
	var found []string
	for _, b := range c.buckets {
		found = append(found, fmt.Sprint(b.clientKey, b.used))
	}
	if want := []string{"alice99", "beginning90", "beginning90", "carol85"}; !slices.Equal(found, want) || c.into.Full != 1 {
		t.Errorf("found are %v and %d full ones, want %v", found, c.into.Full, want)
	}
}
