package option

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// nested is an error inside of a part of the configuration, such as a zone.
type nested struct {
	part, path string
	err        error
}

// In returns an error inside of a part, which JSON has at the path.
func In(part, path string, err error) error { return &nested{part, path, err} }

// Error implements the interface error.
func (e *nested) Error() string { return e.part + ": " + e.err.Error() }

// Unwrap returns what is wrong in the part.
func (e *nested) Unwrap() error { return e.err }

// InJSON returns an error of the configuration in the words of JSON: the path of the field,
// and not the option of a Caddyfile.
func InJSON(err error) error {
	if err == nil {
		return nil
	}
	var path, part string
	for inside := (*nested)(nil); errors.As(err, &inside); err = inside.err {
		path += inside.path + "."
		// A part with a name is easier to find by that than by its number.
		if inside.part != inside.path {
			part = cmp.Or(part, ", in "+inside.part)
		}
	}
	if bad := new(Error); errors.As(err, &bad) {
		return fmt.Errorf("%s%s %w%s", path, bad.field, bad.problem, part)
	}
	if path == "" {
		return err
	}
	return fmt.Errorf("%s: %w%s", strings.TrimSuffix(path, "."), err, part)
}

// Decode decodes the JSON of a module strictly. An error names the path of the field that is wrong.
func Decode(text []byte, to any) error {
	text = wholeNumbers(text)
	if err := checkJSON("", text, reflect.TypeOf(to).Elem(), nil); err != nil {
		return err
	}
	return caddy.StrictUnmarshalJSON(text, to)
}

// tokens matches texts and numbers.
var tokens = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*`)

// wholeNumbers writes whole numbers without the fraction or exponent that some programs give them, such as 1.0: JSON
// has one kind of numbers, and the decoder two.
func wholeNumbers(text []byte) []byte {
	return tokens.ReplaceAllFunc(text, func(token []byte) []byte {
		if token[0] == '"' || !bytes.ContainsAny(token, ".eE") {
			return token
		}
		n, err := strconv.ParseFloat(string(token), 64)
		if err != nil || n != math.Trunc(n) || math.Abs(n) > 1<<53 {
			return token
		}
		return strconv.AppendInt(nil, int64(n), 10)
	})
}

// enclosing is a struct around a value, and its field that has it.
type enclosing struct {
	t     reflect.Type
	field string
}

// checkJSON returns what is wrong with the value at a path, which has to fit into a type, inside of others.
func checkJSON(path string, text json.RawMessage, t reflect.Type, outer []enclosing) error {
	isNull := string(bytes.TrimSpace(text)) == "null"
	switch {
	case isNull && t.Kind() == reflect.Pointer:
		return nil
	case t.Kind() == reflect.Pointer:
		return checkJSON(path, text, t.Elem(), outer)
	case isLeaf(t):
		return checkLeaf(path, text, t)
	case isNull:
		return nil
	case t.Kind() == reflect.Struct:
		return checkObject(path, text, func(name string) (reflect.Type, []enclosing, error) {
			field, err := fieldType(t, name, outer)
			return field, append(slices.Clip(outer), enclosing{t, name}), err
		})
	case t.Kind() == reflect.Map:
		return checkObject(path, text, func(string) (reflect.Type, []enclosing, error) { return t.Elem(), outer, nil })
	default:
		return checkList(path, text, t.Elem(), outer)
	}
}

// isLeaf reports whether what has the type is decoded as a whole.
func isLeaf(t reflect.Type) bool {
	if reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()) {
		return true
	}
	return !slices.Contains([]reflect.Kind{reflect.Struct, reflect.Map, reflect.Slice}, t.Kind())
}

// checkObject checks the members of an object, each of which has a type and what is around it.
func checkObject(path string, text json.RawMessage, typeOf func(name string) (reflect.Type, []enclosing, error)) error {
	var members map[string]json.RawMessage
	if json.Unmarshal(text, &members) != nil {
		return located(path, errors.New("it must be an object, in { }"))
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		inner := strings.TrimPrefix(path+"."+name, ".")
		t, outer, err := typeOf(name)
		if err != nil {
			return located(inner, err)
		}
		if err := checkJSON(inner, members[name], t, outer); err != nil {
			return err
		}
	}
	return nil
}

func checkList(path string, text json.RawMessage, t reflect.Type, outer []enclosing) error {
	var items []json.RawMessage
	if json.Unmarshal(text, &items) != nil {
		return located(path, errors.New("it must be a list, in [ ]"))
	}
	for i, item := range items {
		if err := checkJSON(fmt.Sprintf("%s[%d]", path, i), item, t, outer); err != nil {
			return err
		}
	}
	return nil
}

// checkLeaf decodes a value. The error quotes none, because it may be a secret.
func checkLeaf(path string, text json.RawMessage, t reflect.Type) error {
	value := reflect.New(t)
	err := json.Unmarshal(text, value.Interface())
	switch d, isDuration := value.Interface().(*caddy.Duration); {
	case err == nil && isDuration && text[0] != '"' && 0 < *d && *d < caddy.Duration(time.Microsecond):
		err = fmt.Errorf("%[1]d nanoseconds: write a text with the unit, such as \"%[1]ds\"", *d)
	case err == nil:
		return nil
	case t == reflect.TypeFor[caddy.Duration]():
		err = errors.New("it must be a time span, such as \"250ms\", \"10s\" or \"1d\", or a number of nanoseconds")
	case kindWords[t.Kind()] != "" && errors.As(err, new(*json.UnmarshalTypeError)):
		err = errors.New("it must be " + kindWords[t.Kind()])
	}
	return located(path, err)
}

// kindWords say what a value of a kind is in JSON.
var kindWords = map[reflect.Kind]string{
	reflect.Bool: "true or false", reflect.String: "a text, in quotes", reflect.Float64: "a number",
	reflect.Int: "a whole number", reflect.Int64: "a whole number",
}

func located(path string, err error) error {
	if path == "" {
		return err
	}
	return fmt.Errorf("%s: %w", path, err)
}

// fieldsOf has the fields of structs that were asked for: a config has many values of few types.
var fieldsOf sync.Map

// JSONFields returns the fields of JSON that a struct has, those of embedded ones included.
func JSONFields(t reflect.Type) (fields []reflect.StructField) {
	if known, ok := fieldsOf.Load(t); ok {
		return known.([]reflect.StructField)
	}
	for _, field := range reflect.VisibleFields(t) {
		if field.IsExported() && JSONName(field) != "" {
			fields = append(fields, field)
		}
	}
	fieldsOf.Store(t, fields)
	return fields
}

// JSONName returns the name of a field in JSON, and "" if it has none.
func JSONName(field reflect.StructField) string {
	name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
	return name
}

// placeOf returns where a struct in others has that name instead: in what its fields have, or around it.
func placeOf(t reflect.Type, name string, outer []enclosing) string {
	has := func(t reflect.Type, name string) bool {
		return t.Kind() == reflect.Struct && !isLeaf(t) && slices.ContainsFunc(JSONFields(t), func(f reflect.StructField) bool { return JSONName(f) == name })
	}
	for _, field := range JSONFields(t) {
		inner := field.Type
		for slices.Contains([]reflect.Kind{reflect.Pointer, reflect.Slice, reflect.Map}, inner.Kind()) {
			inner = inner.Elem()
		}
		if has(inner, name) {
			return "in " + JSONName(field)
		}
	}
	for _, around := range slices.Backward(outer) {
		if has(around.t, name) {
			return "beside " + around.field + ", outside of it"
		}
	}
	return ""
}

// fieldType returns the type of a struct's field with that name in JSON.
func fieldType(t reflect.Type, name string, outer []enclosing) (reflect.Type, error) {
	fields := JSONFields(t)
	// The decoder ignores case, too.
	if i := slices.IndexFunc(fields, func(f reflect.StructField) bool { return strings.EqualFold(JSONName(f), name) }); i >= 0 {
		return fields[i].Type, nil
	}
	var known []string
	for _, field := range fields {
		known = append(known, JSONName(field))
	}
	switch near := DidYouMean(name, known); {
	case InsteadInJSON(name) != "":
		return nil, fmt.Errorf("unknown field: %s", InsteadInJSON(name))
	case placeOf(t, name, outer) != "":
		return nil, fmt.Errorf("unknown field: it belongs %s", placeOf(t, name, outer))
	case near != "":
		return nil, fmt.Errorf("unknown field%s", near)
	default:
		return nil, fmt.Errorf("unknown field: it must be one of %s", strings.Join(known, ", "))
	}
}
