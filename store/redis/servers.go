package redis

import (
	"sync/atomic"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// servers are a primary and its replicas: they hold the same buckets.
type servers struct {
	primary string
	clock   *primaryClock
	offsets *offsets
	checks  *lane
	charges *lane
	// replicas answer checks, in turn.
	replicas []*lane
	turn     *atomic.Uint32
	// tagged is set for the nodes of a Redis Cluster, where keys have a hash
	// tag: the buckets of one client are on one node.
	tagged bool
}

// replica returns the next, in turn, of the replicas that can be asked, or nil.
func (s *servers) replica() *lane {
	usable := 0
	for _, l := range s.replicas {
		if l.isUsable() {
			usable++
		}
	}
	if usable == 0 {
		return nil
	}
	next := int(s.turn.Add(1) % uint32(usable)) //nolint:gosec // a handful
	for _, l := range s.replicas {
		if !l.isUsable() {
			continue
		}
		if next == 0 {
			return l
		}
		next--
	}
	return nil
}

// isUsable tells whether a replica can be asked.
func (l *lane) isUsable() bool { return l.isUp() && !l.lags.Load() }

// mayMiss tells whether a replica may know nothing of a bucket that there is: in
// a Redis Cluster a slot may be about to move, with half of its keys elsewhere.
func (s *servers) mayMiss(st *store.State) bool {
	return s != nil && s.tagged && st.Content == store.Content{} && st.Used == 0
}

// lanes are the ways to all of the servers.
func (s *servers) lanes() []*lane {
	return append([]*lane{s.checks, s.charges}, s.replicas...)
}

// roles are the addresses of a primary and of its replicas, and the slots of a
// Redis Cluster that are theirs.
type roles struct {
	primary  string
	replicas []string
	slots    []slotRange
}
