//go:build check

package examples

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// adaptedConfigs are those of all Caddyfiles that are shipped, and of the goldens, which have every option.
func adaptedConfigs(t *testing.T) map[string]any {
	t.Helper()
	texts := shippedConfigs(t)
	goldens, err := filepath.Glob("testdata/*.caddyfiletest")
	must(t, "find the goldens", errors.Join(err, want("there being some", len(goldens) > 0, true)))
	for _, file := range goldens {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		caddyfile, _, _ := strings.Cut(string(text), "\n----------\n")
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
	schema := caddytest.CompileSchema(t, new(shardlimit.App).Schema())
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
	schema := caddytest.CompileSchema(t, new(shardlimit.App).Schema())
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
