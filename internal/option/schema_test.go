package option_test

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

func TestSchemaOf(t *testing.T) {
	rows := new(sample).rows()
	rows = append(rows, option.Row{
		Name: "part", Args: "<name>", JSON: []string{"parts"}, Doc: "A [part](x.md#y) of {client_ip}.", Section: "One", Default: "required",
		Block: []option.Row{{Name: "size", Args: "<n>", Default: "required", Doc: "How large.", Section: "One"}},
	})
	text, err := json.Marshal(option.SchemaOf(reflect.TypeFor[sample](), rows)["properties"])
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		t.Fatal(err)
	}
	const part = `"additionalProperties":false,"patternProperties":{"^@":{}},"properties":{`
	const whole = `"maximum":9223372036854775807,"minimum":0,`
	for name, want := range map[string]string{
		"color":   "{\"description\":\"The color. Default: `red`.\",\"enum\":[\"\",\"red\",\"green\",\"blue\",null],\"type\":[\"string\",\"null\"]}",
		"texts":   `{"description":"Texts.","items":{"type":"string"},"type":["array","null"]}`,
		"count":   `{"description":"How many. Default: 10.",` + whole + `"type":["integer","null"]}`,
		"share":   `{"description":"How many. Default: 10.","type":["number","null"]}`,
		"switch":  `{"type":["boolean","null"]}`,
		"by_name": `{"additionalProperties":{` + part + `"size":{` + whole + `"type":["integer","null"]}},"required":[],"type":"object"},"type":["object","null"]}`,
		"parts": "{\"description\":\"A part of {http.vars.client_ip}. In a Caddyfile: `part \\u003cname\\u003e`.\",\"items\":{" + part +
			`"name":{"description":"A part of {http.vars.client_ip}.","pattern":"^[A-Za-z0-9_.-]+$","type":"string"},` +
			`"size":{"description":"How large.",` + whole + `"type":"integer"}},"required":["size","name"],"type":"object"},"type":["array","null"]}`,
	} {
		if got := string(fields[name]); got != want {
			t.Errorf("%s is\n%s\nwant\n%s", name, got, want)
		}
	}
}
