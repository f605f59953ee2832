package scaling

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// TestSimulationCountsWhatTheLedgerCalls sends the same requests, at the same
// instants and with the same delays, through the ledger itself.
func TestSimulationCountsWhatTheLedgerCalls(t *testing.T) {
	for _, c := range []struct {
		setting
		rate float64
		// begun is how many windows go by before anything is counted.
		begun int64
	}{
		{setting{name: "after, alone, seldom", limit: 100_000, processes: 1}, 1.5, 0},
		{setting{name: "after, alone, often", limit: 100_000, processes: 1}, 200, 0},
		{setting{name: "after, alone, until half is left", limit: 2_000, processes: 1}, 150, 0},
		{setting{name: "after, alone, beyond the limit", limit: 1_000, processes: 1}, 300, 0},
		{setting{name: "after, alone, often, charge_delay 0", limit: 100_000, processes: 1, atOnce: true}, 200, 0},
		{setting{name: "after, alone, seldom, in a long window", limit: 100_000, processes: 1, window: 60 * second}, 0.4, 0},
		{setting{name: "after, alone, seldom, ledger_trust below 1s", limit: 100_000, processes: 1, window: 60 * second, checked: true}, 0.4, 0},
		{setting{name: "after, several Caddys", limit: 100_000, processes: 4}, 40, 0},
		{setting{name: "after, several Caddys, often", limit: 100_000, processes: 4}, 2_000, 0},
		{setting{name: "after, several Caddys, beyond the limit", limit: 1_000, processes: 4}, 400, 0},
		{setting{name: "before", limit: 100_000, processes: 4, before: true}, 200, 0},
		{setting{name: "before, beyond the limit", limit: 1_000, processes: 4, before: true}, 1_000, 0},
		{setting{name: "batch, seldom", limit: 100_000, processes: 4, before: true, batch: store.BatchAuto}, 2, 0},
		{setting{name: "batch, sometimes", limit: 100_000, processes: 4, before: true, batch: store.BatchAuto}, 80, 0},
		{setting{name: "batch, often", limit: 20_000, processes: 4, before: true, batch: store.BatchAuto}, 1_370, 0},
		{setting{name: "batch, beyond the limit", limit: 4_000, processes: 4, before: true, batch: store.BatchAuto}, 800, 0},
		{setting{name: "batch of 50", limit: 20_000, processes: 4, before: true, batch: 50}, 500, 0},
		{setting{name: "batch of 50, beyond the limit", limit: 4_000, processes: 4, before: true, batch: 50}, 800, 0},
		{setting{name: "batch, for long", limit: 5_000, processes: 4, before: true, batch: store.BatchAuto}, 370, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := c.setting
			s.window, s.route, s.lone = cmp.Or(s.window, 4*second), inTurn, true
			var pauses []int64
			span, from := int64(0), acquaintance+c.begun*s.window
			for next := random(rand.New(rand.NewPCG(seed, 1)), c.rate); span < from+2*s.window; {
				p := next()
				pauses = append(pauses, p)
				span += p
			}
			i := -1
			got := newClient(&s, seed, 0).run(func() int64 { i++; return pauses[i] }, from, from+2*s.window)
			var made [kinds]float64
			var requests, admitted int64
			synctest.Test(t, func(*testing.T) { made, requests, admitted = runLedgers(&s, pauses, from) })
			if int64(got.requests) != requests {
				t.Errorf("%v requests, and %d through the ledger", got.requests, requests)
			}
			for k, want := range made {
				// A twentieth, and chance where there are few.
				if math.Abs(got.made[k]-want) > 0.05*want+0.5*math.Sqrt(want)+4 {
					t.Errorf("%s: %v times, and %v by the ledger", kindNames[k], got.made[k], want)
				}
			}
			if math.Abs(got.admitted-float64(admitted)) > 0.02*float64(admitted)+4 {
				t.Errorf("%v admitted, and %d by the ledger", got.admitted, admitted)
			}
			t.Logf("%v %v, %v %d of %d", got.made, made, got.admitted, admitted, requests)
		})
	}
}

// runLedgers runs as many ledgers as the setting has processes, in a bubble, and
// counts two windows.
func runLedgers(s *setting, pauses []int64, from int64) (made [kinds]float64, requests, admitted int64) {
	servers := newRemote()
	start := time.Now()
	servers.measured = start.Add(time.Duration(from) * time.Microsecond)
	servers.until = servers.measured.Add(time.Duration(2*s.window) * time.Microsecond)
	opts := ledger.Options{ChargeDelay: ledger.UsualChargeDelay}
	if s.atOnce {
		opts.ChargeDelay = 0
	}
	if s.checked {
		opts.Trust = ledger.DefaultTrust - time.Microsecond
	}
	ledgers := make([]*ledger.Ledger, s.processes)
	for i := range ledgers {
		ledgers[i] = ledger.New(ledger.NewBooks(nil), servers, opts)
	}
	r := store.Request{
		Limit:     &store.Limit{Zone: "zone", Algorithm: store.FixedWindow, Window: time.Duration(s.window) * time.Microsecond},
		ClientKey: "client", Events: s.limit, Cost: 1, Batch: s.batch, BatchShare: batchShare,
	}
	var wg sync.WaitGroup
	var passed atomic.Int64
	at := start
	for n, p := range pauses {
		at = at.Add(time.Duration(p) * time.Microsecond)
		time.Sleep(time.Until(at))
		if !at.Before(servers.until) {
			break
		}
		if !at.Before(servers.measured) {
			requests++
		}
		came := at
		wg.Go(func() {
			if send(ledgers[n%len(ledgers)], s.before, r) && !came.Before(servers.measured) {
				passed.Add(1)
			}
		})
	}
	wg.Wait()
	for _, l := range ledgers {
		l.Flush(context.Background())
		l.Leave()
	}
	// What was given back arrives.
	time.Sleep(time.Second)
	return servers.made, requests, passed.Load()
}

// send makes one request, and tells whether it was admitted.
func send(l *ledger.Ledger, before bool, r store.Request) bool {
	reqs := []store.Request{r}
	if before {
		return l.Take(context.Background(), reqs)[0].Allowed
	}
	states := make([]store.State, 1)
	if l.Admit(context.Background(), reqs, states); !states[0].Allowed {
		return false
	}
	time.Sleep(serving * time.Microsecond)
	l.Settle(reqs, nil)
	return true
}
