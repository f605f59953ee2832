//go:build check

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// The zones of a pair. Each client has a bucket in the first and in the last;
// zoneGroup counts clients together.
const (
	zoneAPI   = "api"
	zoneGroup = "group"
	zoneInner = "inner"
)

// pairSite is what the Caddyfile of a pair is made of.
type pairSite struct {
	p *pairRun
	// shards are those of the default store.
	shards []string
	// storeLines are options of all Redis stores, defaultLines of the default one.
	storeLines, defaultLines []string
	inMemory                 bool
	// others are the shards of a second store.
	others []string
	// handlerLines and zoneLines are options of each handler and of its zones.
	handlerLines, zoneLines []string
	zones                   []string
	handlers                int
	// byURL is set if the config has URLs in place of addresses.
	byURL bool
	// filtered is set if primaries are behind proxies that refuse plain charges.
	filtered bool
	// unidentified is set if they are behind proxies that change the run ID in each reply.
	unidentified bool
	// added is a shard that was not there before a resharding.
	added string
	// differing is set if a header says what the limit of a request is.
	differing bool
	// serves is set if calls can ask for the zones as well.
	serves bool
}

func (s *pairSite) store(lines ...string) { s.storeLines = append(s.storeLines, lines...) }

func (s *pairSite) otherStore(shard ...string) { s.others = shard }

func (s *pairSite) handler(lines ...string) { s.handlerLines = append(s.handlerLines, lines...) }

func (s *pairSite) zone(lines ...string) { s.zoneLines = append(s.zoneLines, lines...) }

// site is the Caddyfile of the pair as it is now.
func (p *pairRun) site() *pairSite {
	s := &pairSite{p: p, shards: []string{"a", "b"}, zones: []string{zoneAPI}, handlers: 1}
	for _, f := range p.features {
		if f.configure != nil {
			f.configure(p, s)
		}
	}
	if p.tuned != "" {
		s.store(p.tuned)
	}
	return s
}

// zonesOf are the zones of all handlers.
func (s *pairSite) zonesOf() []string {
	if s.handlers > 1 {
		return append(slices.Clip(s.zones), zoneInner)
	}
	return s.zones
}

// redis is a Redis store.
func (s *pairSite) redis(name string, shards []string, more ...string) string {
	var lines []string
	for _, shard := range shards {
		var isNew []string
		if shard == s.added {
			isNew = []string{"weight 1 was 0"}
		}
		line := caddytest.ShardOf(shard, s.p.shard(shard), isNew...)
		if s.filtered || s.unidentified {
			line = strings.Replace(line, "primary "+s.p.shard(shard).Primary.Addr(), "primary "+s.p.filter(shard, s), 1)
		}
		if s.byURL {
			line = strings.Replace(line, "primary ", "url redis://", 1)
		}
		lines = append(lines, line)
	}
	text := caddytest.RedisStore(append(append(lines, s.storeLines...), more...)...)
	return strings.Replace(text, "store redis", "store "+name+" redis", 1)
}

func (s *pairSite) stores() string {
	text := s.redis("default", s.shards, s.defaultLines...)
	if s.inMemory {
		text = memoryStore(1000)
	}
	if s.others != nil {
		other := s.redis("other", s.others)
		_, other, _ = strings.Cut(other, "{")
		// Both are in one block.
		text = text[:strings.LastIndexByte(text, '}')] + other
	}
	return text
}

// zoneText returns a zone. Whether the zones besides the first have the options of the pair depends
// on the seed.
func (s *pairSite) zoneText(name string) string {
	lines := []string{"key {header.X-Key}", fmt.Sprint("events ", pairLimit)}
	switch name {
	case zoneGroup:
		lines = []string{"key {header.X-Group}", fmt.Sprint("events ", groupLimit)}
	case zoneInner:
		lines[1] = fmt.Sprint("events ", innerLimit)
	default:
		if s.differing {
			lines[1] = fmt.Sprint("events {header.X-Events} ", pairLimit)
		}
	}
	if s.p.alike || name == zoneAPI {
		lines = append(lines, s.zoneLines...)
	}
	for _, line := range s.zoneLines {
		if strings.HasPrefix(line, "on_error") {
			lines = append(lines, line)
		}
	}
	return zoneWith(name, append(lines, "on_error deny")...)
}

func (s *pairSite) caddyfile() string {
	var b strings.Builder
	fmt.Fprintf(&b, "{\n{{global}}\nlog {\nlevel WARN\n}\n%s\n}\nhttp:// {\nbind unix/%s\nroute {\n", s.stores(), s.p.socket)
	if s.serves {
		b.WriteString(s.service())
	}
	for i := range s.handlers {
		zones := s.zones
		if i > 0 {
			zones = s.zonesOf()
		}
		fmt.Fprintf(&b, "rate_limit {\n%s\n", strings.Join(s.handlerLines, "\n"))
		for _, zone := range zones {
			b.WriteString(s.zoneText(zone))
		}
		b.WriteString("}\n")
	}
	fmt.Fprintf(&b, "header X-Life %d\n", s.p.life)
	for _, zone := range s.zonesOf() {
		fmt.Fprintf(&b, "header X-Outcome-%s {http.rate_limit.%[1]s.outcome}\n", zone)
	}
	fmt.Fprintf(&b, "%s\n}\n}\n", proxyTo(s.p.backend.Listener.Addr().String()))
	return b.String()
}

// load loads the config as it is now.
func (p *pairRun) load() {
	p.t.Helper()
	p.loads.Add(1)
	if status, text := p.caddy.Load(p.site().caddyfile()); status != http.StatusOK {
		p.t.Fatalf("load: status %d: %s", status, text)
	}
}

// loadRejected loads a config whose shards have the names of others, and which can take no requests.
func (p *pairRun) loadRejected() {
	p.t.Helper()
	text := strings.Replace(p.site().caddyfile(), "http:// {\nbind unix/"+p.socket, "http://"+caddytest.FreeAddr(p.t)+" {", 1)
	text = strings.NewReplacer("shard a {", "shard b {", "shard b {", "shard a {", "max_wait 2s", "max_wait 3s").Replace(text)
	if status, answer := p.caddy.Load(text + occupiedSite(p.t)); status == http.StatusOK {
		p.t.Fatalf("a config that cannot listen was accepted: %s", answer)
	}
}

// shard returns the shard of that name, which it starts at the first call. What a server has
// confirmed outlasts its process.
func (p *pairRun) shard(name string) *redistest.Shard {
	p.t.Helper()
	s, ok := p.shards[name]
	if !ok {
		replicas := 0
		if name == "a" {
			replicas = 1
		}
		s = redistest.StartShard(p.t, replicas, redistest.Args("--appendonly", "yes", "--appendfsync", "no"))
		p.shards[name] = s
	}
	return s
}

// filter returns the address of the proxy before the primary of that shard, which answers as the site says.
func (p *pairRun) filter(name string, s *pairSite) string {
	p.t.Helper()
	if p.filters[name] == nil {
		server, refuse, asked := p.shard(name).Primary, redistest.Refusing("-ERR unknown command", "hincrby"), new(atomic.Int64)
		p.filters[name] = redistest.StartFilter(p.t, server.Addr(), func(command []string) string {
			switch {
			case s.filtered && refuse(command) != "":
				return refuse(command)
			case s.unidentified && strings.EqualFold(command[0], "info"):
				// While the server is down it gets the command, as any other.
				text, err := server.Client().Info(context.Background()).Result()
				if err == nil {
					text = strings.Replace(text, "run_id:", fmt.Sprint("run_id:", asked.Add(1)), 1)
					return fmt.Sprintf("$%d\r\n%s", len(text), text)
				}
			}
			return ""
		})
	}
	return p.filters[name].Addr()
}

// stopShard kills the primary of a shard, or all of its servers.
func (p *pairRun) stopShard(name string, whole bool) {
	p.t.Helper()
	s := p.shard(name)
	must(p.t, "kill the primary", s.Primary.Kill())
	for _, replica := range s.Replicas {
		if whole {
			must(p.t, "kill the replica", replica.Kill())
		}
	}
}

func (p *pairRun) startShard(name string) {
	p.t.Helper()
	s := p.shard(name)
	must(p.t, "restart the primary", s.Primary.Restart())
	for _, replica := range s.Replicas {
		if !replica.Running() {
			must(p.t, "restart the replica", replica.Restart())
		}
	}
	if p.attachesLater {
		p.attachReplica()
	}
}

// detachReplica pauses the replication of shard a.
func (p *pairRun) detachReplica() {
	p.t.Helper()
	must(p.t, "detach the replica", p.shard("a").Replicas[0].PauseReplication())
}

// attachReplica resumes it, or leaves that to startShard while the primary is down.
func (p *pairRun) attachReplica() {
	p.t.Helper()
	if s := p.shard("a"); s.Primary.Running() {
		must(p.t, "attach the replica", s.Replicas[0].ResumeReplication())
		p.attachesLater = false
	} else {
		p.attachesLater = true
	}
}

// awaitWhole waits until Caddy reports that all servers are in use.
func (p *pairRun) awaitWhole() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), pairTimeout)
	defer cancel()
	for name, s := range p.shards {
		must(p.t, "replicate shard "+name, s.WaitReplicated(ctx))
	}
	p.await("all servers are in use", func() error {
		status, _ := adminStatus(p.caddy)
		for _, store := range status.Stores {
			for _, shard := range store.Shards {
				for _, server := range shard.Servers {
					for purpose, breaker := range server.Breakers {
						if breaker != "closed" {
							return fmt.Errorf("the breaker of %s for %s is %s", server.Address, purpose, breaker)
						}
					}
					if server.State != "up" && server.State != "unmet" {
						return fmt.Errorf("%s of shard %s is %s", server.Role, shard.Name, server.State)
					}
				}
			}
		}
		return nil
	})
}

// feature is a line of the table of pairs, which TestPairs combines with every other line.
type feature struct {
	name string
	// configure adds the feature to what the Caddyfile is made of. It runs for
	// every config that is loaded.
	configure func(p *pairRun, s *pairSite)
	// disturb returns steps that happen in this order, at times drawn from the seed, while requests
	// run.
	disturb func(p *pairRun) []func()
	// allow widens what the invariants tolerate.
	allow func(p *pairRun, b *bounds)
	// excludes maps the name of an incompatible feature to words of the error at load.
	excludes map[string]string
}

// features are combined two at a time. If two set the same option of a zone, the first one counts.
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
		name:    "rejected reload",
		disturb: func(p *pairRun) []func() { return []func(){p.loadRejected, p.loadRejected, p.loadRejected} },
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
			// A bucket of the other store still counts while the default one is in memory, so that
			// what was served then may be in either.
			b.either = p.has("rollout")
		},
	},
	{
		name:      "on_error local",
		configure: func(_ *pairRun, s *pairSite) { s.zone("on_error local") },
		allow: func(p *pairRun, b *bounds) {
			if p.has("shard stopped") {
				// While the shard is down Caddy counts locally, from 0 to the limit.
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
		name: "another shard",
		configure: func(p *pairRun, s *pairSite) {
			if p.resharded {
				s.added = "c"
				s.shards = append(s.shards, s.added)
			}
		},
		disturb: func(p *pairRun) []func() {
			var moves []func()
			for _, is := range []bool{true, false, true} {
				moves = append(moves, func() {
					p.resharded = is
					p.load()
				})
			}
			return moves
		},
	},
	{
		name: "batch auto",
		configure: func(_ *pairRun, s *pairSite) {
			s.zone("charge before", "batch auto")
		},
		allow: func(_ *pairRun, b *bounds) {
			// A take or refund without a reply may concern a whole batch.
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
		name: "max_new_buckets",
		configure: func(p *pairRun, s *pairSite) {
			most := len(regulars)
			if p.acquainted {
				most = 1
			}
			s.store(fmt.Sprint("max_new_buckets ", most))
		},
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
		name:      "obey_upstream",
		configure: func(_ *pairRun, s *pairSite) { s.zone("obey_upstream") },
		disturb:   func(p *pairRun) []func() { return []func(){p.overload, p.overload} },
		excludes:  map[string]string{"sliding_log": "obey_upstream does not go with sliding_log"},
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
		name:      "charge_delay",
		configure: func(_ *pairRun, s *pairSite) { s.store("charge_delay 300ms") },
	},
	{
		name:      "window month",
		configure: func(_ *pairRun, s *pairSite) { s.zone("window month in America/New_York") },
	},
	{
		name:      "settle at the end", // awaited because of the status of gRPC
		configure: func(_ *pairRun, s *pairSite) { s.zone("count_status not 304 grpc:5") },
	},
	{
		name:      "warn",
		configure: func(_ *pairRun, s *pairSite) { s.zone("warn 50") },
	},
	{
		name:      "url",
		configure: func(_ *pairRun, s *pairSite) { s.byURL = true },
	},
	{
		name:      "reset_status",
		configure: func(_ *pairRun, s *pairSite) { s.zone("reset_status 204") },
		disturb:   func(p *pairRun) []func() { return []func(){p.logIn, p.logIn} },
	},
	{
		name:      "status",
		configure: func(_ *pairRun, s *pairSite) { s.zone("status 402") },
		excludes:  map[string]string{"service": "status has no effect in rate_limit_service"},
	},
	{
		name: "block",
		disturb: func(p *pairRun) []func() {
			p.block()
			return []func(){p.staysBlocked, p.staysBlocked}
		},
	},
	{
		name:      "plain charges refused",
		configure: func(_ *pairRun, s *pairSite) { s.filtered = true },
	},
	{
		name:      "servers not identified",
		configure: func(_ *pairRun, s *pairSite) { s.unidentified = true },
	},
	{
		name:      "ledger_trust 0",
		configure: func(_ *pairRun, s *pairSite) { s.store("ledger_trust 0") },
	},
	{
		name: "shard stopped",
		configure: func(_ *pairRun, s *pairSite) {
			s.zone("on_error allow")
			// Charges beyond that time stay pending in the ledger.
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
	{
		name:      "limits differ",
		configure: func(_ *pairRun, s *pairSite) { s.differing = true },
	},
	{
		name:      "sliding_window",
		configure: func(_ *pairRun, s *pairSite) { s.zone("algorithm sliding_window") },
		excludes:  map[string]string{"window month": "goes with algorithm fixed_window only"},
	},
	{
		name:      "sliding_log",
		configure: func(_ *pairRun, s *pairSite) { s.zone("algorithm sliding_log") },
		excludes: map[string]string{
			"window month": "goes with algorithm fixed_window only", "penalty": "penalty does not go with sliding_log",
			"batch auto": "batch does not go with sliding_log",
		},
	},
	{
		name:      "gcra",
		configure: func(_ *pairRun, s *pairSite) { s.zone("algorithm gcra") },
		excludes: map[string]string{
			"window month": "goes with algorithm fixed_window only", "batch auto": "batch does not go with gcra",
		},
	},
	{
		name: "cost of the response",
		configure: func(_ *pairRun, s *pairSite) {
			s.zone(fmt.Sprintf("cost {http.rate_limit.response.json.%s} 1", usagePath))
		},
	},
	{
		name:    "clients leave",
		disturb: func(p *pairRun) []func() { return []func(){p.leave, p.leave} },
	},
	{
		name:    "one request after the other",
		disturb: func(p *pairRun) []func() { return []func(){p.giveBack} },
	},
	{
		name:    "two keys",
		disturb: func(p *pairRun) []func() { return []func(){p.sendTwoKeys, p.sendTwoKeys} },
	},
	{
		name:    "grant",
		disturb: func(p *pairRun) []func() { return []func(){p.useGrant} },
	},
	{
		name: "rules",
		disturb: func(p *pairRun) []func() {
			p.setRules()
			return []func(){p.useLimit, p.useLimit}
		},
	},
	{
		name:      "service",
		configure: func(_ *pairRun, s *pairSite) { s.serves = true },
		allow:     func(_ *pairRun, b *bounds) { b.takes = true },
		excludes: map[string]string{
			"reset_status": "has no effect in rate_limit_service", "settle at the end": "has no effect in rate_limit_service",
			"cost of the response": "rate_limit_service sees none",
		},
	},
	{
		name:      "held by the dead",
		configure: func(_ *pairRun, s *pairSite) { s.zone("charge before") },
		disturb:   func(p *pairRun) []func() { return []func(){p.holdForTheDead, p.holdForTheDead} },
		allow:     func(_ *pairRun, b *bounds) { b.takes = true },
	},
	{
		name:    "false reset",
		disturb: func(p *pairRun) []func() { return []func(){p.storeFalseReset} },
	},
}

const (
	pairLimit      = 40
	lowLimit       = 15
	groupLimit     = 150
	innerLimit     = 60
	batchPercent   = 10
	reservePercent = 20
)

// tunings are options of a store that do not affect counts.
var tunings = []string{"pool_size 2", "pool_size 9", "ledger_trust 500ms", "max_replica_lag 4s", "read_from primary"}

// bounds are what the invariants tolerate in a pair.
type bounds struct {
	// limits is how many times its limit a bucket may hold.
	limits int64
	// faults is set if servers are down for a time: unchecked requests are admitted on top, and
	// calls without a reply may count or not.
	faults bool
	// takes is set if requests take what they cost, and tokens is the most that one call moves.
	takes  bool
	tokens int64
	// shared is set if some clients share a bucket, so that only sums are compared.
	shared bool
	// strangers is set if regulars may share it.
	strangers bool
	// either is set if requests served while the default store is in memory may count in Redis.
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

// allPairs returns all pairs of features.
func allPairs() (all []pair) {
	for i := range features {
		for j := range i {
			all = append(all, pair{j, i})
		}
	}
	return all
}

// somePairs returns pairs that cover every feature.
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

// TestTableOfPairs checks that names are unique, and that exclusions name features.
func TestTableOfPairs(t *testing.T) {
	t.Parallel()
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
	must(t, "somePairs", want("number of features in it", len(in), len(features)))
	must(t, "the table", want("number of pairs", len(allPairs()), len(features)*(len(features)-1)/2))
}
