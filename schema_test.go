package shardlimit_test

import (
	"encoding/json"
	"reflect"
	"slices"
	"testing"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
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
