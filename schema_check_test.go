//go:build check

package shardlimit_test

import (
	"encoding/json"
	"testing"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestSchema accepts what loads and refuses slips of names, types and forms.
func TestSchema(t *testing.T) {
	schema := caddytest.CompileSchema(t, new(shardlimit.App).Schema())
	zone := func(fields string) string { return string(configOf("", zoneOf(fields))) }
	for config, accepts := range map[string]bool{
		zone(``): true,
		zone(`"window": 60000000000, "events": "{http.vars.n}", "events_fallback": 5`): true,
		zone(`"key": ["a", "b"], "count_status": [401, "4xx"], "batch": "auto"`):       true,
		zone(`"@id": "x"`):                     true,
		zone(`"window": "1d12h30m"`):           true,
		zone(`"window": "1 minute"`):           false,
		zone(`"window": "60"`):                 false,
		zone(`"algorithm": "gcra"`):            true,
		zone(`"algorithm": "leaky"`):           false,
		zone(`"events": -1`):                   false,
		zone(`"batch": "on"`):                  false,
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
