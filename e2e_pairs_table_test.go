package shardlimit_test

import (
	"fmt"
	"testing"
)

// feature is a line of the table of pairs: what TestPairs combines with every
// other line. A feature says its own part only.
type feature struct {
	name string
	// configure adds the feature to what the Caddyfile is made of. It runs for
	// every config that is loaded.
	configure func(p *pairRun, s *pairSite)
	// disturb returns what happens while requests run, in this order. When it
	// happens is drawn from the seed.
	disturb func(p *pairRun) []func()
	// allow widens what the invariants tolerate.
	allow func(p *pairRun, b *bounds)
	// excludes maps the name of a feature that does not go with this one to words
	// of the error at load.
	excludes map[string]string
}

// features are taken two at a time. Where two set the same option of a zone, the
// one that comes first counts.
var features = []feature{
	{
		name: "reload",
		disturb: func(p *pairRun) []func() {
			tune := func() {
				p.tuned = tunings[p.rng.IntN(len(tunings))]
				p.load()
			}
			return []func(){tune, tune, tune}
		},
	},
	{
		name: "store kind changed",
		configure: func(p *pairRun, s *pairSite) {
			// The lives of the store alternate between Redis and memory.
			s.inMemory = p.life%2 == 1
		},
		disturb: func(p *pairRun) []func() {
			change := func() {
				p.life++
				p.load()
			}
			return []func(){change, change}
		},
		allow: func(p *pairRun, b *bounds) {
			// A bucket of the other store goes on counting while the default one is
			// in memory, so what was served then may be in either.
			b.either = p.has("rollout")
		},
	},
	{
		name:      "on_error local",
		configure: func(_ *pairRun, s *pairSite) { s.zone("on_error local") },
		allow: func(p *pairRun, b *bounds) {
			if p.has("shard stopped") {
				// While the shard is away this process counts alone, from 0 to the limit.
				b.limits++
			}
		},
	},
	{
		name: "rollout",
		configure: func(p *pairRun, s *pairSite) {
			s.otherStore("d")
			s.handler(fmt.Sprint("rollout other ", p.percent))
		},
		disturb: func(p *pairRun) []func() {
			var moves []func()
			for _, percent := range []int{60, 10, 80} {
				moves = append(moves, func() {
					p.percent = percent
					p.load()
				})
			}
			return moves
		},
	},
	{
		name: "previous_shards",
		configure: func(p *pairRun, s *pairSite) {
			if p.resharded {
				s.shards = append(s.shards, "c")
				s.defaultStore("previous_shards a b")
			}
		},
		disturb: func(p *pairRun) []func() {
			return []func(){func() {
				p.resharded = true
				p.load()
			}}
		},
	},
	{
		name: "batch auto",
		configure: func(_ *pairRun, s *pairSite) {
			s.zone("charge before", "batch auto", fmt.Sprint("batch_share ", batchPercent))
		},
		allow: func(_ *pairRun, b *bounds) {
			// A take or refund without a reply may be about a whole batch.
			b.takes, b.tokens = true, pairLimit*batchPercent/100
		},
		excludes: map[string]string{"reserve": "batch does not go with reserve"},
	},
	{
		name:      "charge before",
		configure: func(_ *pairRun, s *pairSite) { s.zone("charge before") },
		allow:     func(_ *pairRun, b *bounds) { b.takes = true },
	},
	{
		name:      "max_wait",
		configure: func(_ *pairRun, s *pairSite) { s.zone("max_wait 2s") },
	},
	{
		name:      "max_new_buckets",
		configure: func(_ *pairRun, s *pairSite) { s.store(fmt.Sprint("max_new_buckets ", 2*len(regulars))) },
		allow: func(p *pairRun, b *bounds) {
			// New clients beyond the bound share a bucket.
			b.shared = true
			// Regulars are new in a store that they are moved to.
			b.strangers = p.has("rollout")
		},
	},
	{
		name:      "penalty",
		configure: func(_ *pairRun, s *pairSite) { s.zone("penalty 1h") },
		excludes:  map[string]string{"reserve": "penalty does not go with reserve"},
	},
	{
		name: "reserve",
		configure: func(_ *pairRun, s *pairSite) {
			s.zone(fmt.Sprintf("reserve %d {\nheader X-Staff yes\n}", reservePercent))
		},
	},
	{
		name:      "several zones",
		configure: func(_ *pairRun, s *pairSite) { s.zones = append(s.zones, zoneGroup) },
	},
	{
		name:      "several handlers",
		configure: func(_ *pairRun, s *pairSite) { s.handlers = 2 },
	},
	{
		name:      "key_secret",
		configure: func(_ *pairRun, s *pairSite) { s.store("key_secret hunter2-hunter2-hunter2") },
	},
	{
		name:      "pipelining off",
		configure: func(_ *pairRun, s *pairSite) { s.store("pipelining off") },
	},
	{
		name: "shard stopped",
		configure: func(_ *pairRun, s *pairSite) {
			s.zone("on_error allow")
			// What cannot be charged in that time waits in the ledger.
			s.store("charge_timeout 300ms")
		},
		disturb: func(p *pairRun) []func() {
			name := []string{"a", "b"}[p.rng.IntN(2)]
			// Where only a primary stops, its replica stands in.
			whole := p.rng.IntN(2) == 0 && !p.has("replica detached")
			return []func(){func() { p.stopShard(name, whole) }, func() { p.startShard(name) }}
		},
		allow: func(_ *pairRun, b *bounds) { b.faults = true },
	},
	{
		name: "replica detached",
		disturb: func(p *pairRun) []func() {
			return []func(){p.detachReplica, p.attachReplica}
		},
	},
}

const (
	pairLimit      = 40
	groupLimit     = 150
	innerLimit     = 60
	batchPercent   = 50
	reservePercent = 20
)

// tunings are options of a store that change nothing that is counted.
var tunings = []string{"pool_size 2", "pool_size 9", "ledger_trust 500ms", "dial_timeout 9s", "max_replica_lag 4s", "read_from primary", "clock redis"}

// bounds are what the invariants tolerate in a pair.
type bounds struct {
	// limits is how many times its limit a bucket may hold.
	limits int64
	// faults is set if servers are away for a time: what could not be checked is
	// admitted on top, and calls that lose their reply may count or not.
	faults bool
	// takes is set if requests take what they cost, and tokens is what one call may
	// be about.
	takes  bool
	tokens int64
	// shared is set if some clients share a bucket, so that only sums are compared.
	shared bool
	// strangers is set if regulars may be among those.
	strangers bool
	// either is set if it is not known of what was served in memory whether it was
	// counted there.
	either bool
}

func (p *pairRun) bounds() bounds {
	b := bounds{limits: 1, tokens: 1}
	for _, f := range p.features {
		if f.allow != nil {
			f.allow(p, &b)
		}
	}
	return b
}

// pair is two features, by their place in the table.
type pair [2]int

func (p pair) String() string { return features[p[0]].name + "+" + features[p[1]].name }

// allPairs are all of them.
func allPairs() (all []pair) {
	for i := range features {
		for j := range i {
			all = append(all, pair{j, i})
		}
	}
	return all
}

// somePairs have each feature in one of them at least.
func somePairs() (some []pair) {
	half := (len(features) + 1) / 2
	for i := range half {
		j := (i + half) % len(features)
		some = append(some, pair{min(i, j), max(i, j)})
	}
	return some
}

// exclusion returns words of the error with which the pair is refused, or "".
func (p pair) exclusion() string {
	a, b := &features[p[0]], &features[p[1]]
	return a.excludes[b.name] + b.excludes[a.name]
}

// TestTableOfPairs: names are told apart, and exclusions name features.
func TestTableOfPairs(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range features {
		must(t, f.name, want("being in the table twice", seen[f.name], false))
		seen[f.name] = true
	}
	for _, f := range features {
		for other := range f.excludes {
			must(t, f.name, want("excluding a feature of the table", seen[other], true))
		}
	}
	in := map[int]bool{}
	for _, p := range somePairs() {
		in[p[0]], in[p[1]] = true, true
		must(t, p.String(), want("being of two features", p[0] != p[1], true))
	}
	must(t, "the handful", want("number of features in it", len(in), len(features)))
	must(t, "the table", want("number of pairs", len(allPairs()), len(features)*(len(features)-1)/2))
}
