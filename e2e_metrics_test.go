package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
)

const measuredSite = `
{
	{{global}}
	%s
}
{{site}} {
	route {
		rate_limit {
			zone api {
				key {header.X-Key}
				events %d
				window 1h
				charge %s
			}
		}
		respond /free 304
		respond ok
	}
}
`

// seriesOf are the lines of /metrics that the limiter exports, by name and labels.
func seriesOf(c *caddytest.Caddy) map[string]string {
	c.T.Helper()
	_, text := c.AdminCall(http.MethodGet, "/metrics", "", "")
	series := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && strings.HasPrefix(name, "caddy_rate_limit_") {
			series[name+"}"] = value
		}
	}
	return series
}

// TestClientsMakeNoSeries: 100,000 client keys, 10 in each request, all of which
// come a second time and are refused.
func TestClientsMakeNoSeries(t *testing.T) {
	t.Parallel()
	const zones, clients = 10, 10_000
	servers := caddytest.StartShards(t, 2, 1)
	text := ""
	for n := range zones {
		text += fmt.Sprintf("zone z%d {\n\t\t\t\tkey {header.X-Key}-%[1]d\n\t\t\t\tevents 1\n\t\t\t\twindow 1h\n\t\t\t}\n\t\t\t", n)
	}
	c := caddytest.Start(t, fmt.Sprintf("{\n\t{{global}}\n\t%s\n}\n{{site}} {\n\troute {\n\t\trate_limit {\n\t\t\t%s\n\t\t}\n\t\trespond ok\n\t}\n}\n",
		servers.Store(caddytest.Patient...), text))
	var before map[string]string
	client := 0
	eventually(t, "both shards were asked and charged", func() error {
		client++
		c.Get("/", fmt.Sprint("X-Key: client ", client/2))
		before = seriesOf(c)
		for _, call := range []string{
			`operation="check",role="primary"`, `operation="check",role="replica"`, `operation="charge",role="primary"`,
		} {
			for _, shard := range []string{"a", "b"} {
				if series := `caddy_rate_limit_store_duration_seconds_count{` + call + `,shard="` + shard + `",store="default"}`; before[series] == "" {
					return errors.New("no series " + series)
				}
			}
		}
		return nil
	})
	for _, status := range []int{http.StatusOK, http.StatusTooManyRequests} {
		result, err := loadgen.Run(t.Context(), loadgen.Options{
			Addr: c.Addr, Connections: 16, Requests: clients, Header: "X-Key", Duration: 10 * time.Minute,
			Key: func(n int64) string { return strconv.FormatInt(n, 10) },
		})
		must(t, "load", err)
		must(t, fmt.Sprint(result.Status), want("answers with the status", result.Status[status], clients))
	}
	after := seriesOf(c)
	for name := range after {
		if _, ok := before[name]; !ok {
			t.Errorf("new series: %s", name)
		}
	}
	must(t, "series", want("number", len(after), len(before)))
}

// TestMetricsAreContinuous counts through ten reloads, one of them rejected,
// and tells what became of the cost.
func TestMetricsAreContinuous(t *testing.T) {
	t.Parallel()
	for kind, store := range bothStores(caddytest.StartShards(t, 1, 1), caddytest.Patient...) {
		for charge, free := range map[string]string{"after": "free", "before": "refunded"} {
			t.Run(kind+" "+charge, func(t *testing.T) {
				c := caddytest.Start(t, fmt.Sprintf(measuredSite, store, 1000, charge))
				for n := 1; n <= 10; n++ {
					a, b := c.Get("/", "X-Key: "+charge), c.Get("/free", "X-Key: "+charge)
					must(t, "requests", errors.Join(want("status", a.StatusCode, http.StatusOK), want("free", b.StatusCode, http.StatusNotModified)))
					if n == 5 {
						status, _ := c.Load(fmt.Sprintf(measuredSite, store, 0, charge))
						must(t, "load", want("accepted", status == http.StatusOK, false))
					} else {
						c.MustLoad(fmt.Sprintf(measuredSite, store, 1000+n, charge))
					}
					count := func(series string) string { return seriesOf(c)["caddy_rate_limit_"+series] }
					must(t, fmt.Sprintf("reload %d", n), errors.Join(
						want("requests", count(`requests_total{zone="api"}`), fmt.Sprint(2*n)),
						want("allowed", count(`decisions_total{outcome="allowed",zone="api"}`), fmt.Sprint(2*n)),
						want("charged", count(`settled_cost_total{kind="charged",zone="api"}`), fmt.Sprint(n)),
						want(free, count(`settled_cost_total{kind="`+free+`",zone="api"}`), fmt.Sprint(n))))
				}
			})
		}
	}
}
