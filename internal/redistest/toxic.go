package redistest

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/Shopify/toxiproxy/v2/stream"
)

// The names of the toxics, which also identify them.
const (
	delayToxic    = "delay"
	requestsToxic = "drop requests"
	repliesToxic  = "drop replies"
)

// Delay makes all bytes from the server arrive later by d, rounded up to whole
// milliseconds, on present and on new connections. It replaces the previous
// delay; 0 removes it.
func (p *Proxy) Delay(d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("delay by %v: negative", d)
	}
	p.ops.Lock()
	defer p.ops.Unlock()
	return p.setDelay(d)
}

func (p *Proxy) setDelay(d time.Duration) error {
	// Toxiproxy's way to update a toxic races with the toxic's work.
	if err := p.remove(delayToxic); err != nil {
		return err
	}
	if d == 0 {
		return nil
	}
	milliseconds := (d + time.Millisecond - 1) / time.Millisecond
	return p.add(delayToxic, "latency", stream.Downstream, fmt.Sprintf(`{"latency": %d}`, milliseconds))
}

// SwallowReplies drops all bytes from the server. Bytes to the server pass and
// connections stay open, so that commands take effect and nobody learns it.
func (p *Proxy) SwallowReplies() error {
	p.ops.Lock()
	defer p.ops.Unlock()
	return p.setDrops(false, true)
}

// SwallowAll drops all bytes in both directions. Connections stay open and new
// ones are accepted, but they are a black hole.
func (p *Proxy) SwallowAll() error {
	p.ops.Lock()
	defer p.ops.Unlock()
	return p.setDrops(true, true)
}

// ResetReplies makes every connection, present ones too, break with a reset once
// n bytes have come from the server in all, and so in the middle of a reply or
// between two. It replaces the previous number; 0 removes it. n must not be
// negative.
func (p *Proxy) ResetReplies(n int64) error {
	if n < 0 {
		return fmt.Errorf("reset after %d bytes: negative", n)
	}
	p.replyLimit.Store(n)
	return nil
}

// Pass ends the delay, the resets and the dropping of bytes. Connections that
// were open while bytes were dropped are closed, so that no stream of replies
// goes on after a gap.
func (p *Proxy) Pass() error {
	p.replyLimit.Store(0)
	p.ops.Lock()
	defer p.ops.Unlock()
	if err := p.setDelay(0); err != nil {
		return err
	}
	return p.setDrops(false, false)
}

// setDrops makes the proxy drop the bytes to the server, or those from it, or
// both, or none.
func (p *Proxy) setDrops(requests, replies bool) error {
	drops := []struct {
		name      string
		direction stream.Direction
		want      bool
	}{
		{requestsToxic, stream.Upstream, requests},
		{repliesToxic, stream.Downstream, replies},
	}
	for _, drop := range drops {
		has := p.has(drop.name)
		switch {
		case drop.want && !has:
			// A timeout of 0 drops bytes and never closes the connection.
			if err := p.add(drop.name, "timeout", drop.direction, `{"timeout": 0}`); err != nil {
				return err
			}
		case !drop.want && has:
			p.drain()
			if err := p.remove(drop.name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *Proxy) has(toxic string) bool {
	return p.links.Toxics.GetToxic(toxic) != nil
}

func (p *Proxy) add(name, kind string, direction stream.Direction, attributes string) error {
	// JSON is Toxiproxy's only way in.
	description := fmt.Sprintf(`{"name": %q, "type": %q, "stream": %q, "attributes": %s}`,
		name, kind, direction, attributes)
	if _, err := p.links.Toxics.AddToxicJson(strings.NewReader(description)); err != nil {
		return fmt.Errorf("add toxic %q to proxy %s: %w", name, p.Addr(), err)
	}
	return nil
}

// remove removes the toxic of that name, if there is one.
func (p *Proxy) remove(name string) error {
	if !p.has(name) {
		return nil
	}
	if err := p.links.Toxics.RemoveToxic(context.Background(), name); err != nil {
		return fmt.Errorf("remove toxic %q from proxy %s: %w", name, p.Addr(), err)
	}
	return nil
}
