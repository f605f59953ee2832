package examples

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// dashboard has the fields of a Grafana dashboard that tests check.
type dashboard struct {
	UID        string
	Templating struct {
		List []struct {
			Name, Type, Definition string
		}
	}
	Panels []dashboardPanel
}

type dashboardPanel struct {
	ID         int
	Type       string
	Title      string
	Datasource struct{ UID string }
	GridPos    struct{ H, W, X, Y int }
	Targets    []struct {
		Expr       string
		Datasource struct{ UID string }
	}
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	text, err := os.ReadFile("contrib/grafana-dashboard.json")
	must(t, "read", err)
	var d dashboard
	must(t, "unmarshal", json.Unmarshal(text, &d))
	return d
}

// expressions are those of the dashboard, as Grafana would send them.
func (d dashboard) expressions() (exprs []string) {
	variables := strings.NewReplacer("$__rate_interval", "5m", "$job", ".*", "$instance", ".*", "$zone", ".*", "$store", ".*")
	for _, panel := range d.Panels {
		for _, target := range panel.Targets {
			exprs = append(exprs, variables.Replace(target.Expr))
		}
	}
	return exprs
}

// TestDashboard checks that the data source is a variable, and that panels do not overlap.
// TestQueries of contrib has Prometheus parse the queries.
func TestDashboard(t *testing.T) {
	d := readDashboard(t)
	variables := map[string]string{}
	for _, v := range d.Templating.List {
		variables[v.Name] = v.Type
	}
	for name, kind := range map[string]string{"datasource": "datasource", "job": "query", "instance": "query", "zone": "query", "store": "query"} {
		must(t, "variable "+name, want("type", variables[name], kind))
	}
	ids, places := map[int]bool{}, map[[2]int]string{}
	for _, panel := range d.Panels {
		if ids[panel.ID] {
			t.Errorf("two panels have the ID %d", panel.ID)
		}
		ids[panel.ID] = true
		for x := range panel.GridPos.W {
			for y := range panel.GridPos.H {
				place := [2]int{panel.GridPos.X + x, panel.GridPos.Y + y}
				if other, taken := places[place]; taken || place[0] >= 24 {
					t.Fatalf("%s covers %s at %v", panel.Title, other, place)
				}
				places[place] = panel.Title
			}
		}
		if panel.Type == "row" {
			continue
		}
		if panel.Datasource.UID != "${datasource}" || len(panel.Targets) == 0 {
			t.Errorf("%s: data source %s, %d targets", panel.Title, panel.Datasource.UID, len(panel.Targets))
		}
		for _, target := range panel.Targets {
			if target.Datasource.UID != "${datasource}" || strings.Contains(target.Expr, metricPrefix) != strings.Contains(target.Expr, `instance=~"$instance"`) {
				t.Errorf("%s: %s ignores the variables", panel.Title, target.Expr)
			}
		}
	}
}

var (
	selector = regexp.MustCompile(`(` + metricPrefix + `\w+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"`)
	grouping = regexp.MustCompile(`\b(?:by|without)\s*\(([^)]*)\)`)
)

// TestContribNamesExportedMetrics checks that Caddy exports every metric, label and label value in
// the dashboard and the rules.
func TestContribNamesExportedMetrics(t *testing.T) {
	alerts, err := os.ReadFile("contrib/alerts.yml")
	must(t, "read", err)
	series, err := os.ReadFile("contrib/alerts_test.yml")
	must(t, "read", err)
	texts := append(readDashboard(t).expressions(), string(alerts), string(series))
	for _, v := range readDashboard(t).Templating.List {
		texts = append(texts, v.Definition)
	}
	known, words, used := documentedMetrics(t), documentedWords(t), map[string]bool{}
	// Prometheus adds the target's labels, and histograms have le.
	all := map[string]bool{"job": true, "instance": true, "le": true}
	for _, metric := range known {
		for _, label := range strings.Split(metric.labels, ", ") {
			all[label] = true
		}
	}
	free := map[string]bool{"job": true, "instance": true, "zone": true, "store": true, "shard": true}
	for _, text := range texts {
		for _, m := range selector.FindAllStringSubmatch(text, -1) {
			name := regexp.MustCompile(`_seconds_(bucket|sum|count)$`).ReplaceAllString(m[1], "_seconds")
			metric, ok := known[name]
			if !ok {
				t.Errorf("there is no metric %s", m[1])
			}
			used[name] = true
			for _, label := range matcher.FindAllStringSubmatch(m[2], -1) {
				if !strings.Contains(" job, instance, "+metric.labels+",", " "+label[1]+",") {
					t.Errorf("%s has no label %s", m[1], label[1])
				}
				for _, value := range strings.Split(label[2], "|") {
					if !free[label[1]] && !words[value] {
						t.Errorf("%s: no %s is %s", m[1], label[1], value)
					}
				}
			}
		}
		for _, m := range grouping.FindAllStringSubmatch(text, -1) {
			for _, label := range strings.Split(m[1], ",") {
				if !all[strings.TrimSpace(label)] {
					t.Errorf("no metric has the label %s", label)
				}
			}
		}
	}
	for name := range known {
		if !used[name] {
			t.Errorf("neither the dashboard nor the rules use %s", name)
		}
	}
}

// TestProblemsHaveAlerts checks that each kind of problem is one of RateLimitProblem, or has an
// alert of its own, or ends by itself.
func TestProblemsHaveAlerts(t *testing.T) {
	elsewhere := map[adminapi.ProblemKind]string{
		adminapi.ProblemNoPrimary:   "RateLimitPrimaryAway",
		adminapi.ProblemChargesWait: "RateLimitChargesUnsent",
		adminapi.ProblemStoreErrors: "RateLimitStoreErrors",
		adminapi.ProblemUnchecked:   "RateLimitUnchecked",
		adminapi.ProblemClockJumped: "", // ends by itself
		adminapi.ProblemDoubtfulKey: "", // a plugin's placeholder has it for ever
		// A proxy has it for ever.
		adminapi.ProblemUnidentified: "",
		adminapi.ProblemMore:         "", // is of the others
	}
	text, err := os.ReadFile("contrib/alerts.yml")
	must(t, "read", err)
	kinds := regexp.MustCompile(`caddy_rate_limit_problems\{kind=~"([^"]*)"\}`).FindStringSubmatch(string(text))
	must(t, "alerts.yml", want("having kinds of problems", len(kinds), 2))
	for _, kind := range adminapi.ProblemKinds {
		alert, isElsewhere := elsewhere[kind]
		must(t, string(kind), want("one of RateLimitProblem", slices.Contains(strings.Split(kinds[1], "|"), string(kind)), !isElsewhere))
		must(t, string(kind), want("there being "+alert, strings.Contains(string(text), "- alert: "+alert), true))
	}
}

const metricPrefix = "caddy_rate_limit_"

// exportedMetric describes a metric as docs/operating.md does.
type exportedMetric struct{ kind, labels string }

var (
	typeLine   = regexp.MustCompile(`(?m)^# TYPE (` + metricPrefix + `\w+) (\w+)$`)
	sampleLine = regexp.MustCompile(`(?m)^(` + metricPrefix + `\w+?)(_bucket|_sum|_count)?\{(.*)\} \S+$`)
	labelName  = regexp.MustCompile(`(\w+)="`)
)

// exportedMetrics returns the limiter's metrics that Caddy exports after every counted event has
// happened.
func exportedMetrics(t *testing.T) map[string]exportedMetric {
	t.Helper()
	servers := caddytest.StartShards(t, 1, 1)
	primary := servers[0].Primary.Addr()
	proxy := redistest.StartProxy(t, primary)
	global := strings.Replace(servers.Store("check_timeout 2s", "charge_timeout 2s", "max_new_buckets 1"), primary, proxy.Addr(), 1)
	global = strings.Replace(global, "{", "{\nstore memory memory", 1)
	c := caddytest.Start(t, `
{
	{{global}}
	`+global+`
}
{{site}} {
	rate_limit {
		zone api {
			key {header.X-Key}
			events {header.X-Plan} 1000
			window 1h
			warn 80
			max_wait 1s
			reset_status 418
			match {
				path /api
			}
		}
		zone takes {
			key {header.X-Key}
			events 100
			window 1h
			charge before
			batch 2
			match {
				path /takes
			}
		}
	}
	rate_limit {
		store memory
		zone memory {
			key {header.X-Key}
			events 1
			window 1h
			match {
				path /memory
			}
		}
	}
	respond ok
}
`)
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

// metricsSection returns the part of docs/operating.md about metrics.
func metricsSection(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("docs/operating.md")
	must(t, "read", err)
	_, section, ok := strings.Cut(string(text), "\n## Metrics\n")
	must(t, "docs/operating.md", want("having a section about metrics", ok, true))
	section, _, _ = strings.Cut(section, "\n## ")
	return section
}

// documentedMetrics returns those of docs/operating.md.
func documentedMetrics(t *testing.T) map[string]exportedMetric {
	t.Helper()
	found := map[string]exportedMetric{}
	for _, item := range regexp.MustCompile("(?m)^- `("+metricPrefix+"\\w+)`, (\\w+) by ([^:]*): ").FindAllStringSubmatch(metricsSection(t), -1) {
		labels := strings.Split(strings.ReplaceAll(item[3], "`", ""), ", ")
		slices.Sort(labels)
		found[item[1]] = exportedMetric{kind: item[2], labels: strings.Join(labels, ", ")}
	}
	return found
}

// TestMetricsAreDocumented checks that docs/operating.md names exactly the exported metrics and
// labels.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	exported, documented := exportedMetrics(t), documentedMetrics(t)
	for name, metric := range exported {
		if documented[name] != metric {
			t.Errorf("%s is a %s of %s; docs/operating.md says %+v", name, metric.kind, metric.labels, documented[name])
		}
	}
	for name := range documented {
		if _, ok := exported[name]; !ok {
			t.Errorf("docs/operating.md has %s, which is not exported", name)
		}
	}
}

// TestLabelValuesAreDocumented checks that docs/operating.md names the values of labels with few.
func TestLabelValuesAreDocumented(t *testing.T) {
	values := []string{
		"allowed", "refused", "would_refuse", "error_allowed", "error_refused", "charged", "free", "refunded",
		"lost", "uncertain", "expired", "fetched", "returned", "checks", "charges",
		string(store.RolePrimary), string(store.RoleReplica),
	}
	for _, kind := range store.ErrorKinds {
		values = append(values, string(kind))
	}
	for _, state := range store.ServerStates {
		values = append(values, string(state))
	}
	for op := algorithm.Check; op <= algorithm.Peek; op++ {
		values = append(values, op.String())
	}
	for _, kind := range adminapi.ProblemKinds {
		values = append(values, string(kind))
	}
	documented := documentedWords(t)
	for _, value := range values {
		if !documented[value] {
			t.Errorf("docs/operating.md does not name %s", value)
		}
	}
}

// documentedWords returns the words between backticks in the section about metrics.
func documentedWords(t *testing.T) map[string]bool {
	t.Helper()
	words := map[string]bool{}
	for _, word := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(metricsSection(t), -1) {
		words[word[1]] = true
	}
	return words
}
