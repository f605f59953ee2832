package shardlimit_test

import (
	"encoding/json"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
)

// compiledSchema is the schema as an editor reads it, which also checks that it is one.
func compiledSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	text, err := json.Marshal(shardlimit.Schema())
	must(t, "encode", err)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(string(text)))
	must(t, "decode", err)
	compiler := jsonschema.NewCompiler()
	must(t, "add", compiler.AddResource("schema.json", value))
	schema, err := compiler.Compile("schema.json")
	must(t, "compile", err)
	return schema
}

// adaptedConfigs are those of all Caddyfiles that are shipped, and of the goldens, which have every option.
func adaptedConfigs(t *testing.T) map[string]any {
	t.Helper()
	texts := shippedConfigs(t)
	for _, file := range shardlimit.Glob(t, "testdata/*.caddyfiletest") {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		caddyfile, _, _ := strings.Cut(string(text), goldenLine)
		texts[file] = caddyfile + "\n"
	}
	configs := map[string]any{}
	for file, text := range texts {
		adapted, err := adapt(text)
		must(t, file, err)
		var config any
		must(t, file, json.Unmarshal(adapted, &config))
		configs[file] = config
	}
	return configs
}

// ours calls visit for each object of a config that the schema describes: handlers, stores, and what is
// inside of them except matchers, which are Caddy's.
func ours(value any, isOurs bool, visit func(object map[string]any)) {
	switch v := value.(type) {
	case []any:
		for _, item := range v {
			ours(item, isOurs, visit)
		}
	case map[string]any:
		isOurs = isOurs || v["handler"] == "rate_limit" || v["module"] == "redis" || v["module"] == "memory"
		if isOurs {
			visit(v)
		}
		for name, item := range v {
			if name != "match" {
				ours(item, isOurs, visit)
			}
		}
	}
}

func TestSchemaAcceptsShippedConfigs(t *testing.T) {
	schema := compiledSchema(t)
	objects := 0
	for file, config := range adaptedConfigs(t) {
		if err := schema.Validate(config); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		ours(config, false, func(map[string]any) { objects++ })
	}
	if objects < 150 {
		t.Errorf("only %d objects are checked", objects)
	}
}

// TestSchemaRefusesMutations: a field more, or one of another type.
func TestSchemaRefusesMutations(t *testing.T) {
	schema := compiledSchema(t)
	for file, config := range adaptedConfigs(t) {
		ours(config, false, func(object map[string]any) {
			refused := func(what string) {
				if schema.Validate(config) == nil {
					text, _ := json.Marshal(object)
					t.Errorf("%s: accepted with %s: %s", file, what, text)
				}
			}
			object["no_such_field"] = 1
			refused("an unknown field")
			delete(object, "no_such_field")
			for name, value := range maps.Clone(object) {
				if name == "handler" || name == "module" {
					continue // then it is another module's
				}
				object[name] = any(true)
				if _, isBool := value.(bool); isBool {
					object[name] = "yes"
				}
				refused(name + " of another type")
				object[name] = value
			}
		})
	}
}

func TestSchema(t *testing.T) {
	schema := compiledSchema(t)
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
	text, err := json.Marshal(shardlimit.Schema())
	must(t, "encode", err)
	var value map[string]any
	must(t, "decode", json.Unmarshal(text, &value))
	walk("", value)
	if described < 80 {
		t.Errorf("only %d fields are described", described)
	}
	again, err := json.Marshal(shardlimit.Schema())
	must(t, "encode again", err)
	if !reflect.DeepEqual(text, again) {
		t.Error("two schemas differ")
	}
}
