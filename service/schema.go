package service

import (
	"reflect"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// schema is that of the handler in JSON.
func schema() option.Schema {
	s := new(Service)
	of := s.ServiceSchema(reflect.TypeFor[Service](), s.rows(places{})...)
	text := func(words string) option.Schema {
		return option.Schema{"type": []string{"string", "null"}, "description": words}
	}
	flag := func(words string) option.Schema {
		return option.Schema{"type": []string{"boolean", "null"}, "description": words}
	}
	given := option.Given
	of["allOf"] = []option.Schema{given("domains")}
	domain := of["properties"].(option.Schema)["domains"].(option.Schema)["items"].(option.Schema)
	// Unlike other names, it may be any text.
	delete(domain["properties"].(option.Schema)["name"].(option.Schema), "pattern")
	domain["allOf"] = []option.Schema{given("name")}
	of["$defs"] = option.Schema{"descriptor": option.Schema{
		"type": "object", "required": []string{"key"}, "additionalProperties": false,
		"allOf": []option.Schema{given("key"), option.Any(given("zone"), given("zones"), given("unlimited"), given("denied"), given("descriptors"))},
		"properties": option.Schema{
			"key":         text("The key of the entry."),
			"value":       text("The value of the entry, or what it begins with, before *. Default: any other."),
			"zone":        text("The zone that limits descriptors that end with this entry."),
			"zones":       option.Schema{"type": []string{"array", "null"}, "items": option.Schema{"type": "string"}, "description": "Several zones in place of zone, into all of which they have to fit."},
			"always":      flag("Whether the zone charges what does not fit, and refuses nothing: reports of what was used."),
			"postpaid":    flag("Whether the zone refuses them if nothing was left before, and charges their hits whole."),
			"unlimited":   flag("Whether descriptors that end with this entry have no limit."),
			"denied":      flag("Whether descriptors that end with this entry are always refused."),
			"descriptors": option.Schema{"type": "array", "items": Descriptor{}.JSONSchema(), "description": "The entries that may follow this one."},
		},
	}}
	return of
}

// JSONSchema implements [option.Schemer].
func (Descriptor) JSONSchema() option.Schema {
	return option.Schema{"$ref": "#/$defs/" + directive + "/$defs/descriptor"}
}
