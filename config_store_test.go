package shardlimit_test

import (
	"strings"
	"testing"
)

func TestConfigOfAHandlersStore(t *testing.T) {
	const two = `{"stores": {"eu": {"module": "memory"}, "us": {"module": "memory"}}}`
	for name, test := range map[string]struct{ app, handler, want string }{
		"none":                   {handler: withZone(`"log_key": true`)},
		"null":                   {handler: withZone(`"store": null`)},
		"name":                   {app: two, handler: withZone(`"store": "us"`)},
		"default by name":        {handler: withZone(`"store": "default"`)},
		"inline memory":          {handler: withZone(`"store": {"module": "memory", "max_keys": 10}`)},
		"inline redis":           {handler: withZone(`"store": {"module": "redis", "shards": [{"name": "a", "primary": "localhost"}]}`)},
		"inline and invalid":     {``, withZone(`"store": {"module": "redis"}`), `redis store: it has no shard: add one`},
		"inline unknown field":   {``, withZone(`"store": {"module": "memory", "max": 1}`), `unknown field "max"`},
		"inline unknown module":  {``, withZone(`"store": {"module": "postgres"}`), `rate_limit.stores.postgres`},
		"inline without module":  {``, withZone(`"store": {}`), `module`},
		"unknown name":           {two, withZone(`"store": "asia"`), `store asia is not configured: add it to the stores of the global rate_limit, or name another; there is eu, us`},
		"unknown name, no app":   {``, withZone(`"store": "asia"`), `store asia is not configured: add it to the stores of the global rate_limit, or name another; there is default`},
		"no default":             {two, withZone(`"log_key": true`), `store is missing, and no configured store is called default: name one with the option store; there is eu, us`},
		"empty name":             {``, withZone(`"store": ""`), `store "": it must be the name of a store, or an object with the field module`},
		"number":                 {``, withZone(`"store": 5`), `store 5: it must be the name of a store, or an object with the field module`},
		"list":                   {``, withZone(`"store": ["default"]`), `it must be the name of a store, or an object with the field module`},
		"app's unknown field":    {`{"store": {}}`, withZone(`"log_key": true`), `unknown field "store"`},
		"app's unknown module":   {`{"stores": {"a": {"module": "postgres"}}}`, withZone(`"store": "a"`), `rate_limit.stores.postgres`},
		"app without a store":    {app: `{}`, handler: withZone(`"log_key": true`)},
		"app with an empty list": {app: `{"stores": {}}`, handler: withZone(`"log_key": true`)},
		"guest":                  {app: `{"stores": {"default": {"module": "guest", "motto": "hi"}}}`, handler: withZone(`"log_key": true`)},
		"guest inline":           {handler: withZone(`"store": {"module": "guest"}`)},
		"guest's unknown field":  {`{"stores": {"default": {"module": "guest", "moto": "hi"}}}`, withZone(`"log_key": true`), `unknown field "moto"`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(test.app, test.handler), test.want) })
	}
}

func TestConfigOfStores(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_HOST", "redis-a")
	t.Setenv("SHARDLIMIT_TEST_URL", "redis://redis-a")
	for name, test := range map[string]struct{ app, want string }{
		"max_keys negative":       {`{"stores": {"default": {"module": "memory", "max_keys": -1}}}`, `max_keys -1: it must be at least 1`},
		"redis":                   {app: redisOf(`"db": 1`)},
		"redis unknown field":     {redisOf(`"dbs": 1`), `unknown field "dbs"`},
		"db negative":             {redisOf(`"db": -1`), `redis store: db -1: it must not be negative`},
		"pool_size negative":      {redisOf(`"pool_size": -1`), `redis store: pool_size -1: it must be from 1 to 1000`},
		"check_timeout negative":  {redisOf(`"check_timeout": "-1s"`), `redis store: check_timeout -1s: it must be positive`},
		"charge_timeout negative": {redisOf(`"charge_timeout": -1`), `redis store: charge_timeout -1ns: it must be positive`},
		"dial_timeout negative":   {redisOf(`"dial_timeout": "-1ms"`), `redis store: dial_timeout -1ms: it must be positive`},
		"ledger":                  {app: redisOf(`"ledger_trust": "2s", "ledger_max_buckets": 1`)},
		"ledger by default":       {app: redisOf(`"ledger_trust": 0, "ledger_max_buckets": 0`)},
		"ledger_trust negative":   {redisOf(`"ledger_trust": "-1s"`), `redis store: ledger_trust -1s: it must be positive`},
		"ledger_max_buckets":      {redisOf(`"ledger_max_buckets": -1`), `redis store: ledger_max_buckets -1: it must be at least 1`},
		"key_prefix characters":   {redisOf(`"key_prefix": "a{b}"`), `redis store: key_prefix "a{b}": use only letters, digits and the characters _ . : -`},
		"read_from unknown":       {redisOf(`"read_from": "all"`), `redis store: read_from "all": it must be replicas or primary`},
		"clock unknown":           {redisOf(`"clock": "sun"`), `redis store: clock "sun": it must be redis or local`},
		"pipelining unknown":      {redisOf(`"pipelining": "auto"`), `redis store: pipelining "auto": it must be on or off`},
		"on_error unknown":        {redisOf(`"on_error": "retry"`), `redis store: on_error "retry": it must be allow, deny or local`},
		"no shards":               {shardsOf(``), `redis store: it has no shard: add one`},
		"shard null":              {shardsOf(`null`), `redis store: a shard is null: define or remove it`},
		"shard without a name":    {shardsOf(`{"primary": "redis-a"}`), `redis store: a shard has no name: give it one`},
		"shard with a bad name":   {shardsOf(`{"name": "a/b", "primary": "redis-a"}`), `redis store: shard name "a/b": use only letters`},
		"shard without a primary": {shardsOf(`{"name": "a", "replicas": ["redis-a1"]}`), `redis store: shard a has no primary: add sentinel <master> <addr>`},
		"shard's unknown field":   {shardsOf(`{"name": "a", "primary": "redis-a", "replica": "redis-b"}`), `unknown field "replica"`},
		"weight negative":         {shardsOf(`{"name": "a", "primary": "redis-a", "weight": -1}`), `redis store: shard a: weight -1: it must be from 1 to 1000`},
		"weight too large":        {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 1001}`), `redis store: shard a: weight 1001: it must be from 1 to 1000`},
		"weight fraction":         {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 1.5}`), `weight`},
		"replica empty":           {shardsOf(`{"name": "a", "primary": "redis-a", "replicas": [""]}`), `redis store: shard a: address "": it must be host, host:port or unix/path`},
		"shards of one name":      {shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "a", "primary": "redis-b"}`), `redis store: shard a is defined twice: give each its own name`},
		"shards of one primary":   {shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "b", "primary": "redis-a:6379"}`), `redis store: shard b has the address redis-a:6379 of shard a: give each its own servers`},

		"address resolves":                   {app: shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_HOST}:7000"}`)},
		"address resolves to an invalid one": {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_URL}"}`), `redis store: shard a: address "redis://redis-a": it must be host, host:port or unix/path`},
		"addresses resolve to one":           {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_HOST}"}, {"name": "b", "primary": "redis-a"}`), `redis store: shard b has the address redis-a:6379 of shard a`},
		"address does not resolve":           {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_UNSET}"}`), `redis store: shard a: address: evaluated placeholder {env.SHARDLIMIT_TEST_UNSET} is empty: set it, or write \{`},
		"username does not resolve":          {redisOf(`"username": "{env.SHARDLIMIT_TEST_UNSET}"`), `redis store: username: placeholder {env.SHARDLIMIT_TEST_UNSET} is empty: set it`},
		"password does not resolve":          {redisOf(`"password": "{file.no-such-file}"`), `redis store: password: placeholder {file.no-such-file} is empty: set it, or see that Caddy can read the file`},
		"key_secret is unknown":              {redisOf(`"key_secret": "{nobody.knows}"`), `redis store: key_secret: it has a placeholder that is not known: write {env.*} or {file.*}, or \{`},
		"password with a brace":              {app: redisOf(`"password": "a\\{b}"`)},
	} {
		t.Run(name, func(t *testing.T) {
			loads(t, configOf(test.app, withZone(`"log_key": true`)), test.want)
		})
	}
}

func TestGuestStoreInACaddyfile(t *testing.T) {
	config, err := adapt(`
{
	rate_limit {
		store visitor guest {
			motto welcome
		}
	}
}
:8080 {
	rate_limit {client_ip} 100 1m {
		store visitor
	}
}
`)
	if err != nil {
		t.Fatal(err)
	}
	if want := `"motto": "welcome"`; !strings.Contains(string(config), want) {
		t.Errorf("adapts to %s, want %s in it", config, want)
	}
	opened := guests.opened.Load()
	loads(t, config, "")
	if n := guests.opened.Load() - opened; n != 1 {
		t.Errorf("the store was opened %d times, want once", n)
	}
	if n := guests.open.Load(); n != 0 {
		t.Errorf("%d stores are still open", n)
	}
}

func TestGuestStoreWithAnUnknownOptionNamesTheLine(t *testing.T) {
	_, err := adapt("{\n\trate_limit {\n\t\tstore guest {\n\t\t\tmoto\n\t\t}\n\t}\n}\n")
	if err == nil || !strings.Contains(err.Error(), "Caddyfile:4") {
		t.Errorf("adapt returns %v, want an error at Caddyfile:4", err)
	}
}
