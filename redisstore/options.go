package redisstore

import (
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// The headings in docs/configuration.md above the tables of these options.
const (
	sectionShards      = "Shards"
	sectionConnections = "Connections"
	sectionCalls       = "Calls"
	sectionLedger      = "What each Caddy remembers"
)

// Rows are the options of a store, for the documentation.
func Rows() []option.Row { return new(Store).rows() }

// rows are the options of the block of a store.
func (s *Store) rows() []option.Row {
	rows := append([]option.Row{
		{
			Name: "shard", JSON: []string{"shards"}, Args: "<name>", Field: option.Field{Set: s.addShard}, Repeats: true,
			Block:   append(new(Shard).ownRows(), option.Row{Args: "<an option of connections>"}),
			Section: sectionShards, Default: "required",
			Doc: "One independent Redis, of one of three [kinds](redis.md#kinds-of-shards): `primary` (or `url`), `sentinel` or `cluster`. Its name decides which clients it owns: keep the name when the addresses or the kind change.",
			Parts: map[string]string{
				"shards": "The shards over which the clients are spread: independent Redis servers, each with its replicas, or Redis Clusters. A new shard moves only the clients that it gets.",
			},
		},
		{Name: "url", Args: "<url>", Field: option.Field{Set: s.addOnlyShard}, Values: map[string]option.Schema{"url": {"pattern": urlPattern}}},
	}, s.Connection.rows()...)
	return append(rows, s.ownRows()...)
}

// ownRows are the options that only a store has, apart from its shards.
func (s *Store) ownRows() []option.Row {
	return []option.Row{
		{
			Name: "key_prefix", Args: "<text>", Field: option.Text(&s.KeyPrefix), Values: map[string]option.Schema{"key_prefix": {"pattern": `^$|` + keyPrefix.String()}}, Section: sectionCalls, Default: "`rl`",
			Doc: "The beginning of all keys in Redis.",
			Check: func() error {
				if s.KeyPrefix != "" && !keyPrefix.MatchString(s.KeyPrefix) {
					return option.Errorf("key_prefix", "%q: use only letters, digits and the characters _ . : -", s.KeyPrefix)
				}
				return nil
			},
		},
		{
			Name: "key_secret", Args: "<secret>", Field: option.Text(&s.KeySecret), Section: sectionCalls, Default: "off",
			Doc: "Replaces client keys in Redis by their HMAC.",
		},
		{
			Name: "read_from", Args: readReplicas + "|" + readPrimary, Field: option.Choice(&s.ReadFrom), Section: sectionCalls, Default: "`replicas`",
			Doc: "Which servers answer checks.",
		},
		{
			Name: "check_timeout", Args: "<duration>", Field: option.Duration(&s.CheckTimeout), Section: sectionCalls, Default: "50ms",
			Doc:   "How long a request waits for a check or, with `charge before`, for its take. Connecting, TLS included, may take [longer](redis.md#tls).",
			Check: positive("check_timeout", &s.CheckTimeout),
		},
		{
			Name: "charge_timeout", Args: "<duration>", Field: option.Duration(&s.ChargeTimeout), Section: sectionCalls, Default: "250ms",
			Doc:   "How long a charge, refund or penalty is retried if it could not be sent or Redis refused it.",
			Check: positive("charge_timeout", &s.ChargeTimeout),
		},
		{
			Name: "charge_delay", Args: "<duration>", Field: option.Delay(&s.ChargeDelay), Values: map[string]option.Schema{"charge_delay": {"maximum": maxChargeDelay}}, Section: sectionCalls, Default: "50ms",
			Doc: "How long charges of a `fixed_window` wait for others to be sent with them, if their clients have at least half of their limit left. Other Caddys see these charges that much later, and a Caddy that is killed loses that many more. At most 1s; `0` sends each at once.",
			Check: func() error {
				if d := s.chargeDelay(); d < 0 || d > maxChargeDelay {
					return option.Errorf("charge_delay", "%s: it must be from 0 to %s", d, maxChargeDelay)
				}
				return nil
			},
		},
		{
			Name: "pipelining", Args: turnedOn + "|" + turnedOff, Field: option.Choice(&s.Pipelining), Section: sectionCalls, Default: "`on`",
			Doc: "Sends waiting calls together, as one script call for several keys where possible. Write `off` behind a [proxy](servers.md#proxies) that spreads keys over servers.",
		},
		{
			Name: "on_error", Args: stores.OnErrorWords, Field: option.Choice(&s.OnError), Section: sectionCalls, Default: "`local`",
			Doc: "The `on_error` of zones that have none of their own.",
		},
		{
			Name: "ledger_trust", Args: "<duration>", Field: option.Delay(&s.LedgerTrust), Section: sectionLedger, Default: "1s",
			Doc: "How long this Caddy relies on the primary's last answer about a bucket. Meanwhile it ignores a replica that shows less, refuses a client over its limit without a call, and admits a client that comes to this Caddy alone without a call while half of its limit is left. With 1s or more, one request after [a longer pause](failure-modes.md#what-several-instances-can-admit-together) may pass unchecked too. `0` asks for every request.",
			Check: func() error {
				if s.LedgerTrust != nil && *s.LedgerTrust < 0 {
					return option.Errorf("ledger_trust", "%s: it must be at least 0", time.Duration(*s.LedgerTrust))
				}
				return nil
			},
		},
		{
			Name: "max_buckets", Args: "<n>", Field: option.Positive(&s.MaxBuckets), Section: sectionLedger, Default: "1000000",
			Doc:   "How many buckets this Caddy remembers, at less than 300 bytes each. Beyond that it first forgets those that are not in use. Charges that wait for a shard that is down and have to be dropped are logged and counted.",
			Check: atLeastOne("max_buckets", &s.MaxBuckets),
		},
		{
			Name: "max_new_buckets", Args: "<n>", Field: option.Positive(&s.MaxNewBuckets), Section: sectionLedger, Default: "0, any number",
			Doc:   "How many new clients a second this Caddy lets open a bucket in each zone, so that [made-up keys](failure-modes.md#made-up-keys) cannot fill Redis; further new clients share one bucket. Choose a number well above what a busy second brings, and such that the new buckets of a window fit into Redis at about 180 bytes each.",
			Check: atLeastOne("max_new_buckets", &s.MaxNewBuckets),
		},
	}
}

// ownRows are the options that only a shard has.
func (s *Shard) ownRows() []option.Row {
	return []option.Row{
		{
			Name: "primary", Args: "<addr>", Field: option.Text(&s.Primary), Values: map[string]option.Schema{"primary": {"pattern": `^$|` + addressPattern}}, Section: sectionShards, Default: "port 6379",
			Doc: "`host`, `host:port` or `unix/path`.",
			Parts: map[string]string{
				"primary": "The address of the primary: `host`, `host:port` or `unix/path`. Placeholders work. If the primary fails, nothing takes its place until it is back.",
			},
		},
		{Name: "replica", JSON: []string{"replicas"}, Args: "<addr>...", Field: option.List(&s.Replicas), Repeats: true, Values: map[string]option.Schema{"replicas": {"items": option.Schema{"type": "string", "pattern": addressPattern}}}, Section: sectionShards, Parts: map[string]string{"replicas": "The addresses of the primary's replicas, in the same form. They answer checks in turn. Default: none; the primary answers."}},
		{
			Name: "url", Args: "<url>", Field: option.Filled(&s.URL), Values: map[string]option.Schema{"url": {"pattern": urlPattern}}, Section: sectionShards, Default: "none",
			Doc: "A primary as cloud providers give it: `redis://`, or `rediss://` for TLS, then `<user>:<password>@<host>:<port>/<db>`. It replaces `primary`, `username`, `password` and `db`, and may contain `{file.*}`. In the block of a store, it is the only shard.",
		},
		{
			Name: "sentinel", Args: "<master> <addr>...", Field: option.Field{Set: s.setSentinel}, Section: sectionShards, Default: "port 26379",
			Doc: "The name under which the sentinels watch the primary, and the addresses of all sentinels: `host`, `host:port` or `unix/path`.",
		},
		{
			Name: "cluster", Args: "<addr>...", Field: option.List(&s.Cluster), Repeats: true, Values: map[string]option.Schema{"cluster": {"items": option.Schema{"type": "string", "pattern": nodePattern}}}, Section: sectionShards, Default: "port 6379",
			Doc: "Addresses of some nodes of a Redis Cluster, which name the others: `host` or `host:port`.",
		},
		{
			Name: "weight", JSON: []string{"weight", "previous_weights"}, Args: "<now> [was <before>...]", Field: option.Field{Set: s.setWeight}, Check: s.validateWeight, Values: map[string]option.Schema{"weight": {"maximum": maxWeight}, "previous_weights": {"items": option.Schema{"type": []string{"integer", "null"}, "minimum": 0, "maximum": maxWeight}}}, Section: sectionShards, Default: "1",
			Doc: "The share of the clients, 1 to 1000. While shards are added, removed or weighted anew, `was` says what it was before each step, the latest first: [the steps](failure-modes.md#when-shards-are-added-or-removed).",
			Parts: map[string]string{
				"weight":           "The share of the clients, from 0 to 1000. 0 is for a shard that is being removed, whose `previous_weights` say what it was: [the steps](failure-modes.md#when-shards-are-added-or-removed). Default: 1.",
				"previous_weights": "While shards are added, removed or weighted anew: the weight that this one had before, 0 if it was new, and before each earlier step within the longest window, the latest first: [the steps](failure-modes.md#when-shards-are-added-or-removed). Default: none; the weight is the same.",
			},
		},
	}
}

// rows are the options of the block of a shard.
func (s *Shard) rows() []option.Row { return append(s.ownRows(), s.Connection.rows()...) }

// rows are the options that a store and a shard have.
func (c *Connection) rows() []option.Row {
	return []option.Row{
		{
			Name: "username", Args: "<name>", Field: option.Text(&c.Username), Section: sectionConnections, Default: "none",
			Doc: "The ACL user and its password; a user without a password is an error. `{env.*}` and `{file.*}` are resolved for each new connection: [rotating a password](redis.md#passwords). The admin API shows what is written here, so write a placeholder.",
		},
		{Name: "password", Args: "<secret>", Field: option.Text(&c.Password), Section: sectionConnections, Parts: map[string]string{"password": "The password. Placeholders such as `{env.REDIS_PASSWORD}` and `{file./run/secrets/redis}` are resolved for each new connection; a line end at the end of the file does not count. Write a placeholder, because Caddy's admin API shows this value."}},
		{
			Name: "password_command", Args: "<command> <argument>...", Field: option.Field{Set: c.setPasswordCommand}, Section: sectionConnections, Default: "none",
			Block: new(PasswordCommand).rows(),
			Doc:   "A command that prints the password, for [tokens](redis.md#passwords) that expire. Excludes `password`, and a `url` with a password.",
			Check: func() error {
				if c.PasswordCommand != nil && c.Password != "" {
					return option.Errorf("password_command", "does not go with password: remove one")
				}
				return c.PasswordCommand.validate()
			},
		},
		{
			Name: "sentinel_username", Args: "<name>", Field: option.Text(&c.SentinelUsername), Section: sectionConnections, Default: "none",
			Doc: "The ACL user of the sentinels and its password. Sentinels get neither `username` nor `password`.",
		},
		{Name: "sentinel_password", Args: "<secret>", Field: option.Text(&c.SentinelPassword), Section: sectionConnections, Parts: map[string]string{"sentinel_password": "The password for the sentinels, like `password`, which they do not get."}},
		{
			Name: "db", Args: "<n>", Field: option.Field{Set: c.setDB}, Section: sectionConnections, Default: "0",
			Doc: "The number of the database; most clusters have only 0.",
			Check: func() error {
				if c.DB != nil && *c.DB < 0 {
					return option.Errorf("db", "%d: it must not be negative", *c.DB)
				}
				return nil
			},
		},
		{
			Name: "tls", Field: option.Field{Set: c.setTLS}, Block: new(TLS).rows(), Section: sectionConnections, Default: "off",
			Doc: "Uses TLS, to sentinels too: [TLS](redis.md#tls). Without a block it trusts the authorities of the system.",
			Parts: map[string]string{
				"tls": "Uses TLS, to sentinels too: [TLS](redis.md#tls). `{}` trusts the authorities of the system. Default: none, no TLS.",
			},
			Check: func() error {
				if err := c.TLS.validate(); err != nil {
					return option.In("tls", "tls", err)
				}
				return nil
			},
		},
		{
			Name: "pool_size", Args: "<n>", Field: option.Positive(&c.PoolSize), Values: map[string]option.Schema{"pool_size": {"maximum": maxPoolSize}}, Section: sectionConnections, Default: "4; 64 without pipelining",
			Doc: "Connections to each server for checks and takes, and as many again to each primary for charges, refunds and penalties.",
			Check: func() error {
				if c.PoolSize < 0 || c.PoolSize > maxPoolSize {
					return option.Errorf("pool_size", "%d: it must be from 1 to %d", c.PoolSize, maxPoolSize)
				}
				return nil
			},
		},
		{
			Name: "max_replica_lag", Args: "<duration>", Field: option.Duration(&c.MaxReplicaLag), Section: sectionConnections, Default: "5s",
			Doc:   "How far a replica may be behind its primary to be asked.",
			Check: positive("max_replica_lag", &c.MaxReplicaLag),
		},
	}
}

// rows are the options of the block of password_command.
func (c *PasswordCommand) rows() []option.Row {
	return []option.Row{{
		Name: "lifetime", Args: "<duration>", Field: option.Duration(&c.Lifetime), Values: map[string]option.Schema{"lifetime": {"anyOf": []option.Schema{{"maximum": 0}, {"minimum": minTokenLifetime}}}}, Section: sectionConnections, Default: "10m",
		Doc: "How long a printed password is valid, at least 10s.",
	}}
}

// rows are the options of the block of tls.
func (t *TLS) rows() []option.Row {
	return []option.Row{
		{
			Name: "ca", Args: "<file>", Field: option.Filled(&t.CA), Section: sectionConnections, Default: "the system's",
			Doc: "A file with the certificates of the authorities to trust instead, in PEM. Caddy reads it again when it changes.",
		},
		{
			Name: "cert", JSON: []string{"cert", "key"}, Args: "<file> <key>", Field: option.Field{Set: t.setCert}, Section: sectionConnections, Default: "none",
			Doc: "Files with the client certificate and its key, in PEM, for servers that ask for one. Caddy reads them again when they change.",
			Parts: map[string]string{
				"key": "The file with the private key of `cert`, in PEM.",
			},
		},
		{
			Name: "server_name", Args: "<name>", Field: option.Filled(&t.ServerName), Values: map[string]option.Schema{"server_name": {"pattern": hostPattern}}, Section: sectionConnections, Default: "the host of the address",
			Doc: "The name that the certificates of the servers must have.",
		},
		{
			Name: "insecure_skip_verify", Field: option.Flag(&t.InsecureSkipVerify), Section: sectionConnections, Default: "off",
			Doc: "Accepts any certificate. For tests only.",
		},
	}
}

// positive checks a time span for which 0 means the default.
func positive(name string, value *caddy.Duration) func() error {
	return func() error {
		if *value < 0 {
			return option.Errorf(name, "%s: it must be positive", time.Duration(*value))
		}
		return nil
	}
}

// atLeastOne checks a number for which 0 means the default.
func atLeastOne(name string, value *int) func() error {
	return func() error {
		if *value < 0 {
			return option.Errorf(name, "%d: it must be at least 1", *value)
		}
		return nil
	}
}

// The lines that set more than one text or number.

func (s *Shard) setSentinel(p *option.Parser) error {
	args := p.RemainingArgs()
	if len(args) < 2 {
		return p.Err("write sentinel <master> <addr>..., with the name under which the sentinels watch the primary, and their addresses")
	}
	s.Sentinel = &Sentinel{Master: args[0], Addrs: args[1:]}
	return nil
}

func (s *Shard) setWeight(p *option.Parser) error {
	args := p.RemainingArgs()
	if len(args) != 1 && (len(args) < 3 || args[1] != "was") {
		return p.Err("write weight <now> or, while clients move, weight <now> was <before>")
	}
	for n, arg := range args {
		if n == 1 {
			continue
		}
		weight, err := strconv.Atoi(arg)
		switch {
		case err != nil:
			return p.Errf("weight %q: it must be a whole number", arg)
		case n == 0:
			s.Weight = &weight
		default:
			s.PreviousWeights = append(s.PreviousWeights, weight)
		}
	}
	return nil
}

func (c *Connection) setDB(p *option.Parser) error {
	c.DB = new(int)
	return option.Integer(c.DB).Set(p)
}

func (t *TLS) setCert(p *option.Parser) error {
	if !p.Args(&t.Cert, &t.Key) || p.NextArg() || t.Cert == "" || t.Key == "" {
		return p.Err("write cert <file> <key>, with the file of the certificate and that of its private key")
	}
	return nil
}
