package shardlimit_test

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
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
	text, err := json.Marshal(new(shardlimit.App).Schema())
	must(t, "encode", err)
	var root schemaNode
	must(t, "decode", json.Unmarshal(text, &root))
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
			want := bytes.Equal(config, pair.fits)
			if valid, refused := root.admits(root, value), caddytest.Validate(config); valid != want || (refused == nil) != want {
				t.Errorf("%s, should load: %v: the schema says %v, and load %v", config, want, valid, refused)
			}
		}
	}
}

// schemaNode is a decoded part of a schema. Tests with the tag check use a complete validator, which is another module.
type schemaNode map[string]any

// admits reports whether a value fits the part of the schema root. It knows the keywords that the product uses.
func (s schemaNode) admits(root schemaNode, value any) bool {
	for keyword := range s {
		if !s.admitsBy(root, keyword, value) {
			return false
		}
	}
	return true
}

func (s schemaNode) admitsBy(root schemaNode, keyword string, value any) bool {
	fits := func(schema, value any) bool { return schemaNode(schema.(map[string]any)).admits(root, value) }
	of := s[keyword]
	count := func() (n int) {
		for _, schema := range of.([]any) {
			if fits(schema, value) {
				n++
			}
		}
		return n
	}
	switch keyword {
	case "$ref":
		return fits(root["$defs"].(map[string]any)[strings.TrimPrefix(of.(string), "#/$defs/")], value)
	case "const":
		return reflect.DeepEqual(value, of)
	case "enum":
		return slices.ContainsFunc(of.([]any), func(word any) bool { return reflect.DeepEqual(value, word) })
	case "type":
		types, isList := of.([]any)
		if !isList {
			types = []any{of}
		}
		return slices.ContainsFunc(types, func(name any) bool { return isOfType(value, name.(string)) })
	case "allOf":
		return count() == len(of.([]any))
	case "anyOf":
		return count() > 0
	case "oneOf":
		return count() == 1
	case "not":
		return !fits(of, value)
	case "if":
		then := s["then"]
		if !fits(of, value) {
			then = s["else"]
		}
		return then == nil || fits(then, value)
	}
	switch v := value.(type) {
	case string:
		return keyword != "pattern" || regexp.MustCompile(of.(string)).MatchString(v)
	case float64:
		return (keyword != "minimum" || v >= of.(float64)) && (keyword != "maximum" || v <= of.(float64))
	case []any:
		return keyword != "items" || !slices.ContainsFunc(v, func(item any) bool { return !fits(of, item) })
	case map[string]any:
		return s.admitsObject(root, keyword, v)
	}
	return true
}

func (s schemaNode) admitsObject(root schemaNode, keyword string, object map[string]any) bool {
	if keyword == "required" {
		return !slices.ContainsFunc(s[keyword].([]any), func(name any) bool { _, has := object[name.(string)]; return !has })
	}
	properties, _ := s["properties"].(map[string]any)
	for name, value := range object {
		schema, isKnown := properties[name]
		switch others, isSchema := s["additionalProperties"].(map[string]any); {
		case keyword == "properties" && isKnown, keyword == "additionalProperties" && !isKnown && isSchema:
			if !isKnown {
				schema = others
			}
			if !schemaNode(schema.(map[string]any)).admits(root, value) {
				return false
			}
		case keyword == "additionalProperties" && !isKnown:
			return false
		}
	}
	return true
}

func isOfType(value any, name string) bool {
	switch v := value.(type) {
	case nil:
		return name == "null"
	case bool:
		return name == "boolean"
	case string:
		return name == "string"
	case float64:
		return name == "number" || name == "integer" && v == math.Trunc(v)
	case []any:
		return name == "array"
	default:
		return name == "object"
	}
}
