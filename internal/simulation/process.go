package simulation

import (
	"context"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	opCharge   = algorithm.Charge
	opTake     = algorithm.Take
	opRefund   = algorithm.Refund
	opPenalize = algorithm.Penalize
)

// process is one Caddy: the registry of a store, and the view of the present config.
type process struct {
	*Run
	name     string
	opts     ledger.Options
	registry *ledger.Registry
	view     *view
	// full is a view of the registry that finds no room in it, and rivals are other clients that share a part of the
	// registry with a bucket.
	full   *ledger.Ledger
	rivals map[string]*rival
	// ahead is how far the clock of its machine is ahead.
	ahead time.Duration
	// looked is when a request that waits last asked the primary, by bucket; period is when the window of the last
	// batch ends, as the store said.
	looked, period map[string]int64
	// dead is set once it has ended. It sends nothing any more.
	dead bool

	// given are charges that were given up. Their lock is held last: the ledger reports them with its own locks held.
	givenLock sync.Mutex
	given     []undelivered
	// lost are the requests of charges that were certainly not executed, and given up.
	lost int64
}

// undelivered are charges that were given up.
type undelivered struct {
	shard    string
	requests int64
	err      error
}

// view is a config of a process: its ledger, and how many requests use it, with one more while it is the present one.
type view struct {
	*ledger.Owners
	users int
}

// newProcess returns a Caddy.
func (s *Run) newProcess(name string, rng *stream) *process {
	p := &process{
		Run: s, name: name, opts: s.opts, ahead: oneOf(rng, 0, rng.between(-time.Hour, time.Hour).Truncate(time.Microsecond)),
		looked: map[string]int64{}, period: map[string]int64{},
	}
	p.open()
	return p
}

// open begins a process.
func (p *process) open() {
	p.opts.OnUndelivered = func(shard string, _ *store.Limit, op algorithm.Operation, requests int64, err error) {
		if op == opCharge {
			p.givenLock.Lock()
			p.given = append(p.given, undelivered{shard, requests, err})
			p.givenLock.Unlock()
		}
	}
	for p.registry == nil || p.crowded && !p.findRivals() {
		p.registry = ledger.NewRegistry(p.time)
	}
	p.view = p.newView()
	opts := p.opts
	opts.MaxBuckets = 1
	p.full = ledger.New(p.registry, &remote{process: p}, opts)
}

func (p *process) newView() *view {
	v := &view{ledger.NewOwners(ledger.New(p.registry, &remote{process: p}, p.opts)), 1}
	v.Run()
	return v
}

// time is the time of its machine.
func (p *process) time() time.Time { return time.Now().Add(p.ahead) }

// reload makes a new config the present one. Requests of the old one may go on.
func (p *process) reload() {
	before := p.view
	p.view = p.newView()
	before.Stop()
	p.leave(before)
}

// flushTime is how long a view that nobody uses waits for what is to be delivered.
const flushTime = 10 * time.Second

// leave ends a use of a view.
func (p *process) leave(v *view) {
	if v.users--; v.users > 0 {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), flushTime)
		defer cancel()
		v.Flush(ctx)
		v.Leave()
	}()
}

// exit ends a process. Unless it is killed, it delivers its charges first. Where nothing fails meanwhile, it delivers
// all.
func (p *process) exit(isKilled bool) {
	p.dead = isKilled
	p.noteLost()
	isWell, faults, lost := p.net.isWell(), p.net.faults, p.lost
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), flushTime)
		defer cancel()
		if isKilled {
			cancel()
		}
		p.registry.End(ctx)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.dead = true
		if p.noteLost(); isWell && !isKilled && p.net.faults == faults && p.lost > lost {
			p.fail("%s gave up %d requests as it ended, although nothing failed", p.name, p.lost-lost)
		}
	}()
}
