package admin

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestMetricsCountNoSources: rules take a shard of which any server is up for one that answers.
func TestMetricsCountNoSources(t *testing.T) {
	found := make(chan prometheus.Metric, 100)
	collectShard(found, "s", &store.ShardFigures{
		Name: "a", Servers: []store.ServerFigures{{Role: store.RolePrimary, State: store.ServerLeftOut}},
		Sources: []store.ServerFigures{{Role: store.RoleSentinel, State: store.ServerUp}, {Role: store.RoleNode, State: store.ServerUp}},
	})
	close(found)
	for m := range found {
		var got dto.Metric
		if err := m.Write(&got); err != nil {
			t.Fatal(err)
		}
		for _, label := range got.GetLabel() {
			if role := label.GetValue(); label.GetName() == "role" && store.Role(role).IsSource() || label.GetName() == "state" && role == string(store.ServerUp) && got.GetGauge().GetValue() > 0 {
				t.Errorf("it has %v", &got)
			}
		}
	}
}
