package main

import (
	"context"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// fault is what happens between Caddy and the primary.
type fault struct {
	name string
	// once makes it happen, and ends it.
	once func(ctx context.Context, p *redistest.Proxy) error
	// times is how often it happens, apart how long there is nothing in between.
	times int
	apart time.Duration
}

// faults lose replies to charges that have run.
func faults() []fault {
	return []fault{
		{"connections cut", func(_ context.Context, p *redistest.Proxy) error { return p.Cut() }, 60, 40 * time.Millisecond},
		{"replies swallowed for 300 ms", func(ctx context.Context, p *redistest.Proxy) error {
			if err := p.SwallowReplies(); err != nil {
				return err
			}
			pause(ctx, 300*time.Millisecond)
			return p.Pass()
		}, 3, 700 * time.Millisecond},
	}
}

// inflict makes a fault happen as often as it says.
func (f fault) inflict(ctx context.Context, p *redistest.Proxy) error {
	for range f.times {
		pause(ctx, f.apart)
		if err := f.once(ctx, p); err != nil {
			return err
		}
	}
	pause(ctx, f.apart)
	return ctx.Err()
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
