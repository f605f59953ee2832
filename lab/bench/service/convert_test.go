package service

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	peer "github.com/envoyproxy/ratelimit/src/config"
	"github.com/envoyproxy/ratelimit/src/settings"
	"github.com/envoyproxy/ratelimit/src/stats"
	counting "github.com/lyft/gostats"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
)

// The words of the configs and of the questions, as they are in YAML.
var (
	keys   = []string{"k", "k_a", "yes", "404", `"m n"`, `"a\u00a0b"`, "l", "'`\"'"}
	values = []string{
		"", "", "'*'", "a*", "ab*", "abc*", "abc", "007", "7", "True", "true", "1_000", "0x1F", "yes", "~", "k_a", `"a\u00a0b*"`, `"a\r\nb"`, "'x y'", "'`\"\\\"'", "unlimited",
	}
	flags = []string{"true", "yes", "On", "y", "false", "no", "~", "'yes'"}
	asked = []string{"", "a", "abc", "abcd", "ab", "007", "7", "True", "true", "1_000", "1000", "0x1F", "31", "yes", "~", "k_a", "a\u00a0bc", "a\r\nb", "x y", "`\"\\\"", "unlimited", "*", "else"}
)

// oneOf returns one of several texts.
func oneOf(random *rand.Rand, all []string) string { return all[random.IntN(len(all))] }

// generator writes configs in which each limit has a number of its own.
type generator struct {
	*rand.Rand
	limits int
}

// level writes a list of descriptors.
func (g *generator) level(depth int) string {
	var list []string
	for range 1 + g.IntN(4) {
		d := "key: " + oneOf(g.Rand, keys[:3+g.IntN(len(keys)-2)])
		if value := oneOf(g.Rand, values); value != "" {
			d += ", value: " + value
			if strings.Contains(value, "*") && g.IntN(3) == 0 {
				d += ", share_threshold: " + oneOf(g.Rand, flags)
			}
		}
		if g.IntN(3) > 0 {
			g.limits++
			d += fmt.Sprintf(", rate_limit: {unit: day, requests_per_unit: %d}", g.limits)
		} else if g.IntN(3) == 0 {
			d += ", rate_limit: {unlimited: " + oneOf(g.Rand, flags) + "}"
		}
		for _, flag := range []string{"shadow_mode", "quota_mode"} {
			if g.IntN(6) == 0 {
				d += ", " + flag + ": " + oneOf(g.Rand, flags)
			}
		}
		if depth > 0 && g.IntN(2) == 0 {
			d += ", descriptors: " + g.level(depth-1)
		}
		list = append(list, "{"+d+"}")
	}
	return "[" + strings.Join(list, ", ") + "]"
}

// load returns a config as the service reads it, or nil if it refuses that.
func load(manager stats.Manager, name, text string) (root *peer.YamlRoot, config peer.RateLimitConfig) {
	defer func() {
		if recover() != nil {
			root = nil
		}
	}()
	root = peer.ConfigFileContentToYaml(name, text)
	config = peer.NewRateLimitConfigImpl([]peer.RateLimitConfigToLoad{{Name: name, ConfigYaml: root}}, manager, false)
	return root, config
}

// question returns a descriptor whose keys are among those of a config, and whose hits fit into no limit.
func question(random *rand.Rand, level []peer.YamlDescriptor) *commonv3.RateLimitDescriptor {
	d := &commonv3.RateLimitDescriptor{HitsAddend: wrapperspb.UInt64(1 << 40)}
	for len(level) > 0 {
		at := level[random.IntN(len(level))]
		value := at.Value
		if random.IntN(2) == 0 || strings.HasSuffix(value, "*") {
			value = oneOf(random, asked)
		}
		d.Entries = append(d.Entries, &commonv3.RateLimitDescriptor_Entry{Key: at.Key, Value: value})
		if level = at.Descriptors; random.IntN(3) == 0 {
			break
		}
	}
	return d
}

// answer is what limits a descriptor: a number of events, 0 for none, and whether it is enforced.
type answer struct {
	limit    uint32
	enforced bool
}

func theirs(ctx context.Context, config peer.RateLimitConfig, domain string, d *commonv3.RateLimitDescriptor) (a answer) {
	if l := config.GetLimit(ctx, domain, d); l != nil && !l.Unlimited {
		a = answer{l.Limit.GetRequestsPerUnit(), !l.ShadowMode && !l.QuotaMode}
	}
	return a
}

// TestConvertAlike: a config that envoyproxy/ratelimit loads is converted to one that limits the same descriptors
// alike. It is named where keys of one list begin alike, or texts cannot be in a Caddyfile.
func TestConvertAlike(t *testing.T) {
	shop, err := site.Open("")
	redistest.Must(t, err)
	defer func() { redistest.Must(t, shop.Close()) }()
	manager := stats.NewStatManager(counting.NewStore(counting.NewNullSink(), false), settings.NewSettings())
	const configs, questions = 200, 20
	args := []string{"rate-limit", "convert", "envoy", "--json"}
	texts, roots, loaded := map[string]string{}, map[string]*peer.YamlRoot{}, map[string]peer.RateLimitConfig{}
	for seed := uint64(0); len(texts) < configs; seed++ {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 1))}
		domain := fmt.Sprint("d", seed)
		text := "domain: " + domain + "\ndescriptors: " + g.level(2)
		root, config := load(manager, domain, text)
		if root == nil {
			continue
		}
		texts[domain], roots[domain], loaded[domain] = text, root, config
		file := filepath.Join(shop.Dir, domain)
		redistest.Must(t, os.WriteFile(file, []byte(text), 0o600))
		args = append(args, file)
	}
	convert := exec.Command(shop.Caddy, args...)
	convert.Stderr = os.Stderr
	out, err := convert.Output()
	redistest.Must(t, err)
	var converted struct {
		Caddyfile   string
		Differences []string
	}
	redistest.Must(t, json.Unmarshal(out, &converted))
	_, route, _ := strings.Cut(converted.Caddyfile, "bind 127.0.0.1\n")
	route, _, _ = strings.Cut(route, "respond 404")
	ours, err := shop.Start(site.Config{Log: "level ERROR", Stores: "store memory", Servers: "protocols h1 h2c", Routes: []string{route}, Stderr: true})
	redistest.Must(t, err)
	defer ours.Stop()
	conn, err := grpc.NewClient(ours.Addrs[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	redistest.Must(t, err)
	defer conn.Close()
	client := ratelimitv3.NewRateLimitServiceClient(conn)

	differs := map[string]bool{}
	for _, d := range converted.Differences {
		if name, what, _ := strings.Cut(d, ": "); strings.Contains(what, " is apart from key ") || strings.Contains(what, " a Caddyfile cannot have ") {
			differs[name] = true
		}
	}
	compared, limited := 0, 0
	for domain, text := range texts {
		random := rand.New(rand.NewPCG(1, uint64(len(text))))
		for range questions {
			d := question(random, roots[domain].Descriptors)
			want := theirs(t.Context(), loaded[domain], domain, d)
			got, err := client.ShouldRateLimit(t.Context(), &ratelimitv3.RateLimitRequest{Domain: domain, Descriptors: []*commonv3.RateLimitDescriptor{d}})
			redistest.Must(t, err)
			status := got.GetStatuses()[0]
			is := answer{status.GetCurrentLimit().GetRequestsPerUnit(), status.GetCode() == ratelimitv3.RateLimitResponse_OVER_LIMIT}
			if is != want && !differs[domain] {
				t.Errorf("%s\n%v: %v, want %v", text, d.GetEntries(), is, want)
			}
			if !differs[domain] {
				compared++
				if want.limit > 0 {
					limited++
				}
			}
		}
	}
	if compared < configs*questions/2 || limited < compared/4 {
		t.Errorf("%d answers compared, %d of them with a limit", compared, limited)
	}
}
