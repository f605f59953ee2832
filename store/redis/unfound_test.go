package redis

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// watched is a context that reveals that somebody waits for its end.
type watched struct {
	context.Context
	once   sync.Once
	waited chan struct{}
}

func (w *watched) Done() <-chan struct{} {
	w.once.Do(func() { close(w.waited) })
	return w.Context.Done()
}

// TestOneDeadlineForFindingAndAsking: the time that a call waits until the servers
// are found is not added to the time that they have.
func TestOneDeadlineForFindingAndAsking(t *testing.T) {
	silent, server := redistest.Start(t), redistest.Start(t)
	must(t, silent.Pause())
	t.Cleanup(func() { must(t, silent.Resume()) })
	for name, call := range map[string]func(ctx context.Context, s *Store) []store.State{
		"Check":    func(ctx context.Context, s *Store) []store.State { return s.Check(ctx, ask("k")) },
		"Peek":     func(ctx context.Context, s *Store) []store.State { return s.Peek(ctx, ask("k")) },
		"Take":     func(ctx context.Context, s *Store) []store.State { return s.Take(ctx, ask("k")) },
		"Charge":   func(ctx context.Context, s *Store) []store.State { return s.Charge(ctx, ask("k")) },
		"Refund":   func(ctx context.Context, s *Store) []store.State { return s.Refund(ctx, ask("k")) },
		"Penalize": func(ctx context.Context, s *Store) []store.State { return s.Penalize(ctx, ask("k")) },
	} {
		t.Run(name, func(t *testing.T) {
			// Without workers nothing that is queued leaves.
			shard := newShard(t, ShardOptions{Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{silent.Addr()}}, PoolSize: -1})
			s := newStore(t, shard, func(o *Options) { o.CheckTimeout, o.ChargeTimeout = time.Hour, time.Hour })
			ctx, cancel := context.WithCancel(t.Context())
			waits := &watched{Context: ctx, waited: make(chan struct{})}
			done := make(chan struct{})
			go func() {
				defer close(done)
				call(waits, s)
			}()
			<-waits.waited
			found := time.Now()
			shard.adopt([]roles{{primary: server.Addr()}})
			var deadline time.Time
			eventually(t, "the call is queued", func() error {
				for _, l := range shard.topology.Load().lanes() {
					l.queue.mu.Lock()
					if len(l.queue.calls) > l.queue.head {
						deadline = l.queue.calls[l.queue.head].deadline
					}
					l.queue.mu.Unlock()
				}
				if deadline.IsZero() {
					return errors.New("it is not")
				}
				return nil
			})
			if end := found.Add(time.Hour); deadline.After(end) {
				t.Errorf("the servers have until %v after an hour has passed", deadline.Sub(end))
			}
			cancel()
			<-done
		})
	}
}
