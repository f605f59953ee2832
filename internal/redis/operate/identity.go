package operate

import (
	"context"
	"errors"
	"slices"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// turnTries is how many connections look whether an address leads to one server.
const turnTries = 4

// addSources adds the findings of sources that lead to the servers of others.
func (d *shardDiagnoser) addSources(sources []wire.Source) {
	for i := range sources {
		source := &sources[i]
		if source.IsForeign {
			f := source.Fault()
			d.add(source.Addr, finding(store.SeverityWarning, codeElsewhere, f.Problem, f.Remedy))
		}
	}
	d.sources = sources
}

// wantQuorum adds a finding if most sources are silent. A search does not wait for one that was late.
func (d *shardDiagnoser) wantQuorum() {
	for i := range d.sources {
		source := &d.sources[i]
		source.IsSilent = source.Err != nil && !slices.ContainsFunc(d.report.Servers, func(v store.ServerDiagnosis) bool {
			return v.Address == source.Addr && v.Role != store.RoleSentinel && v.Reachable
		})
	}
	var f *wire.Fault
	if errors.As(wire.QuorumFault(d.sources, d.shard.InCluster), &f) {
		d.add("", finding(store.SeverityError, codeNoQuorum, f.Problem, f.Remedy))
	}
}

// lookForTurns adds the finding of an address whose connections reach several servers in turn.
func (v *serverDiagnoser) lookForTurns(ctx context.Context) {
	idBy := func(client *goredis.Client) (id string) {
		_ = v.call(ctx, func(ctx context.Context) error {
			text, err := client.Info(ctx).Result()
			id = parseInfo(text)["run_id"]
			return err
		})
		return id
	}
	// Behind some proxies the ID is missing, or differs on one connection, and says nothing.
	own := idBy(v.client)
	switch {
	case v.report.ID == "", own != "" && own != v.report.ID:
		v.findFault(store.SeverityNote, codeVague, wire.ErrVague)
		return
	case own == "":
		return
	}
	for range turnTries {
		client := wire.NewClient(v.report.Address, &v.shard.Options, true)
		id := idBy(client)
		_ = client.Close()
		if id != "" && id != own {
			v.findFault(store.SeverityError, codeTurns, wire.ErrTurns)
			return
		}
	}
}
