package limiter

import (
	"maps"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// maxRecentClients bounds the memory of a zone. A client beyond it costs another log entry.
const maxRecentClients = 100_000

// recentClients are what was logged of the buckets of a zone in their windows, and what was free there. The
// zero value is empty, and takes no memory for clients.
type recentClients struct {
	limits identity.Limits

	mu   sync.RWMutex
	seen map[identity.ID]logged
	// peak is the most entries that seen has held. A map does not shrink.
	peak int
}

// logged is the window in which something was logged: its end, or 0 if the algorithm has
// no windows, and until when that is remembered. free is the cost that was not charged until then.
type logged struct {
	reset int64
	until time.Time
	free  int64
}

// idOf identifies what is logged of a bucket: limits that differ in their window have
// buckets of their own.
func (c *recentClients) idOf(about uint32, limit *store.Limit, clientKey string) identity.ID {
	return identity.ID{Limit: c.limits.Number(limit)*abouts + about, Key: clientKey}
}

// isFirst reports whether nothing was logged in the window, and notes it.
func (c *recentClients) isFirst(id identity.ID, is logged, now time.Time) bool {
	wasLogged := func() bool {
		was, found := c.seen[id]
		return found && was.reset == is.reset && now.Before(was.until)
	}
	// Most refusals are not the first, and need not wait for each other.
	c.mu.RLock()
	isKnown := wasLogged()
	c.mu.RUnlock()
	if isKnown {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if wasLogged() {
		return false
	}
	c.put(id, is)
	return true
}

// put makes an entry. It drops another one if there is no room. The caller holds the lock.
func (c *recentClients) put(id identity.ID, is logged) {
	if c.seen == nil {
		c.seen = map[identity.ID]logged{}
	}
	if _, found := c.seen[id]; !found && len(c.seen) >= maxRecentClients {
		for any := range c.seen {
			delete(c.seen, any)
			break
		}
	}
	c.seen[id] = is
	c.peak = max(c.peak, len(c.seen))
}

// addFree adds to the cost that was free in a window, which the first cost begins, and returns it.
func (c *recentClients) addFree(id identity.ID, cost int64, window time.Duration, now time.Time) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	is, found := c.seen[id]
	if !found || !now.Before(is.until) {
		is = logged{until: now.Add(window)}
	}
	is.free = min(is.free+cost, store.MaxEvents)
	c.put(id, is)
	return is.free
}

// expire forgets what has expired, and gives memory back once most of a flood has.
func (c *recentClients) expire(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.seen, func(_ identity.ID, is logged) bool { return !now.Before(is.until) })
	if n := len(c.seen); 4*n < c.peak {
		smaller := make(map[identity.ID]logged, n)
		maps.Copy(smaller, c.seen)
		c.seen, c.peak = smaller, n
	}
}

// forget has the next of something be the first.
func (c *recentClients) forget(id identity.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.seen, id)
}
