package ledger

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// repeatPause is the time between attempts at refunds while the process ends.
const repeatPause = 20 * time.Millisecond

// repeats are refunds that their shards did not execute while the process ends. No other process gives them back.
type repeats struct {
	mu sync.Mutex
	// end ends the repeating; it is nil unless the process ends.
	end  context.CancelFunc
	open []repeat
}

type repeat struct {
	sentRefund
	of, through *Ledger
	req         *store.Request
	state       store.State
	report      func(st store.State)
}

// RepeatRefunds repeats, until [Registry.End] or the end of ctx, refunds that their shards do not execute. The
// process ends.
func (b *Registry) RepeatRefunds(ctx context.Context) {
	ctx, end := context.WithCancel(ctx)
	b.repeats.mu.Lock()
	b.repeats.end = end
	b.repeats.mu.Unlock()
	go func() {
		tick := time.NewTicker(repeatPause)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				for _, r := range b.repeats.take() {
					r.through.Remote.RefundReported([]*store.Request{r.req}, func(_ int, st store.State) {
						r.state = st
						r.of.refundEnded(r)
					})
				}
			case <-ctx.Done():
				b.giveUpRefunds()
				return
			}
		}
	}()
}

// add keeps a refund for another attempt, and reports whether there is one.
func (p *repeats) add(r repeat) bool {
	if !errors.Is(r.state.Err, store.ErrNotExecuted) || errors.Is(r.state.Err, store.ErrGone) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.end != nil {
		p.open = append(p.open, r)
	}
	return p.end != nil
}

func (p *repeats) take() []repeat {
	p.mu.Lock()
	defer p.mu.Unlock()
	open := p.open
	p.open = nil
	return open
}

// giveUpRefunds ends the repeating, and reports what is left.
func (b *Registry) giveUpRefunds() {
	b.repeats.mu.Lock()
	if b.repeats.end != nil {
		b.repeats.end()
		b.repeats.end = nil
	}
	b.repeats.mu.Unlock()
	for _, r := range b.repeats.take() {
		r.of.refundEnded(r)
	}
}
