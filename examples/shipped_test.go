package examples

import (
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// chosen are the beginnings of placeholders with what clients make up.
var chosen = []string{"{http.request.header.", "{http.request.cookie.", "{http.request.uri"}

// checkedElsewhere are shipped configs in which something else refuses keys that are made up.
var checkedElsewhere = map[string]string{
	"examples/plan_from_auth.caddyfile": "forward_auth sets the header",
	"examples/llm_gateway.caddyfile":    "the models refuse them, and what they refuse is free",
}

// shippedZone is a zone of a shipped config.
type shippedZone struct {
	Name          string
	Key           []string
	Match         []map[string]json.RawMessage
	Events, Burst any
	Window        time.Duration
	Align         bool
	Calendar      string
	Algorithm     string
	MaxWait       time.Duration `json:"max_wait"`
	Cost          any
	CountStatus   []string `json:"count_status"`
	FreeStatus    []string `json:"free_status"`
	ResetStatus   []string `json:"reset_status"`
}

// zonesIn returns the zones of each handler in a config.
func zonesIn(config any) (handlers [][]shippedZone) {
	within(config, func(object map[string]any) {
		if object["handler"] != "rate_limit" {
			return
		}
		var h struct{ Zones []shippedZone }
		text, _ := json.Marshal(object)
		if err := json.Unmarshal(text, &h); err != nil {
			panic(err)
		}
		handlers = append(handlers, h.Zones)
	})
	return handlers
}

// shippedConfigs returns the Caddyfiles that readers copy, by the file that has them.
func shippedConfigs(t *testing.T) map[string]string {
	t.Helper()
	configs := deployedCaddyfiles(t)
	for _, file := range append(exampleFiles(t), "Caddyfile.example") {
		text, err := os.ReadFile(file)
		must(t, "read", err)
		configs[file] = string(text)
	}
	for _, file := range pagesWithConfigs {
		if file == "docs/with-other-plugins.md" {
			continue // TestDocumentedOrders and e2e try them, with what stands in for the plugins
		}
		for _, block := range codeBlocks(t, file) {
			if strings.Contains(block, "rate_limit {") && (strings.Contains(block, "reverse_proxy") || strings.Contains(block, "\trespond \"")) {
				configs[file+": "+block] = block
			}
		}
	}
	return configs
}

// sweepsAll makes tests go through all shipped configs; the tag check sets it.
var sweepsAll = false

// swept returns which of all cases a test goes through: some, which try each promise once, or with the tag check all.
func swept(t *testing.T, all iter.Seq[string], some ...string) []string {
	t.Helper()
	names := slices.Sorted(all)
	for _, name := range some {
		must(t, "all cases", want("having "+name, slices.Contains(names, name), true))
	}
	if sweepsAll {
		return names
	}
	return some
}

// TestShippedConfigsLimitMadeUpKeys checks that beside each zone that counts by what clients choose,
// another counts all requests of an address.
func TestShippedConfigsLimitMadeUpKeys(t *testing.T) {
	t.Parallel()
	found := 0
	for name, text := range shippedConfigs(t) {
		adapted, err := adapt(text)
		must(t, name, err)
		var config any
		must(t, name, json.Unmarshal(adapted, &config))
		for _, zones := range zonesIn(config) {
			isChosen := func(z shippedZone) bool {
				return slices.ContainsFunc(z.Key, func(text string) bool {
					return slices.ContainsFunc(chosen, func(prefix string) bool { return strings.Contains(text, prefix) })
				})
			}
			if !slices.ContainsFunc(zones, isChosen) {
				continue
			}
			found++
			isAddress := func(z shippedZone) bool { return slices.Equal(z.Key, []string{"{http.vars.client_ip}"}) }
			if checkedElsewhere[name] == "" && !slices.ContainsFunc(zones, isAddress) {
				t.Errorf("%s: no zone beside those by what clients choose counts by address: %v", name, zones)
			}
		}
	}
	if found < 8 {
		t.Errorf("found %d handlers that count by what clients choose", found)
	}
}

// TestMadeUpKeysAreLimited by the examples that count by API key.
func TestMadeUpKeysAreLimited(t *testing.T) {
	paths := map[string]string{"burst_and_quota": "/", "browser_clients": "/", "graphql_cost": "/graphql", "per_plan": "/", "migrating/envoy_after": "/"}
	for _, file := range swept(t, maps.Keys(paths), "graphql_cost", "per_plan") {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			c := startExample(t, file)
			served := 0
			for i := range 60 {
				if c.Get(paths[file], fmt.Sprint("X-Api-Key: made-up-", i)).StatusCode == 200 {
					served++
				}
			}
			if served == 0 || served > 45 {
				t.Errorf("%d of 60 requests with made-up keys are served", served)
			}
		})
	}
}
