package shardlimit

import (
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/memorystore"
	"github.com/shardlimit/caddy-shardlimit/redisstore"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
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
	zone := of(fields, "zones")["items"].(option.Schema)
	given, is := option.Given, option.Is
	zone.SetRules(append(slices.Clip(zoneRules),
		option.Not(is("algorithm", store.Concurrency.String()), is("charge", limiter.ChargeAfter), given("count_status"), given("count_status_not"),
			given("reset_status"), given("obey_upstream"), given("status")),
		option.If(option.Any(given("ipv4_prefix"), given("ipv6_prefix")), given("key"))))
	zone["required"] = slices.DeleteFunc(zone["required"].([]string), func(name string) bool { return name == "key" })
	delete(fields, "problem")
	delete(fields, "grpc")
	delete(fields, "ignore")
	return schema
}

func handlerSchema() option.Schema {
	h := new(Handler)
	schema := moduleSchema(reflect.TypeFor[Handler](), slices.Concat(h.options(nil), h.pluginOptions()), "handler", "rate_limit")
	fields := schema["properties"].(option.Schema)
	named := option.SchemaOf(reflect.TypeFor[NamedZone](), new(Zone).options(httpcaddyfile.Helper{}))
	// Its key has a default, unlike a zone's.
	delete(named, "required")
	key := of(named["properties"].(option.Schema), "key")
	delete(key, "minLength")
	delete(key, "minItems")
	maps.Copy(key, Texts{}.JSONSchema())
	named["properties"].(option.Schema)["max_concurrent"] = option.Schema{"enum": []any{0, nil}, "description": option.InsteadInJSON("max_concurrent")}
	of(fields, "rate_limits")["additionalProperties"] = named
	of(fields, "rate_limits")["propertyNames"] = option.Schema{"pattern": option.NamePattern()}
	// It has no effect, whatever it is.
	interval := of(fields, "sweep_interval")
	interval["pattern"], interval["minimum"] = strings.Replace(interval["pattern"].(string), `\+?`, `[+-]?`, 1), math.MinInt64
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
	stores["propertyNames"] = option.Schema{"pattern": option.NamePattern()}
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

const (
	// dynamic matches amounts that depend on the request.
	dynamic = `\{[^{}]+\}`
	// positiveAmount matches amounts from 1 on.
	positiveAmount = `^\+?0*[1-9][0-9]{0,15}$|` + dynamic
)

// JSONSchema implements [option.Schemer].
func (Amount) JSONSchema() option.Schema {
	return option.Schema{"type": []string{"integer", "string"}, "minimum": 0, "maximum": store.MaxEvents, "pattern": `^$|^\+?[0-9]{1,16}$|` + dynamic}
}

// JSONSchema implements [option.Schemer].
func (Texts) JSONSchema() option.Schema {
	return option.Schema{"type": []string{"string", "array", "null"}, "items": option.Schema{"type": "string"}}
}

// JSONSchema implements [option.Schemer].
func (StatusList) JSONSchema() option.Schema {
	return option.Schema{"type": []string{"array", "null"}, "minItems": 1, "items": option.Schema{
		"type": []string{"integer", "string"}, "minimum": 200, "maximum": 599, "pattern": `^([2-5]xx|[2-5][0-9][0-9]|grpc:([0-9]|1[0-6]))$`,
	}}
}

// JSONSchema implements [option.Schemer].
func (Batch) JSONSchema() option.Schema {
	return option.Schema{"type": []string{"integer", "string"}, "minimum": 1, "maximum": store.MaxInteger, "pattern": `^(off|auto||\+?0*[1-9][0-9]{0,15})$`}
}

func calendarUnits() []any {
	return []any{"", string(store.Day), string(store.Week), string(store.Month), string(store.Year), nil}
}

// fallback are the rules of an amount and of what counts where its placeholder yields none.
func fallback(amount string) []option.Schema {
	given := option.Given(amount + "_fallback")
	return []option.Schema{option.If(isDynamic(amount), given), option.If(given, isDynamic(amount))}
}

// isDynamic holds where an amount depends on the request.
func isDynamic(amount string) option.Schema {
	return option.Schema{"required": []string{amount}, "properties": option.Schema{amount: option.Schema{"type": "string", "pattern": dynamic}}}
}

// batches holds for a zone with batches.
var batches = option.Schema{"required": []string{"batch"}, "properties": option.Schema{"batch": option.Not(option.Schema{"enum": []any{"off", ""}})}}

// zoneRules are the rules about several fields of a zone.
var zoneRules = func() []option.Schema {
	given, is := option.Given, option.Is
	calendar := given("calendar")
	rules := []option.Schema{
		option.If(calendar, option.Not(given("window"), given("align"))),
		option.If(given("time_zone"), calendar),
		option.If(given("week_starts"), is("calendar", string(store.Week))),
		option.If(given("count_status"), option.Not(given("count_status_not"))),
		option.If(given("max_wait_queue"), given("max_wait")),
		option.If(given("reserves"), option.Not(given("penalty"), batches)),
		option.If(option.Schema{"required": []string{"cost_fallback"}, "properties": option.Schema{"cost_fallback": option.Schema{"type": "integer"}}}, isDynamic("cost")),
	}
	rules = append(append(rules, fallback("events")...), fallback("burst")...)
	for a := range store.Algorithms {
		traits, without, isIt := algorithm.Of(a), []option.Schema{}, is("algorithm", a.String())
		if a == store.FixedWindow {
			isIt = option.Any(isIt, option.Not(given("algorithm")))
		}
		if !a.HasBurst() {
			without = append(without, given("burst"))
		}
		if !traits.Windowed() {
			without = append(without, calendar, given("align"))
		}
		if !traits.Penalties {
			without = append(without, given("penalty"), given("obey_upstream"))
		}
		if traits.Unbatched != "" {
			without = append(without, batches)
		}
		if traits.Lease {
			without = append(without, is("charge", limiter.ChargeAfter), given("count_status"), given("count_status_not"), given("reset_status"), given("warn"), given("max_wait"))
		} else {
			rules = append(rules, option.If(isIt, option.Any(calendar, given("window"))))
		}
		then := option.Schema{"properties": option.Schema{"events": option.Schema{"maximum": traits.MostEvents}}}
		if len(without) > 0 {
			then = option.Schema{"allOf": []option.Schema{then, option.Not(without...)}}
		}
		rules = append(rules, option.If(isIt, then))
	}
	return rules
}()

// JSONRules implements [option.Ruled]. A zone of a service has fewer.
func (*Zone) JSONRules() []option.Schema {
	return append(slices.Clip(zoneRules), option.If(batches, option.Is("charge", limiter.ChargeBefore)))
}

// JSONRules implements [option.Ruled].
func (*NamedZone) JSONRules() []option.Schema {
	return []option.Schema{option.Given("window"), option.Given("max_events"), {"properties": option.Schema{"max_events": option.Schema{"maximum": store.MaxEvents}}}}
}

// JSONRules implements [option.Ruled].
func (*Handler) JSONRules() []option.Schema {
	return []option.Schema{option.Any(option.Given("zones"), option.Given("rate_limits"))}
}

// JSONRules implements [option.Ruled].
func (*Rollout) JSONRules() []option.Schema {
	return []option.Schema{option.Given("store"), {"properties": option.Schema{"percent": option.Schema{"minimum": 0, "maximum": 100}}}}
}

// JSONRules implements [option.Ruled].
func (*Reserve) JSONRules() []option.Schema {
	return []option.Schema{option.Given("percent"), option.Given("match"), {"properties": option.Schema{"percent": option.Schema{"maximum": 100}}}}
}
