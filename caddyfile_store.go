package shardlimit

import (
	"encoding/json"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

const (
	redisOptions = "shard, username, password, db, key_prefix, key_secret, read_from, clock, check_timeout, charge_timeout, dial_timeout, pool_size, pipelining, ledger_trust, ledger_max_buckets, on_error"
	shardOptions = "primary, replica, weight"
)

// parseGlobalOption parses the rate_limit global option, whose blocks add up:
//
//	rate_limit {
//		store [<name>] <module> { … }
//	}
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	app := App{StoresRaw: caddy.ModuleMap{}}
	if other, ok := existing.(httpcaddyfile.App); ok {
		if err := json.Unmarshal(other.Value, &app); err != nil {
			return nil, fmt.Errorf("read rate_limit: %w", err)
		}
	}
	d.Next()
	if d.NextArg() {
		return nil, d.Err("the global option rate_limit takes a block: rate_limit { … }; the directive belongs into a site")
	}
	for d.NextBlock(0) {
		if d.Val() != "store" {
			return nil, d.Errf("unknown option %s: the global option takes only store; zones and all else belong into the directive rate_limit in a site", d.Val())
		}
		if err := parseStore(d, app.StoresRaw); err != nil {
			return nil, err
		}
	}
	return httpcaddyfile.App{Name: "rate_limit", Value: caddyconfig.JSON(app, nil)}, nil
}

func parseStore(d *caddyfile.Dispenser, stores caddy.ModuleMap) error {
	name := defaultStore
	switch d.CountRemainingArgs() {
	case 1:
	case 2:
		d.NextArg()
		name = d.Val()
	default:
		return d.Err("write store [<name>] memory or store [<name>] redis, then a block")
	}
	d.NextArg()
	if !zoneName.MatchString(name) {
		return d.Errf("store name %q: use only letters, digits and the characters _ . -", name)
	}
	if _, ok := stores[name]; ok {
		return d.Errf("store %s is defined twice: give each its own name, as in store <name> %s", name, d.Val())
	}
	module := d.Val()
	if _, err := caddy.GetModule("rate_limit.stores." + module); err != nil {
		return d.Errf("unknown store module %s: write store [<name>] memory or store [<name>] redis; other modules must be built into this Caddy", module)
	}
	unmarshaled, err := caddyfile.UnmarshalModule(d, "rate_limit.stores."+module)
	if err != nil {
		return err
	}
	stores[name] = caddyconfig.JSONModuleObject(unmarshaled, "module", module, nil)
	return nil
}

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:
//
//	memory {
//		max_keys <n>
//	}
func (m *MemoryStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	p := parser{Dispenser: d, lines: map[string]caddyfile.Token{}, start: d.Token()}
	if err := p.noArgs(); err != nil {
		return err
	}
	for d.NextBlock(0) {
		if err := p.once(); err != nil {
			return err
		}
		if d.Val() != "max_keys" {
			return p.unknown("max_keys", "", "")
		}
		if err := p.positive(&m.MaxKeys); err != nil {
			return err
		}
	}
	return nil
}

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:
//
//	redis {
//		shard <name> {
//			primary <addr>
//			replica <addr>...
//			weight  <n>
//		}
//		username       <name>
//		password       <secret>
//		db             <n>
//		key_prefix     <text>
//		key_secret     <secret>
//		read_from      replicas|primary
//		clock          redis|local
//		check_timeout  <duration>
//		charge_timeout <duration>
//		dial_timeout   <duration>
//		pool_size      <n>
//		pipelining     on|off
//		ledger_trust   <duration>
//		ledger_max_buckets <n>
//		on_error       allow|deny|local
//	}
func (s *RedisStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	p := parser{Dispenser: d, lines: map[string]caddyfile.Token{}, start: d.Token()}
	if err := p.noArgs(); err != nil {
		return err
	}
	for d.NextBlock(0) {
		if d.Val() == "shard" {
			start := d.Token()
			shard, err := parseShard(d)
			if err != nil {
				return err
			}
			s.Shards = append(s.Shards, shard)
			p.lines["shard "+shard.Name] = start
			continue
		}
		if err := p.redisOption(s); err != nil {
			return err
		}
	}
	if err := s.validate(); err != nil {
		return p.at(fmt.Errorf("redis store: %w", err))
	}
	return nil
}

func (p *parser) redisOption(s *RedisStore) error {
	if err := p.once(); err != nil {
		return err
	}
	switch p.Val() {
	case "username":
		return p.text(&s.Username)
	case "password":
		return p.text(&s.Password)
	case "db":
		return p.integer(&s.DB)
	case "key_prefix":
		return p.text(&s.KeyPrefix)
	case "key_secret":
		return p.text(&s.KeySecret)
	case "read_from":
		return p.text(&s.ReadFrom)
	case "clock":
		return p.text(&s.Clock)
	case "check_timeout":
		return p.duration(&s.CheckTimeout)
	case "charge_timeout":
		return p.duration(&s.ChargeTimeout)
	case "dial_timeout":
		return p.duration(&s.DialTimeout)
	case "pool_size":
		return p.positive(&s.PoolSize)
	case "pipelining":
		return p.text(&s.Pipelining)
	case "ledger_trust":
		return p.duration(&s.LedgerTrust)
	case "ledger_max_buckets":
		return p.positive(&s.LedgerMaxBuckets)
	case "on_error":
		return p.text(&s.OnError)
	default:
		return p.unknown(redisOptions, shardOptions, "shard <name> { … }, in the block of the store")
	}
}

func parseShard(d *caddyfile.Dispenser) (*RedisShard, error) {
	p := parser{Dispenser: d, lines: map[string]caddyfile.Token{}, start: d.Token()}
	s := new(RedisShard)
	if err := p.text(&s.Name); err != nil {
		return nil, p.Err("shard takes one argument, its name")
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if err := p.shardOption(s); err != nil {
			return nil, err
		}
	}
	if err := s.validate(); err != nil {
		return nil, p.at(err)
	}
	return s, nil
}

func (p *parser) shardOption(s *RedisShard) error {
	option := p.Token()
	if option.Text != "replica" {
		if err := p.once(); err != nil {
			return err
		}
	}
	switch option.Text {
	case "primary":
		if err := p.text(&s.Primary); err != nil {
			return err
		}
	case "replica":
		addrs, err := p.args()
		if err != nil {
			return err
		}
		s.Replicas = append(s.Replicas, addrs...)
	case "weight":
		return p.positive(&s.Weight)
	default:
		return p.unknown(shardOptions, redisOptions, "the block of the store, outside shard")
	}
	if err := s.validateAddrs(); err != nil {
		return errorAt(option, err)
	}
	return nil
}

// Interface guards.
var (
	_ caddyfile.Unmarshaler = (*MemoryStore)(nil)
	_ caddyfile.Unmarshaler = (*RedisStore)(nil)
)
