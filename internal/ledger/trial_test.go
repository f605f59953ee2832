package ledger

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// walled is a store that may be asked about its own shards only.
type walled struct {
	*sharded
	t *testing.T
	// sent is what charges through it cost.
	sent *atomic.Int64
}

func (s walled) ChargeReported(reqs []*store.Request, report func(i int, st store.State)) {
	for _, r := range reqs {
		s.sent.Add(r.Cost)
		if !strings.Contains(s.owners, r.Shard()) {
			s.t.Errorf("a charge at shard %s leaves through a config with %s", r.Shard(), s.owners)
		}
	}
	s.sharded.ChargeReported(reqs, report)
}

// TestChargesGoToTheShardsOfTheirConfig while one may yet be rejected: at once, with the next tick, after the one in
// flight, and once a shard is back, also when the config was rejected meanwhile.
func TestChargesGoToTheShardsOfTheirConfig(t *testing.T) {
	for name, c := range map[string]struct {
		delay time.Duration
		// owner is the shard of the config on trial, and silent one that does not answer for a while.
		owner, silent string
		// differs is set if the config on trial has another server under that name.
		differs bool
	}{
		"another shard":              {0, "c", "none", false},
		"another shard, delayed":     {UsualChargeDelay, "c", "none", false},
		"another shard, silent":      {0, "c", "c", false},
		"the running one is silent":  {0, "c", "b", false},
		"the same shard":             {0, "b", "none", false},
		"the same shard, delayed":    {UsualChargeDelay, "b", "none", false},
		"the same shard, not silent": {UsualChargeDelay, "b", "b", false},
		"another server":             {0, "b", "none", true},
		"another server, delayed":    {UsualChargeDelay, "b", "none", true},
		"another server, silent":     {0, "b", "b", true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const each = 20
				servers, registry, opts := newServers(1), NewRegistry(nil), Options{ChargeDelay: c.delay}
				opts.OnUndelivered = func(shard string, _ *store.Limit, _ algorithm.Operation, n int64, err error) {
					t.Errorf("%d charges at %s are lost: %v", n, shard, err)
				}
				open := func(owners string) *Owners {
					return NewOwners(New(registry, walled{&sharded{servers, owners}, t, new(atomic.Int64)}, opts))
				}
				running := open("b")
				running.Run()
				if c.differs {
					servers, opts.Servers = newServers(2), map[string]string{"b": "another"}
				}
				trial := open(c.owner)
				r := clientOf("zone", 1000)
				charge := func(o *Owners) {
					for range each {
						o.ChargeDetached([]*store.Request{new(r)})
						pass(time.Millisecond)
					}
				}
				// The clients are known, so that charges may be delayed.
				charge(running)
				charge(trial)
				pass(2 * time.Second)
				servers.setSilent(c.silent)
				charge(trial)
				charge(running)
				if (c.differs || c.owner == "c") && c.silent == c.owner && !trial.IsNeeded() {
					t.Error("nothing waits for the silent shard")
				}
				go func() {
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					defer cancel()
					trial.Flush(ctx)
					trial.Leave()
				}()
				charge(running)
				pass(5 * time.Second)
				servers.setSilent("none")
				pass(10 * time.Second)
				synctest.Wait()
				used := func(o *Owners) int64 { return o.Remote.(walled).at(o.Owner(""), algorithm.Peek, r).Used }
				ours, itsOwn := int64(3*each), int64(2*each)
				if c.owner == "b" && !c.differs {
					ours, itsOwn = ours+itsOwn, ours+itsOwn
				}
				if used(running) != ours || used(trial) != itsOwn {
					t.Errorf("the shards have %d and %d, want %d and %d", used(running), used(trial), ours, itsOwn)
				}
				if n := registry.inUse.Load(); n != 1 {
					t.Errorf("%d views are left", n)
				}
				running.Leave()
			})
		})
	}
}

// TestAcceptedConfigWithOtherServers: charges that have waited since its trial go to its servers, as do later charges of
// an earlier config.
func TestAcceptedConfigWithOtherServers(t *testing.T) {
	for name, delay := range map[string]time.Duration{"at once": 0, "delayed": UsualChargeDelay} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const each = 10
				registry := NewRegistry(nil)
				open := func(server string) *Owners {
					opts := Options{ChargeDelay: delay, Servers: map[string]string{"b": server}}
					return NewOwners(New(registry, walled{&sharded{newServers(1), "b"}, t, new(atomic.Int64)}, opts))
				}
				before, accepted := open("one"), open("another")
				before.Run()
				r := clientOf("zone", 1000)
				charge := func(o *Owners) {
					for range each {
						o.ChargeDetached([]*store.Request{new(r)})
					}
				}
				charge(before)
				held := store.Asks([]store.Request{r})
				accepted.Admit(t.Context(), held)
				pass(time.Second)
				charge(accepted)
				accepted.Run()
				before.Stop()
				accepted.Settle([]*store.Request{&held[0].Request}, nil)
				charge(accepted)
				charge(before)
				pass(time.Second)
				used := func(o *Owners) int64 { return o.Remote.(walled).at("b", algorithm.Peek, r).Used }
				if used(before) != each || used(accepted) != 3*each+1 {
					t.Errorf("the servers have %d and %d, want %d and %d", used(before), used(accepted), each, 3*each+1)
				}
				for i := range registry.stripes {
					p := &registry.stripes[i]
					p.mu.Lock()
					for e := range p.entries.all {
						if n := e.Gauges().InFlight; n != 0 {
							t.Errorf("a bucket of shard %d has %d in flight", e.id.Shard, n)
						}
					}
					p.mu.Unlock()
				}
				before.Leave()
				accepted.Leave()
			})
		})
	}
}

func (s *servers) setSilent(shard string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.silent = shard
}

// TestMixedChargesLeaveThroughTheRunningConfig: charges that were added up in a bucket while a charge of the config on
// trial was in flight, or until one of its charges could not wait any longer.
func TestMixedChargesLeaveThroughTheRunningConfig(t *testing.T) {
	charge := func(o *Owners, r store.Request) { o.ChargeDetached([]*store.Request{&r}) }
	for name, c := range map[string]struct {
		delay time.Duration
		// trialFirst is set if the config on trial comes first, and trial is the cost that may leave through it.
		trialFirst bool
		trial      int64
		// does is what the config on trial does, at a cost.
		does func(o *Owners, r store.Request)
		cost int64
	}{
		"in flight": {0, true, 1, charge, 1},
		"delayed":   {UsualChargeDelay, false, 0, charge, 1},
		"reset": {UsualChargeDelay, false, 0, func(o *Owners, r store.Request) {
			if err := o.Reset(t.Context(), r); err != nil {
				t.Error(err)
			}
		}, 0},
		"taken in vain": {UsualChargeDelay, false, 0, func(o *Owners, r store.Request) {
			r.At = o.placeOf("b")
			o.Ledger.SettleUnknown([]*store.Request{&r}, []int64{0}, []*store.Late{store.LateOf(store.ErrNotExecuted)})
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				servers, registry := newServers(1), NewRegistry(nil)
				open := func(delay time.Duration) (*Owners, *atomic.Int64) {
					sent := new(atomic.Int64)
					return NewOwners(New(registry, walled{&sharded{servers, "b"}, t, sent}, Options{ChargeDelay: delay})), sent
				}
				running, byRunning := open(c.delay)
				trial, byTrial := open(0)
				running.Run()
				r := clientOf("zone", 1000)
				running.ChargeDetached([]*store.Request{new(r)})
				pass(2 * time.Second)
				byRunning.Store(0)
				if c.trialFirst {
					c.does(trial, r)
				}
				for range 3 {
					charge(running, r)
				}
				if !c.trialFirst {
					c.does(trial, r)
				}
				pass(2 * time.Second)
				synctest.Wait()
				if byTrial.Load() != c.trial || byRunning.Load() != 3+c.cost-c.trial {
					t.Errorf("%d of %d leave through the config on trial, want %d, and %d through the other", byTrial.Load(), 3+c.cost, c.trial, byRunning.Load())
				}
				trial.Leave()
				running.Leave()
			})
		})
	}
}

// TestEndedConfigDeliversWhatWaits, and not a rejected one that came before it, while neither has a successor.
func TestEndedConfigDeliversWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		servers, registry := newServers(1), NewRegistry(nil)
		open := func(owners string) *Owners {
			return NewOwners(New(registry, walled{&sharded{servers, owners}, t, new(atomic.Int64)}, Options{}))
		}
		first, rejected, last := open("b"), open("c"), open("b")
		first.Run()
		last.Run()
		first.Stop()
		first.Leave()
		servers.setSilent("b")
		r := clientOf("zone", 1000)
		last.ChargeDetached([]*store.Request{new(r)})
		pass(time.Second)
		last.Stop()
		if !last.IsNeeded() || rejected.IsNeeded() {
			t.Errorf("the ended config is needed: %v, the rejected one: %v", last.IsNeeded(), rejected.IsNeeded())
		}
		servers.setSilent("none")
		last.Flush(t.Context())
		last.Leave()
		if used := last.Remote.(walled).at("b", algorithm.Peek, r).Used; used != 1 {
			t.Errorf("the shard has %d, want 1", used)
		}
		rejected.Leave()
	})
}

// TestConfigOnTrialEvictsNothing: the bound of the config that runs counts.
func TestConfigOnTrialEvictsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const clients = 2000
		s, registry := newSimulation(1), NewRegistry(nil)
		running, trial := New(registry, s, Options{MaxBuckets: 2 * clients}), New(registry, s, Options{MaxBuckets: 1})
		running.Run()
		for client := range clients {
			trial.ChargeDetached([]*store.Request{new(requestOf(strconv.Itoa(client), 10))})
			if client%100 == 0 {
				pass(100 * time.Millisecond)
			}
		}
		pass(time.Second)
		if n := registry.Len(); n != clients {
			t.Errorf("%d buckets are left of %d", n, clients)
		}
		trial.Leave()
		running.Leave()
	})
}

// TestProcessEndsDuringATrial: the last delayed charges of both configs go to their own servers.
func TestProcessEndsDuringATrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := NewRegistry(nil)
		open := func(server string) *Owners {
			opts := Options{ChargeDelay: UsualChargeDelay, Servers: map[string]string{"b": server}}
			return NewOwners(New(registry, walled{&sharded{newServers(1), "b"}, t, new(atomic.Int64)}, opts))
		}
		running, trial := open("one"), open("another")
		running.Run()
		r := clientOf("zone", 1000)
		for _, wait := range []time.Duration{100 * time.Millisecond, 0} { // the first is not delayed: nothing is known
			running.ChargeDetached([]*store.Request{new(r)})
			trial.ChargeDetached([]*store.Request{new(r)})
			pass(wait)
		}
		for i := range registry.stripes {
			for e := range registry.stripes[i].entries.all {
				if !e.IsDelayed() {
					t.Error("a charge has left already")
				}
			}
		}
		running.leave(func(*Ledger) bool { return true })
		pass(time.Second)
		for name, o := range map[string]*Owners{"running": running, "on trial": trial} {
			if used := o.Remote.(walled).at("b", algorithm.Peek, r).Used; used != 2 {
				t.Errorf("the server of the config %s has %d, want 2", name, used)
			}
		}
	})
}
