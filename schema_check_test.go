//go:build check

package shardlimit_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	_ "github.com/shardlimit/caddy-shardlimit/service" // what cmd/caddy has
)

// TestSchema accepts what loads and refuses slips of names, types and forms.
func TestSchema(t *testing.T) {
	schema := caddytest.CompileSchema(t, new(shardlimit.App).Schema())
	zone := func(fields string) string { return string(configOf("", zoneOf(fields))) }
	for config, accepts := range map[string]bool{
		zone(``): true,
		zone(`"window": 60000000000, "events": "{http.vars.n}", "events_fallback": 5`): true,
		zone(`"key": ["a", "b"], "count_status": [401, "4xx"], "batch": "auto"`):       false,
		zone(`"charge": "before", "batch": "auto"`):                                    true,
		zone(`"@id": "x"`):                     true,
		zone(`"window": "1d12h30m"`):           true,
		zone(`"window": "1 minute"`):           false,
		zone(`"window": "60"`):                 false,
		zone(`"algorithm": "gcra"`):            true,
		zone(`"algorithm": "leaky"`):           false,
		zone(`"events": -1`):                   false,
		zone(`"batch": "on"`):                  false,
		zone(`"status": 402`):                  true,
		zone(`"status": 0`):                    true,
		zone(`"status": 426`):                  false,
		zone(`"status": 500`):                  false,
		zone(`"block_status": 408`):            false,
		zone(`"name": "a b"`):                  false,
		zone(`"warn": 80.5`):                   false,
		zone(`"reserves": [{"percent": "5"}]`): false,
		string(configOf("", handlerOf(`"zones": [{"name": "a", "key": "k"}]`))):                                                                                       false,
		string(configOf("", withZone(`"store": "other"`))):                                                                                                            true,
		string(configOf("", withZone(`"store": {"module": "memory", "max_buckets": 5}`))):                                                                             true,
		string(configOf("", withZone(`"store": {"module": "memory", "max": 5}`))):                                                                                     false,
		string(configOf("", withZone(`"store": {"module": "guest", "max": 5}`))):                                                                                      true,
		string(configOf("", withZone(`"store": {"max_buckets": 5}`))):                                                                                                 false,
		string(configOf("", withZone(`"distributed": null`))):                                                                                                         true,
		string(configOf("", withZone(`"distributed": {}`))):                                                                                                           false,
		string(configOf("", handlerOf(`"rate_limits": {"a": {"max_events": 5, "window": "1m"}}, "jitter": 0.5`))):                                                     true,
		string(configOf("", handlerOf(`"rate_limits": {"a": {"events": 5}}`))):                                                                                        false,
		string(configOf(redisOf(`"db": 1, "password_command": {"command": ["x"], "lifetime": "1m"}`))):                                                                true,
		string(configOf(redisOf(`"dbs": 1`))):                                                                                                                         false,
		string(configOf(shardsOf(`{"name": "a", "sentinel": {"master": "m", "addrs": "x"}}`))):                                                                        false,
		string(configOf(`{"store": {}}`)):                                                                                                                             false,
		`{"apps": {"http": {"servers": {"s": {"routes": [{"handle": [{"handler": "subroute", "routes": [{"handle": [{"handler": "rate_limit", "zone": 1}]}]}]}]}}}}}`: false,
		`{"apps": {"http": {"servers": {"s": {"routes": [{"handle": [{"handler": "other", "zone": 1}]}]}}}}}`:                                                         true,
	} {
		var value any
		must(t, config, json.Unmarshal([]byte(config), &value))
		if err := schema.Validate(value); (err == nil) != accepts {
			t.Errorf("%s: %v, want accepted: %v", config, err, accepts)
		}
	}
}

// mutatedConfig has nearly every option.
const mutatedConfig = `{"apps": {
	"rate_limit": {"stores": {
		"default": {"module": "redis", "shards": [
				{"name": "a", "primary": "127.0.0.1:1", "replicas": ["127.0.0.1:2"], "weight": 1, "previous_weights": [2]},
				{"name": "b", "sentinel": {"master": "m", "addrs": ["127.0.0.1:3"]}},
				{"name": "c", "cluster": ["127.0.0.1:4"], "db": 1, "password_command": {"command": ["true"], "lifetime": "1m"}},
				{"name": "d", "url": "redis://127.0.0.1:5"}],
			"username": "u", "password": "p", "sentinel_username": "s", "sentinel_password": "t", "db": 0, "pool_size": 2, "max_replica_lag": "5s",
			"key_prefix": "rl", "key_secret": "0123456789abcdef0123456789abcdef", "read_from": "primary", "check_timeout": "1s", "charge_timeout": "1s",
			"charge_delay": "10ms", "pipelining": "on", "on_error": "deny", "ledger_trust": "2s", "max_buckets": 1000, "max_new_buckets": 100},
		"only": {"module": "redis", "url": "rediss://127.0.0.1:6", "tls": {"insecure_skip_verify": true, "server_name": "x"}},
		"m": {"module": "memory", "max_buckets": 100, "max_new_buckets": 10}}},
	"http": {"servers": {"s": {"listen": [":8080"], "routes": [{"handle": [{"handler": "rate_limit", "zones": [
			{"name": "z", "key": ["{http.request.header.X-Key}"], "events": 100, "window": "1h", "algorithm": "fixed_window", "align": true, "cost": 1, "charge": "before",
				"batch": "auto", "count_status": [200, "4xx"], "reset_status": ["304"], "warn": 80, "max_wait": "1s", "max_wait_queue": 10, "penalty": "1m", "ipv4_prefix": 24,
				"ipv6_prefix": 64, "on_error": "local", "status": 402, "block_status": 403, "enforce": 50, "match": [{"path": ["/x"]}]},
			{"name": "g", "key": "static", "events": 100, "window": "1h", "algorithm": "gcra", "burst": 5, "count_status_not": ["5xx"], "obey_upstream": true},
			{"name": "r", "key": "static", "events": 100, "window": "1h", "reserves": [{"percent": 10, "match": [{"path": ["/a"]}]}]},
			{"name": "c", "key": "{http.vars.client_ip}", "events": 10, "algorithm": "concurrency"},
			{"name": "d", "key": "{http.vars.client_ip}", "events": "{http.vars.n}", "events_fallback": 5, "calendar": "week", "time_zone": "Europe/Berlin", "week_starts": "sunday",
				"cost": "{http.vars.m}", "cost_fallback": 2}],
		"headers": "both", "jitter": 0.1, "problem": true, "grpc": true, "log_refusals": "all", "log_key": true, "rollout": {"store": "default", "percent": 5}, "store": "m",
		"rate_limits": {"nm": {"key": "{http.request.remote.host}", "window": "1m", "max_events": 5, "match": [{"path": ["/q"]}]}},
		"sweep_interval": "1m", "disable_metrics": true},
		{"handler": "rate_limit_service", "domains": [{"name": "a", "descriptors": [{"key": "ip", "value": "x", "zone": "s", "always": true}, {"key": "b", "descriptors": [{"key": "c", "denied": true}]}]}],
			"zones": [{"name": "s", "events": 100, "window": "1h", "algorithm": "sliding_window", "cost": 1, "charge": "before", "batch": "auto", "warn": 80, "max_wait": "1s", "penalty": "1m",
				"on_error": "local", "enforce": 50}], "store": "m"}]}]}}}}}`

// mutations take the place of a value; "" removes it.
var mutations = []string{
	"", "null", "-1", "0", "1", "1.5", "1.0", "1000.0", `""`, `"5"`, `"x"`, `"1d"`, `"1e3"`, "10000000000", "1e+30", "true", "[]", "{}", `["x"]`, `["5"]`, "[5]", `{"a": 1}`,
	`"off"`, `"60s"`, `"1h30m"`, `"+5s"`, `" 5s "`, `"-1s"`, `"1_000"`, `"٣"`, `"µ"`,
}

// place is where a value is in a config: names and numbers.
type place []any

func (p place) String() string { return strings.Trim(fmt.Sprint([]any(p)), "[]") }

// placesIn returns the places of all values inside of a value, apart from what matchers have.
func placesIn(at place, value any) (all []place) {
	inside := func(step, value any) {
		inner := append(slices.Clip(at), step)
		if all = append(all, inner); step != "match" {
			all = append(all, placesIn(inner, value)...)
		}
	}
	switch v := value.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			inside(name, v[name])
		}
	case []any:
		for i := range v {
			inside(i, v[i])
		}
	}
	return all
}

// mutated returns a value with another one at a place.
func mutated(value any, at place, mutation string) any {
	if len(at) == 0 {
		return json.RawMessage(mutation)
	}
	isRemoved := len(at) == 1 && mutation == ""
	switch v := value.(type) {
	case map[string]any:
		name, changed := at[0].(string), maps.Clone(v)
		if isRemoved {
			delete(changed, name)
		} else {
			changed[name] = mutated(v[name], at[1:], mutation)
		}
		return changed
	case []any:
		i, changed := at[0].(int), slices.Clone(v)
		if isRemoved {
			return slices.Delete(changed, i, i+1)
		}
		changed[i] = mutated(v[i], at[1:], mutation)
		return changed
	}
	panic("no such place")
}

// TestSchemaAgreesWithLoad puts other values in each place of a config: the schema accepts what loads.
func TestSchemaAgreesWithLoad(t *testing.T) {
	schema := caddytest.CompileSchema(t, new(shardlimit.App).Schema())
	var config any
	must(t, "decode", json.Unmarshal([]byte(mutatedConfig), &config))
	must(t, "load", caddytest.Validate([]byte(mutatedConfig)))
	var places []place
	handlers := place{"apps", "http", "servers", "s", "routes", 0, "handle"}
	for _, root := range []place{{"apps", "rate_limit"}, append(slices.Clip(handlers), 0), append(slices.Clip(handlers), 1)} {
		value := config
		for _, step := range root {
			switch v := value.(type) {
			case map[string]any:
				value = v[step.(string)]
			case []any:
				value = v[step.(int)]
			}
		}
		places = append(places, placesIn(root, value)...)
	}
	type mutant struct {
		at       place
		mutation string
	}
	var mutants []mutant
	for _, at := range places {
		for _, mutation := range mutations {
			mutants = append(mutants, mutant{at, mutation})
		}
	}
	for _, m := range sweep.Of(t, mutants, 300) {
		text, err := json.Marshal(mutated(config, m.at, m.mutation))
		must(t, "encode", err)
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		must(t, "decode", err)
		invalid, refused := schema.Validate(value), caddytest.Validate(text)
		if isExcused := isBeyondSchemas(m.at, m.mutation); (invalid == nil) != (refused == nil || isExcused) || isExcused && refused == nil {
			t.Errorf("%v = %s, excused: %v: the schema says %v, and load %v", m.at, m.mutation, isExcused, invalid, refused)
		}
	}
}

// Mutations write names of something else, other texts, and nothing.
var (
	names   = []string{`"5"`, `"x"`, `"1d"`, `"1e3"`, `"off"`, `"60s"`, `"1h30m"`, `"-1s"`, `"1_000"`}
	texts   = append(slices.Clip(names), `"+5s"`, `" 5s "`, `"٣"`, `"µ"`)
	nothing = []string{"", "null"}
)

const (
	handlersIn = "apps http servers s routes 0 handle "
	storesIn   = "apps rate_limit stores"
)

// beyondSchemas has the mutations that a schema cannot judge, and why: it accepts them, and they do not load.
var beyondSchemas = []struct {
	why       string
	mutations []string
	places    []string
}{
	{"handlers may be those of others", mutations, []string{handlersIn + "0 handler", handlersIn + "1 handler"}},
	{"modules may be those of others", append(slices.Clip(texts), `""`), []string{storesIn + " default module", storesIn + " m module", storesIn + " only module"}},
	{"a handler names a store", append(slices.Clip(nothing), "{}"), []string{storesIn}},
	{"a handler names the store", nothing[:1], []string{storesIn + " default", storesIn + " m"}},
	{"the store has to exist", names, []string{handlersIn + "0 store", handlersIn + "1 store"}},
	{"the store has to exist", texts, []string{handlersIn + "0 rollout store"}},
	{"it is then the store of the rollout", nothing, []string{handlersIn + "0 store"}},
	{"texts have no ranges", []string{`"1d"`, `"60s"`, `"1h30m"`, `"+5s"`}, []string{storesIn + " default charge_delay"}},
	{"texts have no ranges", []string{`"+5s"`}, []string{storesIn + " default shards 2 password_command lifetime"}},
	{"shards may have their own", append(slices.Clip(nothing), `""`), []string{storesIn + " default password", storesIn + " default sentinel_password"}},
	{"it is the only shard with sentinels", nothing[:1], []string{storesIn + " default shards 1"}},
	{"it differs from the weight", []string{"1", "1.0"}, []string{storesIn + " default shards 0 previous_weights 0"}},
	{"it is at most the number of events", []string{"1000.0", "10000000000"}, []string{
		handlersIn + "0 zones 0 batch", handlersIn + "0 zones 0 cost", handlersIn + "1 zones 0 batch", handlersIn + "1 zones 0 cost",
	}},
	{"it comes back within a century", []string{"10000000000"}, []string{handlersIn + "0 zones 1 burst"}},
	{"the time zone has to exist", texts, []string{handlersIn + "0 zones 4 time_zone"}},
	{"the zone has to exist", texts, []string{handlersIn + "1 domains 0 descriptors 0 zone"}},
	{"a descriptor names the zone", names, []string{handlersIn + "1 zones 0 name"}},
	{"a descriptor names the zone", nothing[:1], []string{handlersIn + "1 zones 0"}},
	{"a descriptor names a zone, and a zone needs one", append(slices.Clip(nothing), "[]"), []string{handlersIn + "1 zones", handlersIn + "1 domains 0 descriptors"}},
	{"the zone needs a descriptor", nothing[:1], []string{handlersIn + "1 domains 0 descriptors 0"}},
}

func isBeyondSchemas(at place, mutation string) bool {
	for _, excuse := range beyondSchemas {
		if slices.Contains(excuse.places, at.String()) && slices.Contains(excuse.mutations, mutation) {
			return true
		}
	}
	return false
}
