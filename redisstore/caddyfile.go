package redisstore

import (
	"fmt"
	"strconv"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// The options of each block, in the order in which errors list them.
const (
	RedisOptions      = "url, shard, " + connectionOptions + ", " + countingOptions
	ShardOptions      = kindOptions + ", " + connectionOptions
	kindOptions       = "primary, url, replica, sentinel, cluster, weight"
	connectionOptions = "username, password, password_command, sentinel_username, sentinel_password, db, tls, pool_size, max_replica_lag"
	countingOptions   = "key_prefix, key_secret, read_from, check_timeout, charge_timeout, charge_delay, pipelining, ledger_trust, max_buckets, max_new_buckets, on_error"
	TLSOptions        = "ca, cert, server_name, insecure_skip_verify"
)

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:
//
//	redis {
//		url <url>
//		shard <name> {
//			primary  <addr>
//			url      <url>
//			replica  <addr>...
//			sentinel <master> <addr>...
//			cluster  <addr>...
//			weight   <now> [was <before>]
//			<the connection's options, for this shard alone>
//		}
//		username          <name>
//		password          <secret>
//		password_command  <command> <argument>... {
//			lifetime <duration>
//		}
//		sentinel_username <name>
//		sentinel_password <secret>
//		db                <n>
//		tls {
//			ca          <file>
//			cert        <file> <key>
//			server_name <name>
//			insecure_skip_verify
//		}
//		pool_size         <n>
//		max_replica_lag   <duration>
//		key_prefix        <text>
//		key_secret        <secret>
//		read_from         replicas|primary
//		check_timeout     <duration>
//		charge_timeout    <duration>
//		charge_delay      <duration>
//		pipelining        on|off
//		ledger_trust      <duration>
//		max_buckets       <n>
//		max_new_buckets   <n>
//		on_error          allow|deny|local
//	}
func (s *Store) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	p := option.NewParser(d)
	if err := p.NoArgs(); err != nil {
		return err
	}
	// The only shard may go without a block.
	hasURL := false
	setURL := func(p *option.Parser) error {
		only := &Shard{Name: onlyShard}
		s.Shards, hasURL = append(s.Shards, only), true
		return option.Filled(&only.URL)(p)
	}
	block := &option.Block{
		Setters: []option.Setters{s.setters(), s.Connection.setters(), {"url": setURL}}, Repeatable: []string{"shard"},
		Known: RedisOptions, Elsewhere: kindOptions, Place: "shard <name> { … }, in the block of the store",
	}
	if err := p.Options(block); err != nil {
		return err
	}
	if hasURL && len(s.Shards) > 1 {
		return p.At(fmt.Errorf("redis store: %w", errURLAndShards))
	}
	if err := s.validate(); err != nil {
		return p.At(fmt.Errorf("redis store: %w", err))
	}
	return nil
}

// setters returns the setters of the options that only a store has.
func (s *Store) setters() option.Setters {
	return option.Setters{
		"key_prefix":      option.Text(&s.KeyPrefix),
		"key_secret":      option.Text(&s.KeySecret),
		"read_from":       option.Text(&s.ReadFrom),
		"check_timeout":   option.Duration(&s.CheckTimeout),
		"charge_timeout":  option.Duration(&s.ChargeTimeout),
		"charge_delay":    option.Delay(&s.ChargeDelay),
		"pipelining":      option.Text(&s.Pipelining),
		"ledger_trust":    option.Delay(&s.LedgerTrust),
		"max_buckets":     option.Positive(&s.MaxBuckets),
		"max_new_buckets": option.Positive(&s.MaxNewBuckets),
		"on_error":        option.Text(&s.OnError),
		"shard": func(p *option.Parser) error {
			start := p.Token()
			shard, err := parseShard(p.Dispenser)
			if err != nil {
				return err
			}
			s.Shards = append(s.Shards, shard)
			p.StartsAt("shard "+shard.Name, start)
			return nil
		},
	}
}

func parseShard(d *caddyfile.Dispenser) (*Shard, error) {
	p := option.NewParser(d)
	s := new(Shard)
	var err error
	if s.Name, err = p.Arg(); err != nil {
		return nil, p.Err("shard takes one argument, its name")
	}
	block := &option.Block{
		Setters: []option.Setters{s.setters(), s.Connection.setters()}, Repeatable: []string{"replica", "cluster"},
		Known: ShardOptions, Elsewhere: "shard, " + countingOptions, Place: "the block of the store, outside shard",
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		which := p.Token()
		if err := p.Option(block); err != nil {
			return nil, err
		}
		// Checked here, while the option's line is known.
		if err := s.validateServers(); err != nil {
			return nil, option.ErrorAt(which, fmt.Errorf("shard %s: %w", s.Name, err))
		}
	}
	if err := s.validate(); err != nil {
		return nil, p.At(err)
	}
	return s, nil
}

// setters returns the setters of the options that only a shard has.
func (s *Shard) setters() option.Setters {
	return option.Setters{
		"primary": option.Text(&s.Primary),
		"url":     option.Filled(&s.URL),
		"replica": option.List(&s.Replicas),
		"cluster": option.List(&s.Cluster),
		"weight":  s.setWeight,
		"sentinel": func(p *option.Parser) error {
			args := p.RemainingArgs()
			if len(args) < 2 {
				return p.Err("write sentinel <master> <addr>..., with the name under which the sentinels watch the primary, and their addresses")
			}
			s.Sentinel = &Sentinel{Master: args[0], Addrs: args[1:]}
			return nil
		},
	}
}

// setWeight parses weight <now> [was <before>].
func (s *Shard) setWeight(p *option.Parser) error {
	args := p.RemainingArgs()
	if len(args) != 1 && (len(args) != 3 || args[1] != "was") {
		return p.Err("write weight <now> or, while clients move, weight <now> was <before>")
	}
	for n, to := range []**int{&s.Weight, &s.PreviousWeight}[:(len(args)+1)/2] {
		weight, err := strconv.Atoi(args[2*n])
		if err != nil {
			return p.Errf("weight %q: it must be a whole number", args[2*n])
		}
		*to = &weight
	}
	return nil
}

// setters returns the setters of the options that a store and a shard have.
func (c *Connection) setters() option.Setters {
	return option.Setters{
		"username":          option.Text(&c.Username),
		"password":          option.Text(&c.Password),
		"sentinel_username": option.Text(&c.SentinelUsername),
		"sentinel_password": option.Text(&c.SentinelPassword),
		"pool_size":         option.Positive(&c.PoolSize),
		"max_replica_lag":   option.Duration(&c.MaxReplicaLag),
		"db": func(p *option.Parser) error {
			c.DB = new(int)
			return option.Integer(c.DB)(p)
		},
		"password_command": func(p *option.Parser) (err error) {
			c.PasswordCommand, err = parsePasswordCommand(p.Dispenser)
			return err
		},
		"tls": func(p *option.Parser) (err error) {
			c.TLS, err = parseTLS(p.Dispenser)
			return err
		},
	}
}

// parsePasswordCommand parses the option password_command, whose block may be missing.
func parsePasswordCommand(d *caddyfile.Dispenser) (*PasswordCommand, error) {
	p := option.NewParser(d)
	c := new(PasswordCommand)
	if c.Command = p.RemainingArgs(); len(c.Command) == 0 {
		return nil, p.Err("password_command takes at least one argument")
	}
	block := &option.Block{Setters: []option.Setters{{"lifetime": option.Duration(&c.Lifetime)}}, Known: "lifetime"}
	if err := p.Options(block); err != nil {
		return nil, err
	}
	if err := c.validate(); err != nil {
		return nil, p.At(err)
	}
	return c, nil
}

// parseTLS parses the option tls, whose block may be missing.
func parseTLS(d *caddyfile.Dispenser) (*TLS, error) {
	p := option.NewParser(d)
	if err := p.NoArgs(); err != nil {
		return nil, err
	}
	t := new(TLS)
	setters := option.Setters{
		"ca":                   option.Filled(&t.CA),
		"server_name":          option.Filled(&t.ServerName),
		"insecure_skip_verify": option.Flag(&t.InsecureSkipVerify),
		"cert": func(p *option.Parser) error {
			if !p.Args(&t.Cert, &t.Key) || p.NextArg() || t.Cert == "" || t.Key == "" {
				return p.Err("write cert <file> <key>, with the file of the certificate and that of its private key")
			}
			return nil
		},
	}
	block := &option.Block{Setters: []option.Setters{setters}, Known: TLSOptions, Elsewhere: "key", Place: "the line cert <file> <key>"}
	if err := p.Options(block); err != nil {
		return nil, err
	}
	if err := t.validate(); err != nil {
		return nil, p.At(fmt.Errorf("tls: %w", err))
	}
	return t, nil
}

// Interface guard.
var _ caddyfile.Unmarshaler = (*Store)(nil)
