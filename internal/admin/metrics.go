package admin

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// stateCollector tells, whenever metrics are read, how the stores of the running
// config are. It has no state of its own, so that it can be registered anew for
// each config.
type stateCollector struct{}

var (
	serversDesc = stateDesc("servers",
		"Servers of a shard by what they are to it and whether they are used.", "store", "shard", "role", "state")
	breakerOpenDesc = stateDesc("breaker_open",
		"Servers of a shard that are left out for a purpose, because calls of them failed.", "store", "shard", "role", "purpose")
	replicaLagDesc = stateDesc("replica_lag_seconds",
		"How far that replica of a shard is behind that is behind the most.", "store", "shard")

	ledgerBucketsDesc = stateDesc("ledger_buckets",
		"Buckets of which this process knows something that the store does not say.", "store")
	ledgerInFlightDesc = stateDesc("ledger_in_flight",
		"Cost of requests that were admitted and are not settled.", "store")
	ledgerUnsentDesc = stateDesc("ledger_unsent",
		"Requests whose charges wait to be sent.", "store")
	ledgerUncertainDesc = stateDesc("ledger_uncertain",
		"Buckets with a charge of which it is not known whether it counted.", "store")
	localRefusalsDesc = stateDesc("ledger_local_refusals_total",
		"Refusals by what is known, without a call to the store.", "store")
	unaskedAdmissionsDesc = stateDesc("ledger_unasked_admissions_total",
		"Admissions by what is known, without a check.", "store")
	batchFetchesDesc = stateDesc("batch_fetches_total",
		"Batches that were asked for.", "store")
	batchTokensDesc = stateDesc("batch_tokens_total",
		"Events that came with batches, went back to the store, or were lost with their window.", "store", "kind")
)

func stateDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName("caddy", "rate_limit", name), help, labels, nil)
}

// Describe implements [prometheus.Collector].
func (stateCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		serversDesc, breakerOpenDesc, replicaLagDesc,
		ledgerBucketsDesc, ledgerInFlightDesc, ledgerUnsentDesc, ledgerUncertainDesc,
		localRefusalsDesc, unaskedAdmissionsDesc, batchFetchesDesc, batchTokensDesc,
	} {
		descs <- desc
	}
}

// Collect implements [prometheus.Collector].
func (stateCollector) Collect(found chan<- prometheus.Metric) {
	app, err := runningApp()
	if err != nil {
		return
	}
	for _, use := range app.Stores() {
		if open := use.EnterOpen(); open != nil {
			collectStore(found, open)
			use.Leave()
		}
	}
}

func collectStore(found chan<- prometheus.Metric, open *stores.Opened) {
	if s, ok := open.Base.(store.Sharded); ok {
		for _, shard := range s.Shards() {
			collectShard(found, open.Name, &shard)
		}
	}
	collectLedger(found, open.Name, open.Accounts.Figures(), open.Ledger != nil)
}

// roleAndState and roleAndPurpose are what servers are counted by.
type (
	roleAndState struct {
		role  store.Role
		state store.ServerState
	}
	roleAndPurpose struct {
		role    store.Role
		purpose string
	}
)

func collectShard(found chan<- prometheus.Metric, name string, shard *store.Shard) {
	servers, left := map[roleAndState]int{}, map[roleAndPurpose]int{}
	for _, role := range []store.Role{store.RolePrimary, store.RoleReplica} {
		for _, state := range store.ServerStates {
			servers[roleAndState{role, state}] = 0
		}
	}
	var worst time.Duration
	anyLag := false
	for i := range shard.Servers {
		server := &shard.Servers[i]
		servers[roleAndState{server.Role, server.State}]++
		for j := range server.Lanes {
			lane := roleAndPurpose{server.Role, server.Lanes[j].Purpose}
			n := 0
			if !server.Lanes[j].IsUp() {
				n = 1
			}
			left[lane] += n
		}
		if server.LagKnown {
			worst, anyLag = max(worst, server.Lag), true
		}
	}
	for key, n := range servers {
		found <- gauge(serversDesc, float64(n), name, shard.Name, string(key.role), string(key.state))
	}
	for key, n := range left {
		found <- gauge(breakerOpenDesc, float64(n), name, shard.Name, string(key.role), key.purpose)
	}
	if anyLag {
		found <- gauge(replicaLagDesc, worst.Seconds(), name, shard.Name)
	}
}

// collectLedger tells what is known of buckets. A store that answers at once has
// a ledger of what is in flight alone.
func collectLedger(found chan<- prometheus.Metric, name string, f ledger.Figures, isRemote bool) {
	found <- gauge(ledgerBucketsDesc, float64(f.Buckets), name)
	found <- gauge(ledgerInFlightDesc, float64(f.InFlight), name)
	if !isRemote {
		return
	}
	found <- gauge(ledgerUnsentDesc, float64(f.Unsent), name)
	found <- gauge(ledgerUncertainDesc, float64(f.Uncertain), name)
	found <- counted(localRefusalsDesc, f.LocalRefusals, name)
	found <- counted(unaskedAdmissionsDesc, f.UnaskedAdmissions, name)
	found <- counted(batchFetchesDesc, f.Fetches, name)
	found <- counted(batchTokensDesc, f.TokensFetched, name, "fetched")
	found <- counted(batchTokensDesc, f.TokensReturned, name, "returned")
	found <- counted(batchTokensDesc, f.TokensExpired, name, "expired")
}

func gauge(desc *prometheus.Desc, value float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
}

func counted(desc *prometheus.Desc, n int64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), labels...)
}

var _ prometheus.Collector = stateCollector{}
