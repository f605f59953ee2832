package redisstore

import (
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// The options of each block, in the order in which errors list them.
const (
	RedisOptions      = "url, shard, previous_shards, " + connectionOptions + ", " + countingOptions
	ShardOptions      = kindOptions + ", " + connectionOptions
	kindOptions       = "primary, url, replica, sentinel, cluster, weight, retired"
	connectionOptions = "username, password, password_command, password_lifetime, sentinel_username, sentinel_password, db, tls, dial_timeout, pool_size, max_replica_lag"
	countingOptions   = "key_prefix, key_secret, read_from, clock, check_timeout, charge_timeout, charge_delay, plain_charges, pipelining, ledger_trust, ledger_max_trust, ledger_max_buckets, max_new_buckets, on_error"
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
//			weight   <n>
//			retired
//			<the connection's options, for this shard alone>
//		}
//		previous_shards    <name>...
//		username           <name>
//		password           <secret>
//		password_command   <command> <argument>...
//		password_lifetime  <duration>
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
//		charge_delay       <duration>
//		plain_charges      on|off
//		pipelining         on|off
//		ledger_trust       <duration>
//		ledger_max_trust   <duration>
//		ledger_max_buckets <n>
//		max_new_buckets    <n>
//		on_error           allow|deny|local
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
		return option.Filled(&only.URL).Set(p)
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
		"previous_shards":    option.List(&s.PreviousShards).Set,
		"key_prefix":         option.Text(&s.KeyPrefix).Set,
		"key_secret":         option.Text(&s.KeySecret).Set,
		"read_from":          option.Text(&s.ReadFrom).Set,
		"clock":              option.Text(&s.Clock).Set,
		"check_timeout":      option.Duration(&s.CheckTimeout).Set,
		"charge_timeout":     option.Duration(&s.ChargeTimeout).Set,
		"charge_delay":       option.Delay(&s.ChargeDelay).Set,
		"plain_charges":      option.Text(&s.PlainCharges).Set,
		"pipelining":         option.Text(&s.Pipelining).Set,
		"ledger_trust":       option.Duration(&s.LedgerTrust).Set,
		"ledger_max_trust":   option.Delay(&s.LedgerMaxTrust).Set,
		"ledger_max_buckets": option.Positive(&s.LedgerMaxBuckets).Set,
		"max_new_buckets":    option.Positive(&s.MaxNewBuckets).Set,
		"on_error":           option.Text(&s.OnError).Set,
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
		"primary": option.Text(&s.Primary).Set,
		"url":     option.Filled(&s.URL).Set,
		"replica": option.List(&s.Replicas).Set,
		"cluster": option.List(&s.Cluster).Set,
		"weight":  option.Positive(&s.Weight).Set,
		"retired": option.Flag(&s.Retired).Set,
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

// setters returns the setters of the options that a store and a shard have.
func (c *Connection) setters() option.Setters {
	return option.Setters{
		"username":          option.Text(&c.Username).Set,
		"password":          option.Text(&c.Password).Set,
		"password_command":  option.List(&c.PasswordCommand).Set,
		"password_lifetime": option.Duration(&c.PasswordLifetime).Set,
		"sentinel_username": option.Text(&c.SentinelUsername).Set,
		"sentinel_password": option.Text(&c.SentinelPassword).Set,
		"dial_timeout":      option.Duration(&c.DialTimeout).Set,
		"pool_size":         option.Positive(&c.PoolSize).Set,
		"max_replica_lag":   option.Duration(&c.MaxReplicaLag).Set,
		"db": func(p *option.Parser) error {
			c.DB = new(int)
			return option.Integer(c.DB).Set(p)
		},
		"tls": func(p *option.Parser) (err error) {
			c.TLS, err = parseTLS(p.Dispenser)
			return err
		},
	}
}

// parseTLS parses the option tls, whose block may be missing.
func parseTLS(d *caddyfile.Dispenser) (*TLS, error) {
	p := option.NewParser(d)
	if err := p.NoArgs(); err != nil {
		return nil, err
	}
	t := new(TLS)
	setters := option.Setters{
		"ca":                   option.Filled(&t.CA).Set,
		"server_name":          option.Filled(&t.ServerName).Set,
		"insecure_skip_verify": option.Flag(&t.InsecureSkipVerify).Set,
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
