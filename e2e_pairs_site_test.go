package shardlimit_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

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
}

func (s *pairSite) store(lines ...string) { s.storeLines = append(s.storeLines, lines...) }

func (s *pairSite) defaultStore(lines ...string) {
	s.defaultLines = append(s.defaultLines, lines...)
}

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
		lines = append(lines, caddytest.ShardOf(shard, s.p.shard(shard)))
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

// zoneText is a zone. Those beside the first have the options of the pair, or
// none but what all have, as the seed says.
func (s *pairSite) zoneText(name string) string {
	lines := []string{"key {header.X-Key}", fmt.Sprint("events ", pairLimit)}
	switch name {
	case zoneGroup:
		lines = []string{"key {header.X-Group}", fmt.Sprint("events ", groupLimit)}
	case zoneInner:
		lines[1] = fmt.Sprint("events ", innerLimit)
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
	fmt.Fprintf(&b, "reverse_proxy %s\n}\n}\n", s.p.backend.Listener.Addr())
	return b.String()
}

// load replaces the config by the one of this moment.
func (p *pairRun) load() {
	p.t.Helper()
	p.loads.Add(1)
	if status, text := p.caddy.Load(p.site().caddyfile()); status != http.StatusOK {
		p.t.Fatalf("load: status %d: %s", status, text)
	}
}

// shard returns the shard of that name, which is started when it is first asked
// for. What a server has replied to outlasts its process.
func (p *pairRun) shard(name string) *redistest.Shard {
	p.t.Helper()
	s, ok := p.shards[name]
	if !ok {
		replicas := 0
		if name == "a" {
			replicas = 1
		}
		s = redistest.StartShard(p.t, replicas, "--appendonly", "yes", "--appendfsync", "no")
		p.shards[name] = s
	}
	return s
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

// detachReplica leaves a replica with what it has.
func (p *pairRun) detachReplica() {
	p.t.Helper()
	must(p.t, "detach the replica", p.shard("a").Replicas[0].PauseReplication())
}

// attachReplica ends that, once the primary is there.
func (p *pairRun) attachReplica() {
	p.t.Helper()
	if s := p.shard("a"); s.Primary.Running() {
		must(p.t, "attach the replica", s.Replicas[0].ResumeReplication())
		p.attachesLater = false
	} else {
		p.attachesLater = true
	}
}

// awaitWhole waits until all servers are in use, by the word of the Caddy.
func (p *pairRun) awaitWhole() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), pairPatience)
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
