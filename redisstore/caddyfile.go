package redisstore

import (
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

const (
	RedisOptions      = "shard, previous_shards, " + connectionOptions + ", " + countingOptions
	ShardOptions      = kindOptions + ", " + connectionOptions
	kindOptions       = "primary, replica, sentinel, cluster, weight, retired"
	connectionOptions = "username, password, sentinel_username, sentinel_password, db, tls, dial_timeout, pool_size, max_replica_lag"
	countingOptions   = "key_prefix, key_secret, read_from, clock, check_timeout, charge_timeout, pipelining, ledger_trust, ledger_max_buckets, max_new_buckets, on_error"
	TlsOptions        = "ca, cert, server_name, insecure_skip_verify"
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
func (s *Store) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	p := redisParser{option.NewParser(d)}
	if err := p.NoArgs(); err != nil {
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
			p.StartsAt("shard "+shard.Name, start)
			continue
		}
		if err := p.redisOption(s); err != nil {
			return err
		}
	}
	if err := s.validate(); err != nil {
		return p.At(fmt.Errorf("redis store: %w", err))
	}
	return nil
}

// redisParser parses the options of a store or a shard.
type redisParser struct{ *option.Parser }

func (p redisParser) redisOption(s *Store) error {
	if err := p.Once(); err != nil {
		return err
	}
	switch p.Val() {
	case "previous_shards":
		return p.More(&s.PreviousShards)
	case "key_prefix":
		return p.Text(&s.KeyPrefix)
	case "key_secret":
		return p.Text(&s.KeySecret)
	case "read_from":
		return p.Text(&s.ReadFrom)
	case "clock":
		return p.Text(&s.Clock)
	case "check_timeout":
		return p.Duration(&s.CheckTimeout)
	case "charge_timeout":
		return p.Duration(&s.ChargeTimeout)
	case "pipelining":
		return p.Text(&s.Pipelining)
	case "ledger_trust":
		return p.Duration(&s.LedgerTrust)
	case "max_new_buckets":
		return p.Positive(&s.MaxNewBuckets)
	case "ledger_max_buckets":
		return p.Positive(&s.LedgerMaxBuckets)
	case "on_error":
		return p.Text(&s.OnError)
	}
	if known, err := p.connectionOption(&s.Connection); known || err != nil {
		return err
	}
	return p.Unknown(RedisOptions, kindOptions, "shard <name> { … }, in the block of the store")
}

func parseShard(d *caddyfile.Dispenser) (*Shard, error) {
	p := redisParser{option.NewParser(d)}
	s := new(Shard)
	if err := p.Text(&s.Name); err != nil {
		return nil, p.Err("shard takes one argument, its name")
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if err := p.shardOption(s); err != nil {
			return nil, err
		}
	}
	if err := s.validate(); err != nil {
		return nil, p.At(err)
	}
	return s, nil
}

func (p redisParser) shardOption(s *Shard) error {
	which := p.Token()
	if which.Text != "replica" && which.Text != "cluster" {
		if err := p.Once(); err != nil {
			return err
		}
	}
	if known, err := p.connectionOption(&s.Connection); known || err != nil {
		return err
	}
	if err := p.serversOption(s); err != nil {
		return err
	}
	if err := s.validateServers(); err != nil {
		return option.ErrorAt(which, fmt.Errorf("shard %s: %w", s.Name, err))
	}
	return nil
}

// serversOption parses an option that only a shard has.
func (p redisParser) serversOption(s *Shard) error {
	switch p.Val() {
	case "primary":
		return p.Text(&s.Primary)
	case "replica":
		return p.More(&s.Replicas)
	case "sentinel":
		args := p.RemainingArgs()
		if len(args) < 2 {
			return p.Err("write sentinel <master> <addr>..., with the name under which the sentinels watch the primary, and their addresses")
		}
		s.Sentinel = &Sentinel{Master: args[0], Addrs: args[1:]}
		return nil
	case "cluster":
		return p.More(&s.Cluster)
	case "weight":
		return p.Positive(&s.Weight)
	case "retired":
		s.Retired = true
		return p.NoArgs()
	default:
		return p.Unknown(ShardOptions, "shard, "+countingOptions, "the block of the store, outside shard")
	}
}

// connectionOption parses an option that a store and a shard have, and tells
// whether this is one.
func (p redisParser) connectionOption(c *Connection) (known bool, err error) {
	switch p.Val() {
	case "username":
		return true, p.Text(&c.Username)
	case "password":
		return true, p.Text(&c.Password)
	case "sentinel_username":
		return true, p.Text(&c.SentinelUsername)
	case "sentinel_password":
		return true, p.Text(&c.SentinelPassword)
	case "db":
		c.DB = new(int)
		return true, p.Integer(c.DB)
	case "tls":
		c.TLS, err = p.tls()
		return true, err
	case "dial_timeout":
		return true, p.Duration(&c.DialTimeout)
	case "pool_size":
		return true, p.Positive(&c.PoolSize)
	case "max_replica_lag":
		return true, p.Duration(&c.MaxReplicaLag)
	default:
		return false, nil
	}
}

// tls parses a block, which may be missing.
func (p redisParser) tls() (*TLS, error) {
	block := redisParser{option.NewParser(p.Dispenser)}
	if err := block.NoArgs(); err != nil {
		return nil, err
	}
	t := new(TLS)
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		if err := block.tlsOption(t); err != nil {
			return nil, err
		}
	}
	if err := t.validate(); err != nil {
		return nil, block.At(fmt.Errorf("tls: %w", err))
	}
	return t, nil
}

func (p redisParser) tlsOption(t *TLS) error {
	if err := p.Once(); err != nil {
		return err
	}
	switch p.Val() {
	case "ca":
		return p.Filled(&t.CA)
	case "cert":
		if !p.Dispenser.Args(&t.Cert, &t.Key) || p.NextArg() || t.Cert == "" || t.Key == "" {
			return p.Err("write cert <file> <key>, with the file of the certificate and that of its private key")
		}
		return nil
	case "server_name":
		return p.Filled(&t.ServerName)
	case "insecure_skip_verify":
		t.InsecureSkipVerify = true
		return p.NoArgs()
	default:
		return p.Unknown(TlsOptions, "key", "the line cert <file> <key>")
	}
}

// Interface guard.
var _ caddyfile.Unmarshaler = (*Store)(nil)
