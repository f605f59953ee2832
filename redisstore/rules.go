package redisstore

import (
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

var keyPrefix = regexp.MustCompile(`^[A-Za-z0-9_.:-]+$`)

const (
	readReplicas = "replicas"
	readPrimary  = "primary"
	// maxChargeDelay bounds what other Caddys do not see yet.
	maxChargeDelay = time.Second
	turnedOn       = "on"
	turnedOff      = "off"
)

const (
	// hosts matches what may be a host, with a port or not, such as an IPv6 address with a zone.
	hosts = "[^\\s!-,/;-@\\\\^`{-~]+|\\[?[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*%\\S+"
	// addressPattern matches addresses, and placeholders.
	addressPattern = `^(` + hosts + `|unix/.+)$|\{`
	// nodePattern is the same without paths.
	nodePattern = `^(` + hosts + `)$|^[^/]*\{`
	// hostPattern is the same without ports. An IPv6 address may look as if it had one.
	hostPattern = "^$|^([^\\s!-,/:-@\\[-\\^`{-~]+|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%\\S+)?)$|\\{"
	// urlPattern matches a URL, and a placeholder.
	urlPattern = `^$|^rediss?://[^/]|\{`
)

// JSONRules implements [option.Ruled].
func (s *Store) JSONRules() []option.Schema {
	return append(s.jsonRules(),
		option.Any(option.Given("shards"), option.Given("url")),
		option.If(option.Given("url"), option.Not(option.Given("shards"))))
}

// JSONRules implements [option.Ruled].
func (s *Shard) JSONRules() []option.Schema {
	given, kinds := option.Given, []option.Schema{}
	for _, kind := range []string{"primary", "url", "sentinel", "cluster"} {
		kinds = append(kinds, given(kind))
	}
	return append(s.jsonRules(),
		option.Schema{"oneOf": kinds},
		option.If(option.Any(given("sentinel"), given("cluster")), option.Not(given("replicas"))),
		option.If(given("url"), option.Not(given("username"), given("password"), given("password_command"),
			option.Schema{"required": []string{"db"}, "properties": option.Schema{"db": option.Schema{"type": "integer"}}})),
		option.If(option.Any(given("sentinel_username"), given("sentinel_password")), given("sentinel")))
}

func (*Connection) jsonRules() []option.Schema {
	return []option.Schema{option.If(option.Given("password_command"), option.Not(option.Given("password")))}
}

// JSONRules implements [option.Ruled].
func (*Sentinel) JSONRules() []option.Schema {
	return []option.Schema{option.Given("master"), option.Given("addrs"), {"properties": option.Schema{
		"master": option.Schema{"pattern": option.NamePattern() + `|\{`}, "addrs": option.Schema{"items": option.Schema{"pattern": addressPattern}},
	}}}
}

// JSONRules implements [option.Ruled].
func (*PasswordCommand) JSONRules() []option.Schema {
	return []option.Schema{option.Given("command"), {"properties": option.Schema{
		"command": option.Schema{"prefixItems": []option.Schema{{"minLength": 1}}},
	}}}
}

// JSONRules implements [option.Ruled].
func (*TLS) JSONRules() []option.Schema {
	return []option.Schema{
		option.If(option.Given("cert"), option.Given("key")), option.If(option.Given("key"), option.Given("cert")),
		option.If(option.Given("insecure_skip_verify"), option.Not(option.Given("ca"))),
	}
}

// Validate implements [caddy.Validator].
func (s *Store) Validate() error {
	if err := s.validate(); err != nil {
		return fmt.Errorf("redis store: %w", option.InJSON(err))
	}
	return nil
}

// validate returns an error that says what is wrong with the store and how to repair it.
func (s *Store) validate() error {
	if len(s.Shards) == 0 {
		return option.Errorf("it", "has no shard: add one, such as shard a { primary localhost:6379 }").
			Field("shards").JSONf(`is missing: add one, such as {"name": "a", "primary": "localhost:6379"}`)
	}
	return firstError(s.validateShards, s.validateWeights, func() error { return option.Check(s.rows()) }, s.validateConnections)
}

// firstError returns the first error of some rules, which may rely on those before.
func firstError(rules ...func() error) error {
	for _, rule := range rules {
		if err := rule(); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) validateShards() error {
	names, owners := map[string]bool{}, map[string][]*Shard{}
	for i, shard := range s.Shards {
		path := fmt.Sprintf("shards[%d]", i)
		if err := shard.validate(path); err != nil {
			return err
		}
		if names[shard.Name] {
			return option.Errorf("shard "+shard.Name, "is defined twice: give each its own name").
				Field(path).JSONf("has the name of another shard, %s: give each its own", shard.Name)
		}
		names[shard.Name] = true
		for _, given := range shard.addresses() {
			addr := given.complete()
			for _, other := range owners[addr] {
				if err := shard.sharesAddress(addr, other); err != nil {
					return err.Field(path)
				}
			}
			owners[addr] = append(owners[addr], shard)
		}
	}
	return nil
}

// sharesAddress returns an error for two shards with the same address, unless it is
// a sentinel's that watches a primary for each.
func (s *Shard) sharesAddress(addr string, other *Shard) *option.Error {
	switch {
	case s.Sentinel == nil || other.Sentinel == nil:
		return option.Errorf("shard "+s.Name, "has the address %s of shard %s: give each its own servers", addr, other.Name)
	case s.Sentinel.Master == other.Sentinel.Master:
		return option.Errorf("shard "+s.Name, "has the master %s of shard %s, at the same sentinel %s: give each its own", s.Sentinel.Master, other.Name, addr)
	}
	return nil
}

// validateConnections checks the settings that shards inherit from the store against
// their kinds.
func (s *Store) validateConnections() error {
	for _, shard := range s.Shards {
		all := shard.over(s.Connection)
		switch {
		case all.TLS != nil && shard.path() != "":
			return option.Errorf("tls", "does not go with the address %s of shard %s: Redis speaks no TLS on unix sockets, so write tls in the other shards instead", shard.path(), shard.Name)
		case all.TLS != nil && shard.server != nil && !shard.server.isTLS:
			return option.Errorf("tls", "does not go with the url of shard %s, which begins with redis:// : write rediss:// there, or tls in the other shards instead", shard.Name)
		case shard.server != nil && shard.server.password != "":
			// Its user goes with its password.
		case all.Username != "" && all.Password == "" && all.PasswordCommand == nil:
			return shard.badUser("username", shard.Username)
		case shard.Sentinel != nil && all.SentinelUsername != "" && all.SentinelPassword == "":
			return shard.badUser("sentinel_username", shard.SentinelUsername)
		}
	}
	if slices.ContainsFunc(s.Shards, func(shard *Shard) bool { return shard.Sentinel != nil }) {
		return nil
	}
	const unused = "has no effect, as no shard has the option sentinel: remove it"
	switch {
	case s.SentinelUsername != "":
		return option.Errorf("sentinel_username", unused)
	case s.SentinelPassword != "":
		return option.Errorf("sentinel_password", unused)
	}
	return nil
}

// badUser returns the error for a username without a password: no AUTH would be sent.
// own is the shard's own user, if it has one.
func (s *Shard) badUser(which, own string) error {
	const remedy = "needs a password: add it; any will do for a user with nopass"
	if own == "" {
		return option.Errorf(which, remedy)
	}
	return option.Errorf("shard "+s.Name, "has a %s, which %s", which, remedy)
}

// steps is how many steps of a resharding the shards name.
func (s *Store) steps() (n int) {
	for _, shard := range s.Shards {
		n = max(n, len(shard.PreviousWeights))
	}
	return n
}

// validateWeights checks that there are shards that own clients, and that owned them before.
func (s *Store) validateWeights() error {
	first := s.Shards[0]
	if !slices.ContainsFunc(s.Shards, func(shard *Shard) bool { return shard.weight() > 0 }) {
		return option.Errorf("shard "+first.Name, "has weight 0, as all shards have: leave one that owns the clients").Field("shards[0]")
	}
	for step := range s.steps() {
		if !slices.ContainsFunc(s.Shards, func(shard *Shard) bool { return shard.weightBefore(step) > 0 }) {
			return option.Errorf("shard "+first.Name, "has a weight that was 0, as all shards have: remove was 0, because no shard is left from before").
				Field("shards[0].previous_weights").JSONf("0, as all shards have: remove it, because no shard is left from before")
		}
	}
	return nil
}

// Interface guard.
var _ caddy.Validator = (*Store)(nil)
