package service_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/envoy"
)

// step is some equal calls, and what the last one says.
type step struct {
	calls int
	asked []*commonv3.RateLimitDescriptor
	want  string
}

func after(calls int, want string, asked ...*commonv3.RateLimitDescriptor) step {
	return step{calls, asked, want}
}

// documented are the cases of the documentation of envoyproxy/ratelimit, and of its example configs: what
// kind of config each shows, one of that kind in our words, and calls.
var documented = map[string]struct {
	// of is the heading of the example in its README, or the file among its examples; empty if it has none.
	of    string
	yaml  string
	steps []step
	// differs is set if the config cannot be converted as it is.
	differs bool
}{
	"two values of one key": {
		of:   "Example 1",
		yaml: "descriptors:\n- {key: db, value: people, rate_limit: {unit: hour, requests_per_unit: 2}}\n- {key: db, value: things, rate_limit: {unit: hour, requests_per_unit: 2}}",
		steps: []step{
			after(2, "OK [OK 0/2 HOUR]", descriptor("db=people")), after(1, "OVER_LIMIT [OVER_LIMIT 0/2 HOUR]", descriptor("db=people")),
			after(1, "OK [OK 1/2 HOUR]", descriptor("db=things")), after(1, "OK [OK]", descriptor("db=places")),
		},
	},
	"a nested limit beside a general one": {
		of:   "Example 2",
		yaml: "descriptors:\n- key: kind\n  value: advert\n  descriptors: [{key: phone, rate_limit: {unit: day, requests_per_unit: 2}}]\n- {key: phone, rate_limit: {unit: day, requests_per_unit: 3}}",
		steps: []step{
			after(2, "OK [OK 0/2 DAY, OK 1/3 DAY]", descriptor("kind=advert", "phone=1"), descriptor("phone=1")),
			// There the second descriptor is charged as well.
			after(1, "OVER_LIMIT [OVER_LIMIT 0/2 DAY]", descriptor("kind=advert", "phone=1")),
			after(1, "OK [OK 0/3 DAY]", descriptor("phone=1")),
			after(1, "OK [OK 1/2 DAY]", descriptor("kind=advert", "phone=2")),
			after(1, "OK [OK]", descriptor("kind=advert")),
		},
	},
	"the exact value first": {
		of:   "Example 3",
		yaml: "descriptors:\n- {key: address, rate_limit: {unit: hour, requests_per_unit: 2}}\n- {key: address, value: 192.0.2.66, rate_limit: {unit: hour, requests_per_unit: 0}}",
		steps: []step{
			after(2, "OK [OK 0/2 HOUR]", descriptor("address=192.0.2.1")), after(1, "OVER_LIMIT [OVER_LIMIT]", descriptor("address=192.0.2.66")),
			after(1, "OK [OK 1/2 HOUR]", descriptor("address=192.0.2.2")),
		},
	},
	"as many entries as levels": {
		of:    "Example 4",
		yaml:  "descriptors:\n- {key: outer, value: a, rate_limit: {unit: hour, requests_per_unit: 1}}",
		steps: []step{after(3, "OK [OK]", descriptor("outer=a", "inner=b")), after(1, "OK [OK 0/1 HOUR]", descriptor("outer=a"))},
	},
	"as many levels as entries": {
		of:    "Example 4",
		yaml:  "descriptors:\n- key: outer\n  value: a\n  descriptors: [{key: inner, rate_limit: {unit: hour, requests_per_unit: 1}}]",
		steps: []step{after(3, "OK [OK]", descriptor("outer=a")), after(1, "OK [OK 0/1 HOUR]", descriptor("outer=a", "inner=b"))},
	},
	"unlimited": {
		of:    "Example 5",
		yaml:  "descriptors:\n- {key: local, rate_limit: {unlimited: true}}\n- {key: remote, rate_limit: {unit: hour, requests_per_unit: 1}}",
		steps: []step{after(3, "OK [OK]", descriptor("local=x")), after(2, "OVER_LIMIT [OVER_LIMIT 0/1 HOUR]", descriptor("remote=x"))},
	},
	"shadow mode": {
		of:   "Example 6",
		yaml: "descriptors:\n- key: app\n  descriptors:\n  - {key: who, value: new, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n  - {key: who, value: old, rate_limit: {unit: hour, requests_per_unit: 1}}",
		steps: []step{
			after(3, "OK [OK 0/1 HOUR]", descriptor("app=mail", "who=new")), after(2, "OVER_LIMIT [OVER_LIMIT 0/1 HOUR]", descriptor("app=mail", "who=old")),
		},
	},
	// There only the second would count.
	"a limit in place of another": {
		of:      "Example 7",
		yaml:    "descriptors:\n- {key: a, rate_limit: {name: small, unit: hour, requests_per_unit: 1}}\n- {key: b, rate_limit: {replaces: [{name: small}], unit: hour, requests_per_unit: 2}}",
		steps:   []step{after(2, "OVER_LIMIT [OVER_LIMIT 0/1 HOUR]", descriptor("a=x"))},
		differs: true,
	},
	"metrics of single values": {
		of:   "Example 8",
		yaml: "descriptors:\n- {key: a, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n- {key: a, value: b, rate_limit: {unit: hour, requests_per_unit: 2}}",
		steps: []step{
			after(1, "OK [OK 0/1 HOUR]", descriptor("a=x")), after(1, "OK [OK 0/1 HOUR]", descriptor("a=y")), after(1, "OK [OK 1/2 HOUR]", descriptor("a=b")),
		},
		differs: true,
	},
	"a wildcard": {
		of:   "Example 9",
		yaml: "descriptors:\n- {key: path, value: /v1/*, rate_limit: {unit: hour, requests_per_unit: 1}}",
		steps: []step{
			after(1, "OK [OK 0/1 HOUR]", descriptor("path=/v1/a")), after(1, "OK [OK 0/1 HOUR]", descriptor("path=/v1/b")), after(1, "OK [OK]", descriptor("path=/v2/a")),
		},
	},
	"metrics of levels": {
		of:   "Example 10",
		yaml: "descriptors:\n- key: way\n  value_to_metric: true\n  descriptors:\n  - key: verb\n    value: read*\n    value_to_metric: true\n    descriptors: [{key: id, rate_limit: {unit: hour, requests_per_unit: 1}}]",
		steps: []step{
			after(1, "OK [OK 0/1 HOUR]", descriptor("way=a", "verb=read", "id=1")), after(1, "OVER_LIMIT [OVER_LIMIT 0/1 HOUR]", descriptor("way=a", "verb=read", "id=1")),
			after(1, "OK [OK 0/1 HOUR]", descriptor("way=b", "verb=read", "id=1")), after(1, "OK [OK]", descriptor("way=b", "verb=write", "id=1")),
		},
		differs: true,
	},
	"values that share": {
		of:   "Example 11",
		yaml: "descriptors:\n- {key: file, value: in/*, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 2}}\n- {key: file, value: out/*, share_threshold: false, rate_limit: {unit: hour, requests_per_unit: 2}}",
		steps: []step{
			after(1, "OK [OK 1/2 HOUR]", descriptor("file=in/a")), after(1, "OK [OK 0/2 HOUR]", descriptor("file=in/b")), after(1, "OVER_LIMIT [OVER_LIMIT 0/2 HOUR]", descriptor("file=in/c")),
			after(2, "OK [OK 0/2 HOUR]", descriptor("file=out/a")), after(1, "OK [OK 1/2 HOUR]", descriptor("file=out/b")),
		},
	},
	"levels that share": {
		of:   "Example 11",
		yaml: "descriptors:\n- key: way\n  value: api/*\n  share_threshold: true\n  value_to_metric: true\n  descriptors: [{key: verb, rate_limit: {unit: hour, requests_per_unit: 2}}]",
		steps: []step{
			after(1, "OK [OK 1/2 HOUR]", descriptor("way=api/1", "verb=GET")), after(1, "OK [OK 0/2 HOUR]", descriptor("way=api/2", "verb=GET")),
			after(1, "OVER_LIMIT [OVER_LIMIT 0/2 HOUR]", descriptor("way=api/3", "verb=GET")), after(1, "OK [OK 1/2 HOUR]", descriptor("way=api/3", "verb=PUT")),
		},
		differs: true,
	},
	"an asterisk inside of a value": {
		yaml:  "descriptors:\n- {key: path, value: a*b, rate_limit: {unit: hour, requests_per_unit: 1}}",
		steps: []step{after(1, "OK [OK]", descriptor("path=axb")), after(1, "OK [OK 0/1 HOUR]", descriptor("path=a*b"))},
	},
	"a quota": {
		yaml:    "descriptors:\n- {key: app, value: one, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}",
		steps:   []step{after(2, "OK [OK 0/1 HOUR]", descriptor("app=one"))},
		differs: true,
	},
	"everything in one": {
		of: "example.yaml",
		yaml: "descriptors:\n- key: from\n  value: proxy\n  descriptors: [{key: to, value: mock, rate_limit: {unit: hour, requests_per_unit: 1}}]\n" +
			"- key: x\n  rate_limit: {unit: hour, requests_per_unit: 2}\n  descriptors:\n  - {key: y, rate_limit: {unit: hour, requests_per_unit: 3}}\n" +
			"  - {key: y, value: bad, rate_limit: {unit: hour, requests_per_unit: 0}}\n  - {key: z, rate_limit: {unlimited: true}}\n- {key: w, rate_limit: {unlimited: true}}",
		steps: []step{
			after(1, "OK [OK 1/2 HOUR]", descriptor("x=1")), after(1, "OK [OK 2/3 HOUR]", descriptor("x=1", "y=1")),
			after(1, "OVER_LIMIT [OVER_LIMIT]", descriptor("x=1", "y=bad")), after(1, "OK [OK, OK]", descriptor("x=1", "z=1"), descriptor("w=1")),
			after(1, "OK [OK 0/1 HOUR]", descriptor("from=proxy", "to=mock")),
		},
	},
}

// TestDocumentedCasesOfEnvoysService: converted configs load, and limit as documented, or their difference
// is named.
func TestDocumentedCasesOfEnvoysService(t *testing.T) {
	t.Parallel()
	var files []envoy.File
	isThere := map[string]bool{}
	for name, x := range documented {
		isThere[x.of] = true
		files = append(files, envoy.File{Name: name, Text: fmt.Appendf(nil, "domain: %s\n%s\n", strings.ReplaceAll(name, " ", "-"), x.yaml)})
	}
	for n := range 11 {
		of := fmt.Sprint("Example ", n+1)
		caddytest.Must(t, of, caddytest.Want("being there", isThere[of], true))
	}
	converted, err := envoy.Convert(files...)
	caddytest.Must(t, "convert", err)
	for name, x := range documented {
		isNamed := strings.Contains(strings.Join(converted.Differences, "\n"), name+": ")
		caddytest.Must(t, name, caddytest.Want("a difference being named", isNamed, x.differs))
	}
	// Windows that begin with the clock's hour could end in the test.
	caddyfile := strings.NewReplacer("http://:8081", "{{site}}", "\tservers {", "\t{{global}}\n\tservers {", " aligned", "").Replace(converted.Caddyfile)
	c := dial(t, caddytest.Start(t, caddyfile))
	for name, x := range documented {
		for i, s := range x.steps {
			for range s.calls - 1 {
				c.call(asking(strings.ReplaceAll(name, " ", "-"), s.asked...))
			}
			c.expect(fmt.Sprintf("%s, step %d", name, i), s.want, asking(strings.ReplaceAll(name, " ", "-"), s.asked...))
		}
	}
}

// TestConvertCommand prints what loads, and its errors name the file.
func TestConvertCommand(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"limits.yaml": "domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1, replaces: [{name: x}]}}]",
		"other.yaml":  "default: {}",
	} {
		caddytest.Must(t, "write", os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	out, err := caddytest.Command(dir, "rate-limit", "convert", "envoy", "limits.yaml").Output()
	caddytest.Must(t, "convert", err)
	caddytest.Must(t, string(out), caddytest.Want("naming the difference", strings.Contains(string(out), "#   limits.yaml: descriptors[0].rate_limit.replaces: "), true))
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(out, nil)
	caddytest.Must(t, "adapt", err)
	caddytest.Must(t, "load", caddytest.Validate(config))
	for _, x := range [][2]string{{"other.yaml", "other.yaml: has no domain"}, {"none.yaml", "none.yaml: no such file"}} {
		text, err := caddytest.Command(dir, "rate-limit", "convert", "envoy", x[0]).CombinedOutput()
		caddytest.Must(t, string(text), errors.Join(caddytest.Want("failing", err != nil, true), caddytest.Want("saying so", strings.Contains(string(text), x[1]), true)))
	}
}
