package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

const metricPrefix = "caddy_rate_limit_"

// exportedMetric is a metric of /metrics, in the words of its table in
// docs/metrics.md.
type exportedMetric struct{ kind, labels string }

var (
	typeLine   = regexp.MustCompile(`(?m)^# TYPE (` + metricPrefix + `\w+) (\w+)$`)
	sampleLine = regexp.MustCompile(`(?m)^(` + metricPrefix + `\w+?)(_bucket|_sum|_count)?\{(.*)\} \S+$`)
	labelName  = regexp.MustCompile(`(\w+)="`)
)

// exportedMetrics are the limiter's that a Caddy exports with a Redis store to
// which everything has happened that is counted.
func exportedMetrics(t *testing.T) map[string]exportedMetric {
	t.Helper()
	servers := caddytest.StartShards(t, 1, 1)
	primary := servers[0].Primary.Addr()
	proxy := redistest.StartProxy(t, primary)
	global := strings.Replace(servers.Store("check_timeout 300ms", "charge_timeout 300ms", "max_new_buckets 1"), primary, proxy.Addr(), 1)
	c := startWith(t, global, pathZone("api", "events 1000")+pathZone("takes", "charge before", "batch 2"), "respond ok")
	overflowed := func() error {
		for i := range 10 {
			c.Get("/api", fmt.Sprint("X-Key: made-up-", i))
		}
		return want("having overflowed", c.Metric(metricPrefix+`overflowed_requests_total{zone="api"}`) != "", true)
	}
	eventually(t, "new clients overflow", overflowed)
	c.Get("/takes", "X-Key: alice")
	must(t, "swallow replies", proxy.SwallowReplies())
	eventually(t, "the store fails", func() error {
		c.Get("/api", "X-Key: made-up-0")
		for range 3 {
			c.Get("/takes", "X-Key: alice")
		}
		_, text := c.AdminCall(http.MethodGet, "/metrics", "", "")
		return errors.Join(want("errors being counted", strings.Contains(text, "\n"+metricPrefix+"store_errors_total{"), true),
			want("undelivered charges being counted", strings.Contains(text, "\n"+metricPrefix+"undelivered_total{"), true))
	})
	_, text := c.AdminCall(http.MethodGet, "/metrics", "", "")
	labels := map[string][]string{}
	for _, sample := range sampleLine.FindAllStringSubmatch(text, -1) {
		for _, label := range labelName.FindAllStringSubmatch(sample[3], -1) {
			if name := sample[1]; label[1] != "le" && !slices.Contains(labels[name], label[1]) {
				labels[name] = append(labels[name], label[1])
			}
		}
	}
	found := map[string]exportedMetric{}
	for _, m := range typeLine.FindAllStringSubmatch(text, -1) {
		slices.Sort(labels[m[1]])
		found[m[1]] = exportedMetric{kind: m[2], labels: strings.Join(labels[m[1]], ", ")}
	}
	return found
}

// documentedMetrics are those of docs/metrics.md.
func documentedMetrics(t *testing.T) map[string]exportedMetric {
	t.Helper()
	text, err := os.ReadFile("docs/metrics.md")
	must(t, "read", err)
	found := map[string]exportedMetric{}
	for _, row := range regexp.MustCompile("(?m)^\\| `("+metricPrefix+"\\w+)` \\| (\\w+) \\| ([^|]*) \\|").FindAllStringSubmatch(string(text), -1) {
		labels := strings.Split(strings.ReplaceAll(row[3], "`", ""), ", ")
		slices.Sort(labels)
		found[row[1]] = exportedMetric{kind: row[2], labels: strings.Join(labels, ", ")}
	}
	return found
}

// TestMetricsAreDocumented: docs/metrics.md names exactly the metrics, with
// their labels.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	exported, documented := exportedMetrics(t), documentedMetrics(t)
	for name, metric := range exported {
		if documented[name] != metric {
			t.Errorf("%s is a %s of %s; docs/metrics.md says %+v", name, metric.kind, metric.labels, documented[name])
		}
	}
	for name := range documented {
		if _, ok := exported[name]; !ok {
			t.Errorf("docs/metrics.md has %s, which is not exported", name)
		}
	}
}

// TestLabelValuesAreDocumented: docs/metrics.md names what labels can be that
// have few values.
func TestLabelValuesAreDocumented(t *testing.T) {
	values := []string{
		"allowed", "refused", "would_refuse", "error_allowed", "error_refused", "charged", "free", "refunded",
		"lost", "uncertain", "expired", "fetched", "returned", "checks", "charges",
		redis.KindTimeout, redis.KindConnection, redis.KindBreaker, redis.KindOverload, redis.KindLoading, redis.KindBusy, redis.KindReadOnly,
		redis.KindMemory, redis.KindMisconf, redis.KindAuth, redis.KindForeignData, redis.KindUnfound, redis.KindOther,
		string(store.RolePrimary), string(store.RoleReplica),
	}
	for _, state := range store.ServerStates {
		values = append(values, string(state))
	}
	for op := algorithm.Check; op <= algorithm.Peek; op++ {
		values = append(values, op.String())
	}
	documented := documentedWords(t)
	for _, value := range values {
		if !documented[value] {
			t.Errorf("docs/metrics.md does not name %s", value)
		}
	}
}

// documentedWords are the words between backticks in docs/metrics.md.
func documentedWords(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("docs/metrics.md")
	must(t, "read", err)
	words := map[string]bool{}
	for _, word := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(string(text), -1) {
		words[word[1]] = true
	}
	return words
}
