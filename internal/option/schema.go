package option

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// Schema is a JSON schema, of draft 2020-12.
type Schema map[string]any

// Schemer is a type that knows the schema of its values, because it decodes them itself.
type Schemer interface{ JSONSchema() Schema }

// Ruled is a struct with rules about several of its fields together.
type Ruled interface{ JSONRules() []Schema }

// null is the type of null. The decoder treats null as a field that is not given.
const null = "null"

// Given holds where a field has another value than the zero one of its type.
func Given(field string) Schema {
	return Schema{"required": []string{field}, "properties": Schema{field: Schema{"not": Schema{"enum": []any{nil, "", 0, false, []any{}, Schema{}}}}}}
}

// Is holds where a field has one of some values.
func Is(field string, values ...any) Schema {
	return Schema{"required": []string{field}, "properties": Schema{field: Schema{"enum": values}}}
}

// Not holds where none of the schemas does.
func Not(schemas ...Schema) Schema { return Schema{"not": Any(schemas...)} }

// Any holds where one of the schemas does.
func Any(schemas ...Schema) Schema { return Schema{"anyOf": schemas} }

// If holds where the second schema does, or the first does not.
func If(a, b Schema) Schema { return Schema{"if": a, "then": b} }

// NamePattern matches the names of zones, stores and shards.
func NamePattern() string { return name.String() }

// SchemaOf returns the schema of a struct: its fields by their types, and what the rows say of them.
func SchemaOf(t reflect.Type, rows []Row) Schema {
	properties, required := Schema{}, []string{}
	for _, field := range JSONFields(t) {
		name := JSONName(field)
		row, description := rowOf(rows, name)
		schema := schemaOf(field.Type, row, rows)
		if description != "" {
			schema["description"] = description
		}
		isRequired := row.Default == "required" && row.Block == nil && name == row.Fields()[0]
		if isRequired {
			required = append(required, name)
		}
		schema.allowNull(!isRequired, field.Type)
		maps.Copy(schema, row.Values[name])
		properties[name] = schema
	}
	schema := Schema{
		"type": "object", "properties": properties, "required": required, "additionalProperties": false,
		// Caddy's IDs of objects, such as @id.
		"patternProperties": Schema{"^@": Schema{}},
	}
	if ruled, is := reflect.New(t).Interface().(Ruled); is {
		schema.SetRules(ruled.JSONRules())
	}
	return schema
}

// SetRules sets the rules of an object, which null does not break.
func (s Schema) SetRules(rules []Schema) {
	maps.Copy(s, If(Schema{"type": "object"}, Schema{"allOf": rules}))
}

// allowNull makes null a value, or not. A [Schemer] says itself whether it may be one.
func (s Schema) allowNull(allowed bool, t reflect.Type) {
	var types []string
	switch given := s["type"].(type) {
	case string:
		types = []string{given}
	case []string:
		types = slices.Clone(given)
	default:
		return
	}
	_, isSchemer := reflect.Zero(t).Interface().(Schemer)
	switch has := slices.Contains(types, null); {
	case has && !allowed:
		types = slices.DeleteFunc(types, func(name string) bool { return name == null })
	case !has && allowed && !isSchemer:
		types = append(types, null)
		if words, isChoice := s["enum"].([]any); isChoice {
			s["enum"] = append(words, nil)
		}
	}
	s["type"] = types
	if len(types) == 1 {
		s["type"] = types[0]
	}
}

// rowOf returns the row that sets a field, and its description in plain text.
func rowOf(rows []Row, field string) (row Row, description string) {
	row, doc := meaning(rows, field)
	return row, plainText(described(row, field, doc))
}

// Comment returns the text of the field's comment in Go, in Markdown, or "" if no row sets the field.
func Comment(rows []Row, field string) string {
	row, doc := meaning(rows, field)
	text := described(row, field, doc)
	if required, ok := strings.CutPrefix(row.Default, "required"); ok && field == row.Fields()[0] && !saysDefault(doc) {
		text += " Required" + required + "."
	}
	return longForms.Replace(link.ReplaceAllStringFunc(text, func(l string) string {
		m := link.FindStringSubmatch(l)
		target := m[2]
		if strings.HasPrefix(target, "#") {
			target = "configuration.md" + target
		}
		return "[" + m[1] + "](" + documents + target + ")"
	}))
}

// documents is the address of the documents, for links in comments.
const documents = "https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/"

// meaning returns the row that sets a field, and its sentence about the field. A row without Doc shares the Doc
// of a row before; an option that is in no section is described in a block only.
func meaning(rows []Row, field string) (row Row, doc string) {
	usual := ""
	for _, row := range rows {
		if row.Doc != "" {
			doc, usual = row.Doc, row.Default
		}
		if !slices.Contains(row.Fields(), field) {
			continue
		}
		if row.Section == "" {
			for _, inside := range Flatten(rows) {
				if inside.Name == row.Name && inside.Doc != "" {
					return inside, inside.Doc
				}
			}
			return row, ""
		}
		if row.Doc == "" {
			row.Default = usual
		}
		return row, cmp.Or(row.Parts[field], doc)
	}
	return Row{}, ""
}

// described adds the default to a row's sentence, and the Caddyfile line where that has another name. A part may
// have a default of its own, because that of the line may be no value of the field.
func described(row Row, field, doc string) string {
	if doc == "" {
		return ""
	}
	if row.Default != "" && !strings.HasPrefix(row.Default, "required") && field == row.Fields()[0] && !saysDefault(doc) {
		doc += " Default: " + row.Default + "."
	}
	if row.JSON != nil {
		doc += " In a Caddyfile: `" + row.Name + " " + row.Args + "`."
	}
	return doc
}

func saysDefault(doc string) bool { return strings.Contains(doc, " Default: ") }

// Fields are the fields of JSON that the line sets.
func (r Row) Fields() []string {
	if r.JSON == nil {
		return []string{r.Name}
	}
	return r.JSON
}

// link is a link in Markdown.
var link = regexp.MustCompile(`\[([^\]]+)\]\(([^)]+)\)`)

// longForms has the placeholders in JSON that documentation writes as in a Caddyfile.
var longForms = strings.NewReplacer("{client_ip}", "{http.vars.client_ip}", "{header.", "{http.request.header.")

func plainText(markdown string) string {
	return longForms.Replace(link.ReplaceAllString(markdown, "$1"))
}

// schemaOf returns the schema of values of a type, which the row sets, one of rows.
func schemaOf(t reflect.Type, row Row, rows []Row) Schema {
	if schemer, is := reflect.Zero(t).Interface().(Schemer); is && t.Kind() != reflect.Pointer {
		return schemer.JSONSchema()
	}
	switch t {
	case reflect.TypeFor[caddy.Duration]():
		return Schema{
			"type": []string{"string", "integer"}, "pattern": `^\+?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h|d))+)$`,
			// A number of nanoseconds below a microsecond is meant in another unit.
			"anyOf": []Schema{{"maximum": 0}, {"minimum": time.Microsecond}}, "minimum": 0, "maximum": math.MaxInt64,
		}
	case reflect.TypeFor[json.RawMessage]():
		return Schema{}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return schemaOf(t.Elem(), row, rows)
	case reflect.Slice:
		return Schema{"type": "array", "items": schemaOf(t.Elem(), row, rows)}
	case reflect.Map:
		return Schema{"type": "object", "additionalProperties": schemaOf(t.Elem(), row, rows)}
	case reflect.Struct:
		return named(SchemaOf(t, row.inner(rows)), row)
	default:
		schema := Schema{"type": jsonTypes[t.Kind()]}
		if t.Kind() == reflect.Int || t.Kind() == reflect.Int64 {
			// No option is below zero.
			schema["minimum"], schema["maximum"] = 0, math.MaxInt64
		}
		return row.choices(schema)
	}
}

// inner are the options of the row's block, where one without a name stands for those of the block outside.
func (r Row) inner(outside []Row) []Row {
	if slices.ContainsFunc(r.Block, func(row Row) bool { return row.Name == "" }) {
		return slices.Concat(r.Block, outside)
	}
	return r.Block
}

// named adds what the row of a block says of the name before the block.
func named(schema Schema, row Row) Schema {
	if row.Args != "<name>" {
		return schema
	}
	schema["required"] = append(schema["required"].([]string), "name")
	schema["properties"].(Schema)["name"] = Schema{"type": "string", "pattern": name.String(), "description": plainText(row.Doc)}
	return schema
}

// choices adds the words of which the value must be one.
func (r Row) choices(schema Schema) Schema {
	if r.Field.choice == nil {
		return schema
	}
	words := []any{""}
	for word := range strings.SplitSeq(r.Args, "|") {
		words = append(words, word)
	}
	schema["enum"] = words
	return schema
}

// jsonTypes are the types in JSON of values of a kind.
var jsonTypes = map[reflect.Kind]string{
	reflect.Bool: "boolean", reflect.String: "string", reflect.Float64: "number", reflect.Int: "integer", reflect.Int64: "integer",
}
