package redis

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	goredis "github.com/redis/go-redis/v9"
)

// maxRedirects bounds the MOVED and ASK replies that a command follows.
const maxRedirects = 3

// redirect makes commands of c that were answered with MOVED or ASK, and did not run,
// calls in the lane of the node that the reply names, and others that need another try a
// call in this lane. It reports whether any were redirected; c finishes after all calls.
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

// redirected returns calls of those of c's commands that need another try, by the
// address of the node; nil unless one was redirected.
func (l *lane) redirected(c *call) (parts map[string]*call) {
	if !l.shard.isCluster() || c.redirects == maxRedirects ||
		!slices.ContainsFunc(c.cmds, func(cmd *command) bool { _, _, ok := l.redirection(cmd.outcome); return ok }) {
		return nil
	}
	parts = map[string]*call{}
	for _, cmd := range c.cmds {
		addr, asking, ok := l.redirection(cmd.outcome)
		switch {
		case ok:
			cmd.asking = asking
			cmd.forgetClock()
		case l.persistent && cmd.isOpen():
			addr = l.addr
		default:
			continue
		}
		part := parts[addr]
		if part == nil {
			part = newCall(c.deadline)
			part.fair, part.redirects = c.fair, c.redirects+1
			parts[addr] = part
		}
		part.cmds = append(part.cmds, cmd)
	}
	return parts
}

// redirection returns the node to which err redirects a command, which did not run,
// and whether that node runs it only after ASKING.
func (l *lane) redirection(err error) (addr string, asking, ok bool) {
	if err == nil {
		return "", false, false
	}
	if addr, ok = goredis.IsMovedError(err); !ok {
		addr, asking = goredis.IsAskError(err)
	}
	colon := strings.LastIndexByte(addr, ':')
	if colon < 0 {
		return "", false, false
	}
	return nodeAddr(strings.Trim(addr[:colon], "[]"), addr[colon+1:], l.addr), asking, true
}

// laneAt returns the lane to a node, or nil once the shard is closed. While it is being
// closed the lane is a new one, which closes after the others.
func (s *Shard) laneAt(addr string, persistent bool) *lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes == nil {
		return nil
	}
	return s.laneTo(addr, persistent)
}
