//go:build check

package caddytest

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// CompileSchema returns a schema as an editor reads it, which also checks that it is one.
func CompileSchema(t *testing.T, schema any) *jsonschema.Schema {
	t.Helper()
	text, err := json.Marshal(schema)
	Must(t, "encode", err)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(string(text)))
	Must(t, "decode", err)
	compiler := jsonschema.NewCompiler()
	Must(t, "add", compiler.AddResource("schema.json", value))
	compiled, err := compiler.Compile("schema.json")
	Must(t, "compile", err)
	return compiled
}
