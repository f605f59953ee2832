package redisstore

import (
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:
//
//	redis {
//		shard <name> {
//			primary  <addr>
//			replica  <addr>...
//			url      <url>
//			sentinel <master> <addr>...
//			cluster  <addr>...
//			weight   <now> [was <before>...]
//			<an option of connections>
//		}
//		url      <url>
//		username <name>
//		password <secret>
//		password_command <command> <argument>... {
//			lifetime <duration>
//		}
//		sentinel_username <name>
//		sentinel_password <secret>
//		db                <n>
//		tls {
//			ca                   <file>
//			cert                 <file> <key>
//			server_name          <name>
//			insecure_skip_verify
//		}
//		pool_size       <n>
//		max_replica_lag <duration>
//		key_prefix      <text>
//		key_secret      <secret>
//		read_from       replicas|primary
//		check_timeout   <duration>
//		charge_timeout  <duration>
//		charge_delay    <duration>
//		pipelining      on|off
//		on_error        allow|deny|local
//		ledger_trust    <duration>
//		max_buckets     <n>
//		max_new_buckets <n>
//	}
func (s *Store) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	p := option.NewParser(d)
	if err := p.NoArgs(); err != nil {
		return err
	}
	if err := p.Table(&option.Table{
		Rows: s.rows(), Elsewhere: option.Names(new(Shard).ownRows()), Place: "shard <name> { … }, in the block of the store; a store of one shard may have url redis://<host:port> in its place",
	}); err != nil {
		return err
	}
	if s.hasOnlyShard && len(s.Shards) > 1 {
		return p.At(fmt.Errorf("redis store: %w", errURLAndShards))
	}
	if err := s.validate(); err != nil {
		return p.At(fmt.Errorf("redis store: %w", err))
	}
	return nil
}

// addShard parses shard <name> { … }.
func (s *Store) addShard(p *option.Parser) error {
	start := p.Token()
	shard, err := parseShard(p.Dispenser)
	if err != nil {
		return err
	}
	s.Shards = append(s.Shards, shard)
	p.StartsAt("shard "+shard.Name, start)
	return nil
}

// addOnlyShard parses url <url>: the only shard may go without a block.
func (s *Store) addOnlyShard(p *option.Parser) error {
	only := &Shard{Name: onlyShard}
	s.Shards, s.hasOnlyShard = append(s.Shards, only), true
	return option.Filled(&only.URL).Set(p)
}

func parseShard(d *caddyfile.Dispenser) (*Shard, error) {
	p := option.NewParser(d)
	s := new(Shard)
	var err error
	if s.Name, err = p.Arg(); err != nil {
		return nil, p.Err("shard takes one argument, its name")
	}
	table := &option.Table{
		Rows: s.rows(), Elsewhere: append(option.Names(new(Store).ownRows()), "shard"), Place: "the block of the store, outside shard",
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		which := p.Token()
		if err := p.Line(table); err != nil {
			return nil, err
		}
		// Checked here, while the option's line is known.
		if err := s.validateServers(); err != nil {
			return nil, option.ErrorAt(which, fmt.Errorf("shard %s: %w", s.Name, err))
		}
	}
	if err := s.validate(""); err != nil {
		return nil, p.At(err)
	}
	return s, nil
}

// setPasswordCommand parses password_command, whose block may be missing.
func (c *Connection) setPasswordCommand(outer *option.Parser) error {
	p := option.NewParser(outer.Dispenser)
	command := new(PasswordCommand)
	if err := option.List(&command.Command).Set(p); err != nil {
		return err
	}
	if err := p.Table(&option.Table{Rows: command.rows()}); err != nil {
		return err
	}
	if err := command.validate(); err != nil {
		return p.At(err)
	}
	c.PasswordCommand = command
	return nil
}

// setTLS parses tls, whose block may be missing.
func (c *Connection) setTLS(outer *option.Parser) error {
	p := option.NewParser(outer.Dispenser)
	if err := p.NoArgs(); err != nil {
		return err
	}
	t := new(TLS)
	if err := p.Table(&option.Table{Rows: t.rows(), Elsewhere: []string{"key"}, Place: "the line cert <file> <key>"}); err != nil {
		return err
	}
	if err := t.validate(); err != nil {
		return p.At(fmt.Errorf("tls: %w", err))
	}
	c.TLS = t
	return nil
}

// Interface guard.
var _ caddyfile.Unmarshaler = (*Store)(nil)
