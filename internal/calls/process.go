package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// patient bounds each thing that a process waits for.
const patient = 5 * time.Second

// process is all that one Caddy has of a store: books, a ledger, and
// connections of its own. Several in one program share nothing of that.
type process struct {
	shard  *redis.Shard
	ledger *ledger.Ledger
	// lost is how much could not be delivered.
	lost atomic.Int64
}

func newProcess(servers *redistest.Shard) *process {
	p := new(process)
	// On a busy machine the usual times pass without anybody's fault.
	opts := redis.ShardOptions{Primary: servers.Primary.Addr(), DialTimeout: patient}
	for _, replica := range servers.Replicas {
		opts.Replicas = append(opts.Replicas, replica.Addr())
	}
	p.shard = redis.NewShard(opts)
	s := redis.New(redis.Options{
		Members:      []redis.Member{{Name: "a", Shard: p.shard}},
		CheckTimeout: patient, ChargeTimeout: patient,
		OnUndelivered: func(string, algorithm.Operation, error) { p.lost.Add(1) },
	})
	p.ledger = ledger.New(ledger.NewBooks(nil), s, ledger.Options{
		OnUndelivered: func(_ string, _ algorithm.Operation, requests int64, _ error) { p.lost.Add(requests) },
	})
	p.ledger.Warm(context.Background())
	return p
}

// settle waits until what was detached has been delivered.
func (p *process) settle() {
	ctx, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	p.ledger.Flush(ctx)
}

// close ends the process as Caddy does.
func (p *process) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), patient)
	defer cancel()
	p.ledger.Flush(ctx)
	p.ledger.Leave()
	p.shard.Close(ctx)
	if n := p.lost.Load(); n > 0 {
		return fmt.Errorf("%d requests could not be delivered", n)
	}
	return nil
}

func closeAll(processes []*process) error {
	errs := make([]error, 0, len(processes))
	for _, p := range processes {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}

// serve charges after: what is admitted takes its time and is settled.
func (p *process) serve(ctx context.Context, r store.Request, takes time.Duration) store.State {
	reqs := []store.Request{r}
	states := make([]store.State, len(reqs))
	p.ledger.Admit(ctx, reqs, states)
	st := states[0]
	if st.Err == nil && st.Allowed {
		time.Sleep(takes)
		p.ledger.Settle(reqs, nil)
	}
	return st
}

// take charges before.
func (p *process) take(ctx context.Context, r store.Request) store.State {
	return p.ledger.Take(ctx, []store.Request{r})[0]
}
