package shardlimit_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"testing"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestSchemaDescribesFields: fields come from the structs, and what is said of them from the table of options.
func TestSchemaDescribesFields(t *testing.T) {
	// What a line does not name, the plugin's fields, and the matchers of a part.
	undescribed := []string{
		"handler", "module", "rate_limits", "sweep_interval", "disable_metrics", "max_events", "store", "percent", "match", "master", "addrs", "command",
	}
	var described int
	var walk func(path string, value any)
	walk = func(path string, value any) {
		object, isObject := value.(map[string]any)
		if !isObject {
			return
		}
		fields, _ := object["properties"].(map[string]any)
		for name, field := range fields {
			if object["additionalProperties"] != false {
				continue // that only names a module
			}
			if description, _ := field.(map[string]any)["description"].(string); description != "" {
				described++
			} else if !slices.Contains(undescribed, name) {
				t.Errorf("%s.%s has no description: name it in JSON of the row of its option", path, name)
			}
		}
		for name, inner := range object {
			walk(path+"."+name, inner)
		}
	}
	text, err := json.Marshal(new(shardlimit.App).Schema())
	must(t, "encode", err)
	var value map[string]any
	must(t, "decode", json.Unmarshal(text, &value))
	walk("", value)
	if described < 80 {
		t.Errorf("only %d fields are described", described)
	}
	again, err := json.Marshal(new(shardlimit.App).Schema())
	must(t, "encode again", err)
	if !reflect.DeepEqual(text, again) {
		t.Error("two schemas differ")
	}
}

// TestSchemaHasRules: a config of each rule fits the schema as it loads, and so does one that breaks it.
func TestSchemaHasRules(t *testing.T) {
	schema := caddytest.CompileSchema(t, new(shardlimit.App).Schema())
	zone := func(fields string) []byte { return configOf("", zoneOf(fields)) }
	shard := func(fields string) []byte { return configOf(shardsOf(`{"name": "a", ` + fields + `}`)) }
	for _, pair := range []struct {
		fits, breaks []byte
	}{
		{zone(`"window": "1h"`), zone(`"window": ""`)},
		{zone(`"calendar": "day", "window": null, "time_zone": "UTC"`), zone(`"time_zone": "UTC"`)},
		{zone(`"count_status": ["2xx"]`), zone(`"count_status": ["2xx"], "count_status_not": ["4xx"]`)},
		{zone(`"events": "{http.vars.n}", "events_fallback": 5`), zone(`"events": "{http.vars.n}"`)},
		{zone(`"algorithm": "gcra", "burst": 5`), zone(`"burst": 5`)},
		{zone(`"algorithm": "concurrency"`), zone(`"algorithm": "concurrency", "charge": "after"`)},
		{zone(`"charge": "before", "batch": "auto"`), zone(`"batch": "auto"`)},
		{zone(`"enforce": 100`), zone(`"enforce": 101`)},
		{zone(`"window": "1d12h"`), zone(`"window": "-1s"`)},
		{configOf(shardsOf(`{"name": "a", "primary": "[fe80::1%eth0]:6379"}`)), configOf(shardsOf(`{"name": "a", "primary": "a%b"}`))},
		{shard(`"primary": "unix//run/redis.sock"`), shard(`"primary": "a", "cluster": ["b"]`)},
		{shard(`"cluster": ["a:1", "b"]`), shard(`"cluster": ["unix//run/redis.sock"]`)},
		{shard(`"sentinel": {"master": "m", "addrs": ["a"]}`), shard(`"sentinel": {"master": "m"}`)},
		{configOf(redisOf(`"tls": {"server_name": "::1%eth0"}`)), configOf(redisOf(`"tls": {"server_name": "a:1"}`))},
		{configOf(redisOf(`"password": "p"`)), configOf(redisOf(`"password": "p", "password_command": {"command": ["true"]}`))},
		{configOf(redisOf(`"charge_delay": "0s"`)), configOf(redisOf(`"charge_delay": 2000000000`))},
	} {
		for _, config := range [][]byte{pair.fits, pair.breaks} {
			var value any
			must(t, string(config), json.Unmarshal(config, &value))
			fits := bytes.Equal(config, pair.fits)
			if invalid, refused := schema.Validate(value), caddytest.Validate(config); (invalid == nil) != fits || (refused == nil) != fits {
				t.Errorf("%s, fits: %v: the schema says %v, and load %v", config, fits, invalid, refused)
			}
		}
	}
}
