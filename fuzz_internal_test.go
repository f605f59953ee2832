package shardlimit

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/shardlimit/caddy-shardlimit/memorystore"
	"github.com/shardlimit/caddy-shardlimit/redisstore"
)

// FuzzCaddyfile adapts any text, as a whole Caddyfile, as what follows
// rate_limit in a site, and as what is in the block of the global option.
// Nothing may panic, and what adapts must be a config that loads.
func FuzzCaddyfile(f *testing.F) {
	// The errors would be so many seeds that no time is left for other texts.
	bases := ReadBases(f)
	for _, file := range Glob(f, "testdata/options_*.txt") {
		for _, row := range ReadTable(f, file).Rows {
			f.Add(bases[row.Base].Fill(f, row))
		}
	}
	for _, file := range Glob(f, "testdata/*.caddyfiletest") {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		caddyfile, _, _ := strings.Cut(string(text), "\n----------\n")
		f.Add(caddyfile)
	}
	for _, text := range []string{
		"{client_ip} 10 1m",
		"{client_ip} {http.vars.quota} 1m api {\n\theaders none\n}",
		"@api {client_ip} 10 1m\n@api path /api/*",
		"{\n\tzone a {\n\t\tkey a \"{b}{c}\"\n\t\tevents {d} 5\n\t\twindow 1d\n\t\tmatch {\n\t\t\tpath /\n\t\t}\n\t}\n}",
		"store memory\nstore a redis {\n\tshard a {\n\t\tprimary [::1]\n\t\treplica {env.A}:1\n\t}\n}",
		"store a redis {\n\tshard a {\n\t\tprimary unix//a\n\t}\n\tpassword \"\"\n\tdb 0\n}",
		"store redis {\n\tshard a {\n\t\tsentinel m s1 {env.S}:1\n\t\tsentinel_password a\n\t\ttls\n\t}\n\tshard b {\n\t\tsentinel n s1\n\t}\n\tmax_replica_lag 1s\n}",
		"store redis {\n\tshard a {\n\t\tcluster r1 [::1]:2\n\t\tcluster {env.A}\n\t\tdb 0\n\t}\n\tdb 1\n}",
		"store redis {\n\tshard a {\n\t\tprimary a\n\t\ttls {\n\t\t\tca \"\"\n\t\t}\n\t\tusername a\n\t}\n\tpassword b\n\ttls {\n\t\tcert a b\n\t\tserver_name c\n\t}\n}",
		"{\n}\nrate_limit {\n\tzone",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Contains(text, "import") || strings.Contains(text, "_file") {
			return // it reads files
		}
		adaptAndCheck(t, text)
		adaptAndCheck(t, ":8080 {\n\trate_limit "+text+"\n}\n")
		adaptAndCheck(t, "{\n\trate_limit {\n"+text+"\n\t}\n}\n:8080 {\n\trate_limit static 10 1m\n}\n")
	})
}

func adaptAndCheck(t *testing.T, text string) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		return
	}
	decoder := json.NewDecoder(bytes.NewReader(config))
	decoder.UseNumber()
	var root map[string]any
	if err := decoder.Decode(&root); err != nil {
		t.Fatalf("%q adapts to %s: %v", text, config, err)
	}
	checkHandlers(t, root)
	apps, _ := root["apps"].(map[string]any)
	app, _ := apps["rate_limit"].(map[string]any)
	stores, _ := app["stores"].(map[string]any)
	for name, store := range stores {
		fields, _ := store.(map[string]any)
		var module caddy.Validator
		switch fields["module"] {
		case "memory":
			module = new(memorystore.Store)
		case "redis":
			module = new(redisstore.Store)
		default:
			continue
		}
		decodeModule(t, fields, "module", module)
		if err := module.Validate(); err != nil {
			t.Errorf("store %s adapts, but is refused in JSON: %v", name, err)
		}
	}
}

// checkHandlers checks the rate_limit handlers anywhere in a config.
func checkHandlers(t *testing.T, node any) {
	switch node := node.(type) {
	case []any:
		for _, child := range node {
			checkHandlers(t, child)
		}
	case map[string]any:
		if node["handler"] == "rate_limit" {
			h := new(Handler)
			decodeModule(t, node, "handler", h)
			if err := h.validate(); err != nil {
				t.Errorf("a handler adapts, but is refused in JSON: %v", err)
			}
			return
		}
		for _, child := range node {
			checkHandlers(t, child)
		}
	}
}

// decodeModule decodes fields as Caddy does when it loads a module.
func decodeModule(t *testing.T, fields map[string]any, inlineKey string, to any) {
	delete(fields, inlineKey)
	text, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.StrictUnmarshalJSON(text, to); err != nil {
		t.Errorf("%s adapts, but does not decode: %v", text, err)
	}
}
