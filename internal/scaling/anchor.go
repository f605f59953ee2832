package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// The tables of docs/ledger.md, by their first column.
const (
	traffic = "traffic"
	limits  = "limit"
)

const (
	hour = 3600 * second
	// measuredWindow and steadyShare are those of the second table.
	measuredWindow = 8 * second
	steadyShare    = 0.8
	roomy          = 1_000_000_000
)

// tolerance is how far a simulated number of calls per request may be from the
// measured one: a third of it, or so much.
const (
	tolerance  = 1.0 / 3
	negligible = 0.0025
)

// anchor is something that was measured, and is simulated as well.
type anchor struct {
	name                string
	measured, simulated float64
}

func (a anchor) isHeld() bool {
	return math.Abs(a.simulated-a.measured) <= max(tolerance*a.measured, negligible)
}

// single is a row of the first table: requests of some clients that come in turn.
type single struct {
	name    string
	setting setting
	// clients is how many there are; 0 if none comes twice.
	clients float64
}

var singles = []single{
	{"charge after, no client comes twice", setting{processes: 1}, 0},
	{"charge after, 500 clients in turn", setting{processes: 1}, 500},
	{"charge after, 500 clients in turn, each at two Caddys", setting{processes: 2, route: inTurn}, 500},
	{"charge after, one client, 1 at a time", setting{processes: 1}, 1},
	{"charge after, one client, 16 at a time", setting{processes: 1}, 1},
	{"charge after, one client, 64 at a time", setting{processes: 1}, 1},
	{"charge after, one client, refused", setting{processes: 1, limit: 1}, 1},
	{"charge before, 500 clients in turn", setting{processes: 1, before: true}, 500},
	{"charge before, one client, 64 at a time", setting{processes: 1, before: true}, 1},
	{"charge before, one client, refused", setting{processes: 1, before: true, limit: 1}, 1},
}

// anchors simulates what docs/ledger.md has measured.
func anchors(ledger measured) (all []anchor, err error) {
	for _, s := range singles {
		rate, err := ledger.figure(traffic, "requests/s", s.name)
		if err != nil {
			return nil, err
		}
		a := anchor{name: s.name}
		if a.measured, err = ledger.figure(traffic, "calls per request", s.name); err != nil {
			return nil, err
		}
		a.simulated = s.simulate(rate)
		all = append(all, a)
	}
	for _, limit := range []int64{1_000, 10_000, 100_000} {
		for _, processes := range []int{1, 4, 16} {
			for _, auto := range []bool{true, false} {
				a, err := batchAnchor(ledger, limit, processes, auto)
				if err != nil {
					return nil, err
				}
				all = append(all, a)
			}
		}
	}
	return all, nil
}

func (s *single) simulate(rate float64) float64 {
	s.setting.window = hour
	if s.setting.limit == 0 {
		s.setting.limit = roomy
	}
	c := newClient(&s.setting, seed, 0)
	if s.clients > 0 {
		return c.run(regular(rate/s.clients), acquaintance, acquaintance+5*second).perRequest().sum()
	}
	pause := int64(0)
	once := func() (p int64) {
		p, pause = pause, hour
		return p
	}
	return c.run(once, 0, second).perRequest().sum()
}

// batchAnchor is a cell of the second table.
func batchAnchor(ledger measured, limit int64, processes int, auto bool) (a anchor, err error) {
	s := setting{processes: processes, route: anyCaddy, before: true, batch: limit / 100, limit: limit, window: measuredWindow, align: true}
	column, name := "`limit/100`: calls per request", "batch limit/100"
	leases := 0.0
	if auto {
		s.batch, column, name = store.BatchAuto, "`auto`: calls per request", "batch auto"
		leases = float64(processes) * float64(measuredWindow/second)
	}
	a.name = fmt.Sprintf("%s, limit %d, %d processes", name, limit, processes)
	if a.measured, err = ledger.figure(limits, column, strconv.FormatInt(limit, 10), strconv.Itoa(processes)); err != nil {
		return a, err
	}
	c := newClient(&s, seed, 0)
	r := rand.New(rand.NewPCG(seed, uint64(limit)))
	rate := steadyShare * float64(limit) / float64(measuredWindow/second)
	counts := c.run(random(r, rate), measuredWindow, 2*measuredWindow)
	a.simulated = (counts.sum() + leases) / counts.requests
	return a, nil
}
