package admin

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// stateCollector collects the state of the running config's stores whenever
// metrics are read. It has no state of its own, so that it can be registered anew
// for each config.
type stateCollector struct{}

var (
	serversDesc = stateDesc("servers",
		"Servers of a shard by role and state.", "store", "shard", "role", "state")
	breakerOpenDesc = stateDesc("breaker_open",
		"Servers of a shard that are not called for a purpose, because calls failed.", "store", "shard", "role", "purpose")
	replicaLagDesc = stateDesc("replica_lag_seconds",
		"Lag of the slowest replica of a shard.", "store", "shard")

	problemsDesc = stateDesc("problems",
		"Problems that status lists, by kind.", "kind")

	ledgerBucketsDesc = stateDesc("ledger_buckets",
		"Buckets that this process remembers.", "store")
	ledgerInFlightDesc = stateDesc("ledger_in_flight",
		"Cost of requests that were admitted and are not settled yet.", "store")
	ledgerUnsentDesc = stateDesc("ledger_unsent",
		"Requests whose charges wait to be sent.", "store")
	ledgerUncertainDesc = stateDesc("ledger_uncertain",
		"Buckets with a charge whose outcome is unknown.", "store")
	localRefusalsDesc = stateDesc("ledger_local_refusals_total",
		"Requests refused from what the ledger knows, without a call to the store.", "store")
	unaskedAdmissionsDesc = stateDesc("ledger_unasked_admissions_total",
		"Requests admitted from what the ledger knows, without a check.", "store")
	batchFetchesDesc = stateDesc("batch_fetches_total",
		"Batches that were requested from the store.", "store")
	batchTokensDesc = stateDesc("batch_tokens_total",
		"Events of batches: fetched from the store, returned to it, or expired with their window.", "store", "kind")
)

func stateDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName("caddy", "rate_limit", name), help, labels, nil)
}

// Describe implements [prometheus.Collector].
func (stateCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		serversDesc, breakerOpenDesc, replicaLagDesc, problemsDesc,
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
	collectProblems(found, app.Watch().Problems())
	for _, handle := range app.Stores() {
		if open := handle.EnterOpen(); open != nil {
			collectStore(found, open)
			handle.Leave()
		}
	}
}

// collectProblems collects how many problems of each kind there are, also of those of which there
// is none.
func collectProblems(found chan<- prometheus.Metric, all []adminapi.Problem) {
	n := map[adminapi.ProblemKind]int{}
	for _, p := range all {
		n[p.Kind]++
	}
	for _, k := range adminapi.ProblemKinds {
		found <- gauge(problemsDesc, float64(n[k]), string(k))
	}
}

func collectStore(found chan<- prometheus.Metric, open *stores.Opened) {
	if open.Operable != nil {
		for _, shard := range open.Operable.Shards() {
			collectShard(found, open.Name, &shard)
		}
	}
	collectLedger(found, open.Name, open.Accounts.Figures(), open.IsRemote)
}

func collectShard(found chan<- prometheus.Metric, name string, shard *store.ShardFigures) {
	// By role and state, and by role and purpose.
	servers, open := map[[2]string]int{}, map[[2]string]int{}
	for _, role := range []store.Role{store.RolePrimary, store.RoleReplica} {
		for _, state := range store.ServerStates {
			servers[[2]string{string(role), string(state)}] = 0
		}
	}
	var worst time.Duration
	anyLag := false
	for i := range shard.Servers {
		server := &shard.Servers[i]
		servers[[2]string{string(server.Role), string(server.State)}]++
		for j := range server.Lanes {
			lane := &server.Lanes[j]
			n := 0
			if !lane.IsUp() {
				n = 1
			}
			open[[2]string{string(server.Role), lane.Purpose}] += n
		}
		if server.LagKnown {
			worst, anyLag = max(worst, server.Lag), true
		}
	}
	for key, n := range servers {
		found <- gauge(serversDesc, float64(n), name, shard.Name, key[0], key[1])
	}
	for key, n := range open {
		found <- gauge(breakerOpenDesc, float64(n), name, shard.Name, key[0], key[1])
	}
	if anyLag {
		found <- gauge(replicaLagDesc, worst.Seconds(), name, shard.Name)
	}
}

// collectLedger collects the figures of a store's ledger. Those of a local store
// know of requests in flight only.
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
