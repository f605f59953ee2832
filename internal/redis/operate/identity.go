package operate

import (
	"context"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// turnTries is how many connections look whether an address leads to one server.
const turnTries = 4

// addForeign adds the findings of sources that lead to the servers of others.
func (d *shardDiagnoser) addForeign(foreign []wire.Foreign) {
	for i := range foreign {
		f := foreign[i].Fault()
		d.add(foreign[i].Source, finding(store.SeverityWarning, codeElsewhere, f.Problem, f.Remedy))
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
