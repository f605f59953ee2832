package shardlimit

import (
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

const (
	redisOptions      = "shard, previous_shards, " + connectionOptions + ", " + countingOptions
	shardOptions      = kindOptions + ", " + connectionOptions
	kindOptions       = "primary, replica, sentinel, cluster, weight, retired"
	connectionOptions = "username, password, sentinel_username, sentinel_password, db, tls, dial_timeout, pool_size, max_replica_lag"
	countingOptions   = "key_prefix, key_secret, read_from, clock, check_timeout, charge_timeout, pipelining, ledger_trust, ledger_max_buckets, max_new_buckets, on_error"
	tlsOptions        = "ca, cert, server_name, insecure_skip_verify"
)

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:
//
//	redis {
//		shard <name> {
//			primary  <addr>
//			replica  <addr>...
//			sentinel <master> <addr>...
//			cluster  <addr>...
//			weight   <n>
//			retired
//			<the connection's options, for this shard alone>
//		}
//		previous_shards    <name>...
//		username           <name>
//		password           <secret>
//		sentinel_username  <name>
//		sentinel_password  <secret>
//		db                 <n>
//		tls {
//			ca          <file>
//			cert        <file> <key>
//			server_name <name>
//			insecure_skip_verify
//		}
//		dial_timeout       <duration>
//		pool_size          <n>
//		max_replica_lag    <duration>
//		key_prefix         <text>
//		key_secret         <secret>
//		read_from          replicas|primary
//		clock              redis|local
//		check_timeout      <duration>
//		charge_timeout     <duration>
//		pipelining         on|off
//		ledger_trust       <duration>
//		ledger_max_buckets <n>
//		max_new_buckets    <n>
//		on_error           allow|deny|local
//	}
func (s *RedisStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	p := redisParser{newParser(d)}
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
			p.startsAt("shard "+shard.Name, start)
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

// redisParser parses the options of a store or a shard.
type redisParser struct{ *parser }

func (p redisParser) redisOption(s *RedisStore) error {
	if err := p.once(); err != nil {
		return err
	}
	switch p.Val() {
	case "previous_shards":
		return p.more(&s.PreviousShards)
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
	case "pipelining":
		return p.text(&s.Pipelining)
	case "ledger_trust":
		return p.duration(&s.LedgerTrust)
	case "max_new_buckets":
		return p.positive(&s.MaxNewBuckets)
	case "ledger_max_buckets":
		return p.positive(&s.LedgerMaxBuckets)
	case "on_error":
		return p.text(&s.OnError)
	}
	if known, err := p.connectionOption(&s.RedisConnection); known || err != nil {
		return err
	}
	return p.unknown(redisOptions, kindOptions, "shard <name> { … }, in the block of the store")
}

func parseShard(d *caddyfile.Dispenser) (*RedisShard, error) {
	p := redisParser{newParser(d)}
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

func (p redisParser) shardOption(s *RedisShard) error {
	which := p.Token()
	if which.Text != "replica" && which.Text != "cluster" {
		if err := p.once(); err != nil {
			return err
		}
	}
	if known, err := p.connectionOption(&s.RedisConnection); known || err != nil {
		return err
	}
	if err := p.serversOption(s); err != nil {
		return err
	}
	if err := s.validateServers(); err != nil {
		return errorAt(which, fmt.Errorf("shard %s: %w", s.Name, err))
	}
	return nil
}

// serversOption parses an option that only a shard has.
func (p redisParser) serversOption(s *RedisShard) error {
	switch p.Val() {
	case "primary":
		return p.text(&s.Primary)
	case "replica":
		return p.more(&s.Replicas)
	case "sentinel":
		args := p.RemainingArgs()
		if len(args) < 2 {
			return p.Err("write sentinel <master> <addr>..., with the name under which the sentinels watch the primary, and their addresses")
		}
		s.Sentinel = &RedisSentinel{Master: args[0], Addrs: args[1:]}
		return nil
	case "cluster":
		return p.more(&s.Cluster)
	case "weight":
		return p.positive(&s.Weight)
	case "retired":
		s.Retired = true
		return p.noArgs()
	default:
		return p.unknown(shardOptions, "shard, "+countingOptions, "the block of the store, outside shard")
	}
}

// connectionOption parses an option that a store and a shard have, and tells
// whether this is one.
func (p redisParser) connectionOption(c *RedisConnection) (known bool, err error) {
	switch p.Val() {
	case "username":
		return true, p.text(&c.Username)
	case "password":
		return true, p.text(&c.Password)
	case "sentinel_username":
		return true, p.text(&c.SentinelUsername)
	case "sentinel_password":
		return true, p.text(&c.SentinelPassword)
	case "db":
		c.DB = new(int)
		return true, p.integer(c.DB)
	case "tls":
		c.TLS, err = p.tls()
		return true, err
	case "dial_timeout":
		return true, p.duration(&c.DialTimeout)
	case "pool_size":
		return true, p.positive(&c.PoolSize)
	case "max_replica_lag":
		return true, p.duration(&c.MaxReplicaLag)
	default:
		return false, nil
	}
}

// tls parses a block, which may be missing.
func (p redisParser) tls() (*RedisTLS, error) {
	block := redisParser{newParser(p.Dispenser)}
	if err := block.noArgs(); err != nil {
		return nil, err
	}
	t := new(RedisTLS)
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		if err := block.tlsOption(t); err != nil {
			return nil, err
		}
	}
	if err := t.validate(); err != nil {
		return nil, block.at(fmt.Errorf("tls: %w", err))
	}
	return t, nil
}

func (p redisParser) tlsOption(t *RedisTLS) error {
	if err := p.once(); err != nil {
		return err
	}
	switch p.Val() {
	case "ca":
		return p.filled(&t.CA)
	case "cert":
		if !p.Dispenser.Args(&t.Cert, &t.Key) || p.NextArg() || t.Cert == "" || t.Key == "" {
			return p.Err("write cert <file> <key>, with the file of the certificate and that of its private key")
		}
		return nil
	case "server_name":
		return p.filled(&t.ServerName)
	case "insecure_skip_verify":
		t.InsecureSkipVerify = true
		return p.noArgs()
	default:
		return p.unknown(tlsOptions, "key", "the line cert <file> <key>")
	}
}

// Interface guard.
var _ caddyfile.Unmarshaler = (*RedisStore)(nil)
