package deployment

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
	"sigs.k8s.io/yaml"
)

var promQL = parser.NewParser(parser.Options{})

// TestPrometheusConfig loads the configuration of Prometheus and its rules, beside the files that
// the compose file puts there.
func TestPrometheusConfig(t *testing.T) {
	dir, mounted := t.TempDir(), 0
	for _, volume := range loadCompose(t).Services["prometheus"].Volumes {
		if path.Dir(volume.Target) != "/etc/prometheus" {
			continue
		}
		mounted++
		text, err := os.ReadFile(volume.Source)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path.Base(volume.Target)), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	conf, err := config.LoadFile(filepath.Join(dir, "prometheus.yml"), false, promslog.NewNopLogger())
	if err != nil {
		t.Fatal(err)
	}
	if scraped, err := conf.GetScrapeConfigs(); err != nil || len(scraped) != 1 {
		t.Errorf("%d scrape configs, %v", len(scraped), err)
	}
	if mounted != 2 || len(conf.RuleFiles) != 1 {
		t.Errorf("%d files in /etc/prometheus, and the rules are %q", mounted, conf.RuleFiles)
	}
	for _, file := range conf.RuleFiles {
		if _, errs := rulefmt.ParseFile(file, false, model.UTF8Validation, promQL, promslog.NewNopLogger()); errs != nil {
			t.Errorf("%s: %v", file, errs)
		}
	}
}

// alertTests has the fields of alerts_test.yml, which is in the format of promtool.
type alertTests struct {
	RuleFiles []string       `json:"rule_files"`
	Interval  model.Duration `json:"evaluation_interval"`
	Tests     []alertTest
}

type alertTest struct {
	Name     string
	Interval model.Duration
	Series   []struct{ Series, Values string } `json:"input_series"`
	Cases    []alertCase                       `json:"alert_rule_test"`
}

type alertCase struct {
	At     model.Duration `json:"eval_time"`
	Alert  string         `json:"alertname"`
	Firing []struct {
		Labels      map[string]string `json:"exp_labels"`
		Annotations map[string]string `json:"exp_annotations"`
	} `json:"exp_alerts"`
}

// firing are the alerts that the case expects, as those of a rule are written.
func (c alertCase) firing() (alerts []string) {
	for _, alert := range c.Firing {
		set := labels.NewBuilder(labels.FromMap(alert.Labels)).Set(labels.AlertName, c.Alert)
		alerts = append(alerts, fmt.Sprint(set.Labels(), labels.FromMap(alert.Annotations)))
	}
	return alerts
}

// TestAlerts evaluates the rules over the series of alerts_test.yml, as `promtool test rules` does,
// and compares which alerts fire.
func TestAlerts(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(contrib, "alerts_test.yml"))
	if err != nil {
		t.Fatal(err)
	}
	var tests alertTests
	if err := yaml.UnmarshalStrict(text, &tests); err != nil {
		t.Fatal(err)
	}
	for i := range tests.RuleFiles {
		tests.RuleFiles[i] = filepath.Join(contrib, tests.RuleFiles[i])
	}
	if len(tests.Tests) == 0 {
		t.Error("there are no tests")
	}
	for _, test := range tests.Tests {
		t.Run(test.Name, func(t *testing.T) { test.run(t, time.Duration(tests.Interval), tests.RuleFiles) })
	}
}

func (test alertTest) run(t *testing.T, interval time.Duration, ruleFiles []string) {
	load := "load " + test.Interval.String() + "\n"
	for _, s := range test.Series {
		load += "  " + s.Series + " " + s.Values + "\n"
	}
	data, err := promqltest.NewLazyLoader(load, promqltest.LazyLoaderOpts{EnableAtModifier: true, EnableNegativeOffset: true})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	data.SubqueryInterval = interval
	groups, errs := rules.NewManager(&rules.ManagerOptions{
		QueryFunc: rules.EngineQueryFunc(data.QueryEngine(), data.Storage()), Appendable: data.Storage(), Context: t.Context(),
		NotifyFunc: func(context.Context, string, ...*rules.Alert) {}, Logger: promslog.NewNopLogger(), Parser: promQL,
	}).LoadGroups(time.Duration(test.Interval), labels.EmptyLabels(), "", nil, false, ruleFiles...)
	if errs != nil {
		t.Fatal(errs)
	}
	end := slices.MaxFunc(test.Cases, func(a, b alertCase) int { return int(a.At - b.At) }).At
	compared := 0
	for at := time.Duration(0); at <= time.Duration(end); at += interval {
		firing := map[string][]string{}
		data.WithSamplesTill(time.Unix(0, 0).UTC().Add(at), func(err error) {
			if err != nil {
				t.Fatal(err)
			}
			for _, group := range groups {
				group.Eval(data.Context(), time.Unix(0, 0).UTC().Add(at))
				for _, rule := range group.Rules() {
					if err := rule.LastError(); err != nil {
						t.Fatalf("%s after %v: %v", rule.Name(), at, err)
					}
				}
				for _, rule := range group.AlertingRules() {
					for _, alert := range rule.ActiveAlerts() {
						if alert.State == rules.StateFiring {
							firing[rule.Name()] = append(firing[rule.Name()], fmt.Sprint(alert.Labels, alert.Annotations))
						}
					}
				}
			}
		})
		for _, c := range test.Cases {
			if time.Duration(c.At) != at {
				continue
			}
			compared++
			if got, want := slices.Sorted(slices.Values(firing[c.Alert])), slices.Sorted(slices.Values(c.firing())); !slices.Equal(got, want) {
				t.Errorf("%s after %v:\n%q, want\n%q", c.Alert, at, got, want)
			}
		}
	}
	if compared == 0 || compared != len(test.Cases) {
		t.Errorf("compared %d of %d cases; eval_time has to be a multiple of evaluation_interval", compared, len(test.Cases))
	}
}

// TestQueries parses the queries of the dashboard, as Grafana would send them.
func TestQueries(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(contrib, "grafana-dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	variables := strings.NewReplacer("$__rate_interval", "5m", "$job", ".*", "$instance", ".*", "$zone", ".*", "$store", ".*")
	parsed := 0
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			parsed++
			if _, err := promQL.ParseExpr(variables.Replace(target.Expr)); err != nil {
				t.Errorf("%s: %v", panel.Title, err)
			}
		}
	}
	if parsed == 0 {
		t.Error("the dashboard has no queries")
	}
}
