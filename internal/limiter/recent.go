package limiter

import (
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// maxRecentClients bounds the memory of a zone. A client beyond it costs another log entry.
	maxRecentClients = 100_000
	// recentSweep is how many entries are examined for expiry when one is added.
	recentSweep = 4
)

// recentClients are what was logged of the buckets of a zone in their windows. The zero value is
// empty, and takes no memory for clients.
type recentClients struct {
	limits identity.Limits

	mu   sync.Mutex
	seen map[identity.ID]logged
	// last is when the last entry expires.
	last time.Time
}

// logged is the window in which something was logged: its end, or 0 if the algorithm has
// no windows, and until when that is remembered.
type logged struct {
	reset int64
	until time.Time
}

// idOf identifies what is logged of a bucket: limits that differ in their window have
// buckets of their own.
func (c *recentClients) idOf(about uint32, limit *store.Limit, clientKey string) identity.ID {
	return identity.ID{Limit: c.limits.Number(limit)*abouts + about, Key: clientKey}
}

// isFirst reports whether nothing was logged in the window, and notes it.
func (c *recentClients) isFirst(id identity.ID, is logged, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if was, found := c.seen[id]; found && was.reset == is.reset && now.Before(was.until) {
		return false
	}
	c.makeRoom(now)
	c.seen[id] = is
	if is.until.After(c.last) {
		c.last = is.until
	}
	return true
}

// makeRoom forgets what has expired: all of it at once if nothing else is left, because a map
// does not shrink. Without room it forgets any entry. mu is held.
func (c *recentClients) makeRoom(now time.Time) {
	if c.seen == nil || !now.Before(c.last) {
		c.seen = map[identity.ID]logged{}
		return
	}
	examined := 0
	for id, is := range c.seen {
		if !now.Before(is.until) || len(c.seen) >= maxRecentClients {
			delete(c.seen, id)
		}
		if examined++; examined == recentSweep {
			return
		}
	}
}

// forget has the next of something be the first.
func (c *recentClients) forget(id identity.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.seen, id)
}
