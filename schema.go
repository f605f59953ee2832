package shardlimit

import (
	"maps"
	"reflect"
	"slices"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/memorystore"
	"github.com/shardlimit/caddy-shardlimit/redisstore"
)

// Schema returns the JSON schema of a config of Caddy: of the app rate_limit, and of its
// handlers wherever they are. It accepts all else. The commands, which find the app in Caddy's registry,
// print it.
func (*App) Schema() any {
	anything := option.Schema{"additionalProperties": reference("anything"), "items": reference("anything")}
	defs := option.Schema{
		"app":    appSchema(),
		"store":  storeSchema("memory", "redis"),
		"memory": moduleSchema(reflect.TypeFor[memorystore.Store](), memorystore.Rows(), "module", "memory"),
		"redis":  moduleSchema(reflect.TypeFor[redisstore.Store](), redisstore.Rows(), "module", "redis"),
	}
	for _, name := range slices.Sorted(maps.Keys(handlerSchemas)) {
		defs[name] = handlerSchemas[name]()
		anything = option.Schema{"if": isModule("handler", name), "then": reference(name), "else": anything}
	}
	defs["anything"] = anything
	return option.Schema{
		"$schema": "https://json-schema.org/draft/2020-12/schema",
		"title":   "Config of Caddy with rate_limit",
		"type":    "object",
		"properties": option.Schema{"apps": option.Schema{
			"type":                 "object",
			"properties":           option.Schema{"rate_limit": reference("app")},
			"additionalProperties": reference("anything"),
		}},
		"$defs": defs,
	}
}

// handlerSchemas are the schemas of handlers, by their names in JSON.
var handlerSchemas = map[string]func() option.Schema{"rate_limit": handlerSchema}

// AddHandlerSchema adds the schema of a handler of another package, before [App.Schema] is called. It is in $defs
// under the name.
func AddHandlerSchema(name string, schema func() option.Schema) { handlerSchemas[name] = schema }

// ServiceSchema is that of a service, whose struct has the options of l and more.
func (*Limits) ServiceSchema(t reflect.Type, more ...option.Row) option.Schema {
	l := &Limits{isService: true}
	schema := moduleSchema(t, slices.Concat(more, l.options(nil)), "handler", l.directive())
	fields := schema["properties"].(option.Schema)
	of(fields, "store")["anyOf"] = []option.Schema{{"type": "string"}, reference("store")}
	zone := of(fields, "zones")["items"].(option.Schema)
	zone["required"] = slices.DeleteFunc(zone["required"].([]string), func(name string) bool { return name == "key" })
	delete(fields, "problem")
	return schema
}

func handlerSchema() option.Schema {
	h := new(Handler)
	schema := moduleSchema(reflect.TypeFor[Handler](), slices.Concat(h.options(nil), h.pluginOptions()), "handler", "rate_limit")
	fields := schema["properties"].(option.Schema)
	of(fields, "store")["anyOf"] = []option.Schema{{"type": "string"}, reference("store")}
	named := option.SchemaOf(reflect.TypeFor[NamedZone](), new(Zone).options(httpcaddyfile.Helper{}))
	// Its key has a default, unlike a zone's.
	delete(named, "required")
	named["properties"].(option.Schema)["max_concurrent"] = option.Schema{"enum": []any{0, nil}, "description": option.InsteadInJSON("max_concurrent")}
	of(fields, "rate_limits")["additionalProperties"] = named
	fields["distributed"] = option.Schema{"type": "null", "description": adviceDistributedJSON}
	fields["storage"] = option.Schema{"type": "null", "description": adviceStorageJSON}
	return schema
}

func of(fields option.Schema, name string) option.Schema { return fields[name].(option.Schema) }

func appSchema() option.Schema {
	schema := option.SchemaOf(reflect.TypeFor[App](), nil)
	stores := of(schema["properties"].(option.Schema), "stores")
	stores["description"] = "The stores, by name. Handlers that name none use the one named `default`."
	stores["additionalProperties"] = reference("store")
	return schema
}

// storeSchema is that of a store of any module. Those of guests are not known.
func storeSchema(known ...string) option.Schema {
	var rules []option.Schema
	for _, module := range known {
		rules = append(rules, option.Schema{"if": isModule("module", module), "then": reference(module)})
	}
	return option.Schema{
		"type": "object", "required": []string{"module"}, "properties": option.Schema{"module": option.Schema{"type": "string"}}, "allOf": rules,
	}
}

// moduleSchema is that of a module of Caddy, whose name is in the field key.
func moduleSchema(t reflect.Type, rows []option.Row, key, name string) option.Schema {
	schema := option.SchemaOf(t, rows)
	schema["properties"].(option.Schema)[key] = option.Schema{"const": name}
	return schema
}

func isModule(key, name string) option.Schema {
	return option.Schema{"type": "object", "required": []string{key}, "properties": option.Schema{key: option.Schema{"const": name}}}
}

func reference(name string) option.Schema { return option.Schema{"$ref": "#/$defs/" + name} }

// JSONSchema implements [option.Schemer].
func (Amount) JSONSchema() option.Schema {
	return option.Schema{"type": []string{"integer", "string"}, "minimum": 0}
}

// JSONSchema implements [option.Schemer].
func (Texts) JSONSchema() option.Schema {
	return option.Schema{"type": []string{"string", "array"}, "items": option.Schema{"type": "string"}}
}

// JSONSchema implements [option.Schemer].
func (StatusList) JSONSchema() option.Schema {
	return option.Schema{"type": "array", "items": option.Schema{"type": []string{"integer", "string"}}}
}

// JSONSchema implements [option.Schemer].
func (Batch) JSONSchema() option.Schema {
	return option.Schema{"type": []string{"integer", "string"}, "minimum": 1, "pattern": `^(off|auto|\d+)$`}
}
