package admin

import (
	"fmt"
	"slices"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestNearestAreDistinct: a walk may visit a bucket twice.
func TestNearestAreDistinct(t *testing.T) {
	c := &nearest{into: &adminapi.Near{Percent: 80}, n: 4}
	visit := func(clientKey string, used int64) {
		c.visit(clientKey, &store.State{Limit: 100, Used: used})
	}
	for range 2 {
		visit("far", 79)
		visit("bob", 80)
		visit("alice", 99)
		visit("carol", 85)
		visit("dave", 90)
	}
	visit("full", 100)
	var found []string
	for _, b := range c.buckets {
		found = append(found, fmt.Sprint(b.clientKey, b.used))
	}
	if want := []string{"alice99", "dave90", "carol85", "bob80"}; !slices.Equal(found, want) || c.into.Full != 1 {
		t.Errorf("found are %v and %d full ones, want %v", found, c.into.Full, want)
	}
}
