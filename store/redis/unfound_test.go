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
	for name, call := range map[string]func(s *Store, ctx context.Context) []store.State{
		"Check":    func(s *Store, ctx context.Context) []store.State { return s.Check(ctx, ask("k")) },
		"Peek":     func(s *Store, ctx context.Context) []store.State { return s.Peek(ctx, ask("k")) },
		"Take":     func(s *Store, ctx context.Context) []store.State { return s.Take(ctx, ask("k")) },
		"Charge":   func(s *Store, ctx context.Context) []store.State { return s.Charge(ctx, ask("k")) },
		"Refund":   func(s *Store, ctx context.Context) []store.State { return s.Refund(ctx, ask("k")) },
		"Penalize": func(s *Store, ctx context.Context) []store.State { return s.Penalize(ctx, ask("k")) },
	} {
		t.Run(name, func(t *testing.T) {
			shard := newShard(t, ShardOptions{Sentinel: &SentinelOptions{Master: masterName, Addrs: []string{silent.Addr()}}})
			s := newStore(t, shard, func(o *Options) { o.CheckTimeout, o.ChargeTimeout = time.Hour, time.Hour })
			// Nothing that is queued leaves.
			var lanes []*lane
			shard.mu.Lock()
			for _, persistent := range []bool{false, true} {
				l := shard.laneTo(server.Addr(), persistent)
				l.gathering.Lock()
				defer l.gathering.Unlock()
				lanes = append(lanes, l)
			}
			shard.mu.Unlock()

			ctx, cancel := context.WithCancel(t.Context())
			waits := &watched{Context: ctx, waited: make(chan struct{})}
			done := make(chan struct{})
			go func() {
				defer close(done)
				call(s, waits)
			}()
			<-waits.waited
			found := time.Now()
			shard.adopt([]roles{{primary: server.Addr()}})
			var deadline time.Time
			eventually(t, "the call is queued", func() error {
				for _, l := range lanes {
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
			if end := found.Add(time.Hour); !deadline.Before(end) {
				t.Errorf("the servers have until %v after an hour has passed", deadline.Sub(end))
			}
			cancel()
			<-done
		})
	}
}
