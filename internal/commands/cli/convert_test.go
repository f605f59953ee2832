package cli_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/envoy"
)

// lines returns the trimmed lines of the service's block.
func lines(t *testing.T, text string) (all []string) {
	t.Helper()
	_, block, found := strings.Cut(text, "\trate_limit_service {\n")
	if !found {
		t.Fatalf("no service in\n%s", text)
	}
	for line := range strings.Lines(block) {
		all = append(all, strings.TrimSpace(line))
	}
	return all
}

// TestConvert is here, beside the command, because each further test binary would link Caddy for its lexer.
func TestConvert(t *testing.T) {
	for name, x := range map[string]struct {
		yaml string
		want []string
		says []string
	}{
		"a limit": {
			"domain: a\ndescriptors:\n- {key: k, value: v, rate_limit: {unit: minute, requests_per_unit: 5}}",
			[]string{"domain a {", "descriptor k v zone a.k_v", "zone a.k_v {", "events 5", "window 1m aligned"}, nil,
		},
		"nested": {
			"domain: a\ndescriptors:\n- key: k\n  rate_limit: {unit: day, requests_per_unit: 2}\n  descriptors:\n  - {key: l, rate_limit: {unit: HOUR, requests_per_unit: 3, unit_multiplier: 6}}",
			[]string{"descriptor k zone a.k {", "descriptor l zone a.k.l", "zone a.k.l {", "window 6h aligned"}, nil,
		},
		"no limit": {"domain: a\ndescriptors: [{key: k}]", []string{"descriptor k unlimited"}, nil},
		"none":     {"domain: a\ndescriptors: [{key: k, rate_limit: {unit: second, requests_per_unit: 0}}]", []string{"descriptor k denied"}, nil},
		"shadow": {
			"domain: a\ndescriptors: [{key: k, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 1}}]",
			[]string{"window 365d aligned", "enforce 0"}, nil,
		},
		"quota": {
			"domain: a\ndescriptors: [{key: k, quota_mode: true, rate_limit: {unit: year, requests_per_unit: 1}}]",
			[]string{"enforce 0"}, []string{"f.yaml: descriptors[0].quota_mode: "},
		},
		"values that share": {
			"domain: a\ndescriptors: [{key: k, value: x*, share_threshold: true, rate_limit: {unit: week, requests_per_unit: 1}, descriptors: [{key: l, rate_limit: {unit: month, requests_per_unit: 1}}]}]",
			[]string{"descriptor k x* zone a.k_x {", "key static", "window 7d aligned", "key {rate_limit_service.l}", "window 30d aligned"}, nil,
		},
		"what differs": {
			"domain: a\nother: 1\ndescriptors:\n- {key: k, detailed_metric: true, colour: red, rate_limit: {name: n, replaces: [{name: m}], unit: day, requests_per_unit: 1}}\n- {key: l, value: '{x}'}\n- {key: m, value: '*'}\n- {key: m}",
			[]string{"descriptor m unlimited"},
			[]string{
				"f.yaml: other: is unknown", "descriptors[0].colour: is unknown", "descriptors[0].detailed_metric: ", "descriptors[0].rate_limit.name: ",
				"descriptors[0].rate_limit.replaces: ", "descriptors[1]: is left out", "descriptors[3]: is left out",
			},
		},
		"booleans of YAML 1.1": {
			"domain: 404\ndescriptors:\n- {key: 1_000, shadow_mode: yes, rate_limit: {unit: day, requests_per_unit: 1}}\n" +
				"- {key: q, quota_mode: on, rate_limit: {unit: day, requests_per_unit: 2}}\n- {key: l, rate_limit: {unlimited: Yes}}\n" +
				"- {key: s, value: x*, share_threshold: ON, rate_limit: {unit: day, requests_per_unit: 3}}\n- {key: n, shadow_mode: off, rate_limit: {unit: day, requests_per_unit: 4}}",
			[]string{"domain 404 {", "descriptor 1_000 zone 404.1_000", "enforce 0", "descriptor l unlimited", "key static", "events 4"}, []string{"descriptors[1].quota_mode: "},
		},
		"values as they are written": {
			"domain: a\ndescriptors:\n- {key: a, value: 007}\n- {key: b, value: True}\n- {key: c, value: 1_000}\n- {key: d, value: 0x1F}\n- {key: e, value: 1.10}\n- {key: f, value: yes}\n- {key: g, value: ~}\n- {key: h, value: 2024-01-01}",
			[]string{
				"descriptor a 007 unlimited", "descriptor b True unlimited", "descriptor c 1_000 unlimited", "descriptor d 0x1F unlimited",
				"descriptor e 1.10 unlimited", "descriptor f yes unlimited", "descriptor g unlimited", "descriptor h 2024-01-01 unlimited",
			}, nil,
		},
		"prefixes in their order": {
			"domain: a\ndescriptors:\n- {key: k, value: ab*}\n- {key: k, value: a*}\n- {key: k, value: abc*}\n- {key: k, value: abc}\n- {key: m, value: a*}",
			[]string{"descriptor k ab* unlimited", "descriptor k a* unlimited", "descriptor k abc unlimited", "descriptor m a* unlimited"},
			[]string{"descriptors[2]: is left out: there, descriptors[0] takes all its values"},
		},
		"* before other values": {
			"domain: a\ndescriptors: [{key: p, descriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 15}}, {key: k, value: '*', rate_limit: {unit: day, requests_per_unit: 16}}]}]",
			[]string{"descriptor k zone a.p.k", "events 16"},
			[]string{"descriptors[0].descriptors[0]: is left out: there, descriptors[0].descriptors[1] takes all its values"},
		},
		"keys that begin alike": {
			"domain: a\ndescriptors: [{key: user_id, value: 1}, {key: user, value: '*'}, {key: users}, {key: user_id}]",
			[]string{"descriptor user_id unlimited", "descriptor user unlimited"}, []string{"descriptors[0]: is apart from key user here"},
		},
		"a key for all that begin so": {"domain: a\ndescriptors: [{key: 'k*'}, {key: 'l*', value: v}]", []string{"descriptor l* v unlimited"}, []string{"descriptors[0]: is left out: "}},
		"all below is left out":       {"domain: a\ndescriptors: [{key: k, descriptors: [{key: '{x}'}]}]", []string{"descriptor k unlimited"}, []string{"descriptors[0].descriptors[0]: is left out: "}},
		"what shares below its own key": {
			"domain: a\ndescriptors: [{key: k, descriptors: [{key: k, value: x*, share_threshold: true, rate_limit: {unit: day, requests_per_unit: 1}}]}]",
			[]string{"zone a.k.k_x {"}, []string{"descriptors[0].descriptors[0]: is not shared by values: key \"k\" is there twice"},
		},
		"what shares below odd keys": {
			"domain: a\ndescriptors: [{key: 'a`b', descriptors: [{key: k, value: x*, share_threshold: true, rate_limit: {unit: day, requests_per_unit: 1}}]}," +
				" {key: 'a\\', descriptors: [{key: k, value: x*, share_threshold: true, rate_limit: {unit: day, requests_per_unit: 1}}]}]",
			[]string{"descriptor a`b {", "key {rate_limit_service.a`b}"}, []string{"descriptors[1].descriptors[0]: is not shared by values: "},
		},
		"the longest window": {"domain: a\ndescriptors: [{key: k, rate_limit: {unit: year, unit_multiplier: 100, requests_per_unit: 1}}]", []string{"window 36500d aligned"}, nil},
		"names that replace nothing": {
			"domain: a\ndescriptors: [{key: k, rate_limit: {name: '', replaces: [], unit: day, requests_per_unit: 1}}, {key: l, rate_limit: {name: , replaces: , unlimited: yes}}]",
			[]string{"descriptor k zone a.k"}, nil,
		},
		"odd texts": {
			"domain: a b\ndescriptors: [{key: 'x \"y\"', value: unlimited}, {key: n, value: 5, rate_limit: {unit: day, requests_per_unit: 1}}]",
			[]string{"domain `a b` {", "descriptor `x \"y\"` \"unlimited\" unlimited", "zone a_b.n_5 {"}, nil,
		},
	} {
		converted, err := envoy.Convert(envoy.File{Name: "f.yaml", Text: []byte(x.yaml)})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := lines(t, converted.Caddyfile)
		for _, line := range x.want {
			if !slices.Contains(got, line) {
				t.Errorf("%s: no line %q in\n%s", name, line, converted.Caddyfile)
			}
		}
		for _, text := range x.says {
			if !slices.ContainsFunc(converted.Differences, func(d string) bool { return strings.Contains(d, text) }) || !strings.Contains(converted.Caddyfile, text) {
				t.Errorf("%s: nothing says %q in %q", name, text, converted.Differences)
			}
		}
		got = slices.DeleteFunc(converted.Differences, func(d string) bool { return strings.HasPrefix(d, "no config of Envoy was given: ") })
		if isTold := len(got) < len(converted.Differences); len(got) != len(x.says) || isTold != strings.Contains(converted.Caddyfile, "\tzone ") {
			t.Errorf("%s: differences %q, want %d", name, converted.Differences, len(x.says))
		}
	}
}

// TestConvertWithEnvoy: what Envoy reports at the end of a stream is charged whole.
func TestConvertWithEnvoy(t *testing.T) {
	limits := envoy.File{Name: "limits.yaml", Text: []byte(`
domain: a
descriptors:
- key: route
  value: chat
  rate_limit: {unit: day, requests_per_unit: 9}
  descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: user, value: gold*, rate_limit: {unit: day, requests_per_unit: 2}}
- key: route
  rate_limit: {unit: day, requests_per_unit: 3}
- {key: generic_key, value: cost, rate_limit: {unit: day, requests_per_unit: 4}}
- {key: generic_key, rate_limit: {unit: day, requests_per_unit: 5}}
- {key: remote_address, rate_limit: {unit: day, requests_per_unit: 6}}
- {key: header_match, value: paid, rate_limit: {unlimited: true}}
`)}
	const yaml = `
static_resources:
  virtual_hosts:
  - routes:
    - route:
        rate_limits:
        - actions: &chat [{generic_key: {descriptor_key: route, descriptor_value: chat}}, {request_headers: {header_name: x-user, descriptor_key: user}}]
        - {actions: *chat, apply_on_stream_done: true, hits_addend: {format: "%DYNAMIC_METADATA(x)%"}}
        - {actions: [{remote_address: {}}]}
        - {actions: [{generic_key: {descriptor_value: cost}}], apply_on_stream_done: true}
        - {actions: [{header_value_match: {descriptor_value: paid}}], apply_on_stream_done: true}
        - {actions: [{remote_address: {}}, {extension: {}}], apply_on_stream_done: true}
`
	const dump = `{"configs": [{"rateLimits": [
		{"actions": [{"genericKey": {"descriptorKey": "route", "descriptorValue": "chat"}}, {"metadata": {"descriptorKey": "user"}}]},
		{"actions": [{"genericKey": {"descriptorKey": "route", "descriptorValue": "chat"}}, {"metadata": {"descriptorKey": "user"}}], "applyOnStreamDone": true},
		{"actions": [{"generic_key": {"descriptor_value": "cost"}}], "apply_on_stream_done": true},
		{"actions": [{"dynamicMetadata": {"descriptorKey": "x"}}]}]}]}`
	for name, text := range map[string]string{"envoy.yaml": yaml, "dump.json": dump} {
		converted, err := envoy.Convert(limits, envoy.File{Name: name, Text: []byte(text)})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := lines(t, converted.Caddyfile)
		for _, line := range []string{
			"descriptor route chat zone a.route_chat {", "descriptor user zone a.route_chat.user postpaid", "descriptor user gold* zone a.route_chat.user_gold postpaid",
			"descriptor route zone a.route", "descriptor generic_key cost zone a.generic_key_cost always", "descriptor generic_key zone a.generic_key",
			"descriptor remote_address zone a.remote_address", "descriptor header_match paid unlimited",
		} {
			if !slices.Contains(got, line) {
				t.Errorf("%s: no line %q in\n%s", name, line, converted.Caddyfile)
			}
		}
		var paths []string
		for _, d := range converted.Differences {
			path, _, _ := strings.Cut(d, ": is ")
			paths = append(paths, path)
		}
		passedOver := map[string]string{
			"envoy.yaml": "envoy.yaml: static_resources.virtual_hosts[0].routes[0].route.rate_limits[5].actions[1]",
			"dump.json":  "dump.json: configs[0].rateLimits[3].actions[0]",
		}
		want := []string{
			passedOver[name], "limits.yaml: descriptors[0].descriptors[0]", "limits.yaml: descriptors[0].descriptors[1]", "limits.yaml: descriptors[2]",
		}
		if !slices.Equal(paths, want) {
			t.Errorf("%s: differences %q, want of %q", name, converted.Differences, want)
		}
	}
}

func TestConvertErrors(t *testing.T) {
	const limited = "domain: a\ndescriptors: [{key: k, rate_limit: "
	for text, want := range map[string]string{
		"[":                           "did not find expected node content",
		"default: {}\ndomains: {}":    "f.yaml: has no domain, so it is no config of limits; it has [default domains]",
		"descriptors: 5\ndomain: a":   "f.yaml: line 1: cannot unmarshal !!int `5` into []",
		"domain: a\ndescriptors: [5]": "line 2: cannot unmarshal !!int `5` into ",
		"domain: a\ndescriptors:\n- {key: k, descriptors: {key: l}}":          "line 3: cannot unmarshal !!map into []",
		"domain: a\ndescriptors:\n- {key: k, shadow_mode: maybe}":             "line 3: cannot unmarshal !!str `maybe` into bool",
		"domain: a\ndescriptors:\n- {key: k, shadow_mode: 'yes'}":             "line 3: cannot unmarshal !!str `yes` into bool",
		"domain: a\ndescriptors: [{key: k, value: [v]}]":                      "line 2: cannot unmarshal !!seq into string",
		"domain: a\ndescriptors: [{key: k, value: v, share_threshold: yes}]":  "descriptors[0].share_threshold needs a value",
		"descriptors: [{key: a}]":                                             "f.yaml: has no domain, so it is no config of limits; it has [descriptors]",
		"":                                                                    "f.yaml: has no domain, so it is no config of limits; it has []",
		"domain: a\ndescriptors: [{}]":                                        "descriptors[0].key is missing",
		"domain: '{x}'":                                                       "domain: \"{x}\" has braces",
		"virtual_hosts: [{rate_limits: [{actions: [{remote_address: {}}]}]}]": "there is no config of envoyproxy/ratelimit",
		"virtual_hosts: [{rate_limits: [{stage: 1}]}]":                        "f.yaml: has no domain",
		limited + "5}]":                                                       "line 2: cannot unmarshal !!int `5` into ",
		limited + "{unit: fortnight}}]":                                       `descriptors[0].rate_limit.unit is "fortnight"`,
		limited + "{unit: day, requests_per_unit: -1}}]":                      "requests_per_unit is no whole number",
		limited + "{unit: day, requests_per_unit: x}}]":                       "requests_per_unit is no whole number",
		limited + "{unit: day, unit_multiplier: 0}}]":                         "unit_multiplier is no whole number",
		limited + "{unit: day, requests_per_unit: 1.5}}]":                     "requests_per_unit is no whole number",
		limited + "{unit: day, requests_per_unit: 4294967296}}]":              "requests_per_unit is no whole number",
		limited + "{unit: year, unit_multiplier: 101}}]":                      "descriptors[0].rate_limit.unit_multiplier is more than 100: ",
	} {
		if _, err := envoy.Convert(envoy.File{Name: "f.yaml", Text: []byte(text)}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	one := envoy.File{Name: "f.yaml", Text: []byte("domain: a")}
	if _, err := envoy.Convert(one, one); err == nil || !strings.Contains(err.Error(), "domain a is in another file") {
		t.Errorf("one domain twice: %v", err)
	}
}
