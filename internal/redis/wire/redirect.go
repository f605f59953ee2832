package wire

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	goredis "github.com/redis/go-redis/v9"
)

// maxRedirects bounds the MOVED and ASK replies that a command follows.
const maxRedirects = 3

// redirect makes commands of c that were answered with MOVED or ASK, and did not run,
// calls in the lane of the node that the reply names, and others that need another try a
// call in this lane. It reports whether any were redirected; c finishes after all calls.
func (l *Lane) redirect(c *Call) bool {
	parts := l.redirected(c)
	if parts == nil {
		return false
	}
	l.Shard.nudge()
	if c.Detached != nil && len(c.Cmds) > 1 {
		c.finishDone()
	}
	open := new(atomic.Int64)
	for _, part := range parts {
		open.Add(int64(len(part.Cmds)))
	}
	for addr, part := range parts {
		part.Detached = func(part *Call) {
			ended := int64(len(part.Cmds))
			part.Release()
			if open.Add(-ended) == 0 {
				c.finish()
			}
		}
		switch to := l.Shard.laneAt(addr, l.persistent); {
		case to == nil:
			part.fail(fmt.Errorf("redis %s: %w", addr, ErrClosed))
		case c.isApart:
			part.isApart = true
			go to.runApart(part)
		default:
			to.Post(part)
		}
	}
	return true
}

// redirected returns calls of those of c's commands that need another try, by the
// address of the node; nil unless one was redirected.
func (l *Lane) redirected(c *Call) (parts map[string]*Call) {
	if c.redirects == maxRedirects ||
		!slices.ContainsFunc(c.Cmds, func(cmd *Command) bool { _, _, ok := l.redirection(cmd.Outcome); return ok }) {
		return nil
	}
	parts = map[string]*Call{}
	for _, cmd := range c.Cmds {
		addr, asking, ok := l.redirection(cmd.Outcome)
		switch {
		case ok:
			cmd.asking = asking
			cmd.forgetClock()
		case l.persistent && cmd.isOpen():
			addr = l.Addr
		default:
			continue
		}
		part := parts[addr]
		if part == nil {
			part = NewCall(c.deadline, c.fair)
			part.redirects = c.redirects + 1
			parts[addr] = part
		}
		part.Cmds = append(part.Cmds, cmd)
	}
	return parts
}

// redirection returns the node to which err redirects a command, which did not run,
// and whether that node runs it only after ASKING.
func (l *Lane) redirection(err error) (addr string, asking, ok bool) {
	addr, asking = redirectIn(err)
	colon := strings.LastIndexByte(addr, ':')
	if colon < 0 {
		return "", false, false
	}
	return nodeAddr(strings.Trim(addr[:colon], "[]"), addr[colon+1:], l.Addr), asking, true
}

// redirectIn returns the address in a redirection, and whether that is of one key, or "".
func redirectIn(err error) (addr string, asking bool) {
	if err == nil {
		return "", false
	}
	if addr, ok := goredis.IsMovedError(err); ok {
		return addr, false
	}
	return goredis.IsAskError(err)
}

// probedParts is in how many parts of the slots Redirects looks.
const probedParts = 64

// Redirects reports whether the server of a client is a node of a Redis Cluster that lacks slots: it
// names another one for some of the keys that begin with key, one in each part of the slots.
func Redirects(ctx context.Context, client *goredis.Client, key string) bool {
	pipe := client.Pipeline()
	var probed [probedParts]bool
	for n := 0; pipe.Len() < probedParts && n < SlotCount; n++ {
		name := key + strconv.Itoa(n)
		if part := int(SlotOf([]byte(name))) * probedParts / SlotCount; !probed[part] {
			probed[part] = true
			pipe.Get(ctx, name)
		}
	}
	replies, _ := pipe.Exec(ctx)
	return slices.ContainsFunc(replies, func(reply goredis.Cmder) bool {
		addr, _ := redirectIn(reply.Err())
		return addr != ""
	})
}

// laneAt returns the lane to a node, or nil once the shard is closed. While it is being
// closed the lane is a new one, which closes after the others.
func (s *Shard) laneAt(addr string, persistent bool) *Lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes == nil {
		return nil
	}
	return s.laneTo(addr, persistent)
}
