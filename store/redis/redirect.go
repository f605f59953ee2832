package redis

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"

	goredis "github.com/redis/go-redis/v9"
)

// maxRedirects is how often a command follows a MOVED or ASK.
const maxRedirects = 3

// node is another node of a Redis Cluster, to which a command was redirected.
type node struct {
	addr string
	// asking is set if that node runs the command only after ASKING.
	asking bool
}

// redirection returns the node to which err redirects a command. The node that
// replied err did not run the command.
func (l *lane) redirection(err error) (to node, ok bool) {
	if err == nil || l.shard.cluster == nil {
		return node{}, false
	}
	addr, ok := goredis.IsMovedError(err)
	if !ok {
		if addr, ok = goredis.IsAskError(err); !ok {
			return node{}, false
		}
		to.asking = true
	}
	colon := strings.LastIndexByte(addr, ':')
	if colon < 0 {
		return node{}, false
	}
	host := strings.Trim(addr[:colon], "[]")
	if host == "" || host == "?" {
		// A node without a name of its own is where the one is that replied.
		host, _, _ = net.SplitHostPort(l.addr)
	}
	to.addr = net.JoinHostPort(host, addr[colon+1:])
	return to, true
}

// laneAt returns the lane to a node, or nil once the shard is closed. A node that
// is in no topology yet keeps its lane until the next one is adopted. While the
// shard is being closed the lane is a new one, which is closed after the others.
func (s *Shard) laneAt(addr string, persistent bool) *lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes == nil {
		return nil
	}
	return s.laneTo(addr, persistent)
}

// redirect reports whether some of c's commands belong to other nodes, and lets
// these run them: as calls of their own in the nodes' lanes, so that nobody here
// waits for a node that is silent. What else of c is to be sent again is another
// such call. When all of them have ended, c is finished; if it is detached, those of
// its commands that are settled do not wait for that.
func (l *lane) redirect(c *call) bool {
	parts := l.redirected(c)
	if parts == nil {
		return false
	}
	l.shard.nudge()
	if c.detached != nil && len(c.cmds) > 1 {
		c.finishSettled()
	}
	open := new(atomic.Int64)
	for _, part := range parts {
		open.Add(int64(len(part.cmds)))
	}
	for addr, part := range parts {
		part.detached = func(part *call) {
			ended := int64(len(part.cmds))
			part.release()
			if open.Add(-ended) == 0 {
				c.finish()
			}
		}
		if to := l.shard.laneAt(addr, l.persistent); to != nil {
			to.post(part)
		} else {
			part.fail(fmt.Errorf("redis %s: %w", addr, errClosed))
		}
	}
	return true
}

// redirected returns calls of c's commands that are to be sent again, by the
// address of the node to send them to; nil unless one was redirected.
func (l *lane) redirected(c *call) (parts map[string]*call) {
	if l.shard.cluster == nil || c.redirects == maxRedirects ||
		!slices.ContainsFunc(c.cmds, func(cmd *command) bool { _, ok := l.redirection(cmd.outcome); return ok }) {
		return nil
	}
	parts = map[string]*call{}
	for _, cmd := range c.cmds {
		to, ok := l.redirection(cmd.outcome)
		switch {
		case ok:
			cmd.asking = to.asking
			cmd.forgetClock()
		case l.persistent && cmd.isOpen():
			to.addr = l.addr
		default:
			continue
		}
		part := parts[to.addr]
		if part == nil {
			part = newCall(c.deadline)
			part.fair, part.redirects = c.fair, c.redirects+1
			parts[to.addr] = part
		}
		part.cmds = append(part.cmds, cmd)
	}
	return parts
}
