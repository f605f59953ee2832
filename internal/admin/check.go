package admin

import (
	"context"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Check diagnoses stores until ctx ends. Their config need not run.
func Check(ctx context.Context, handles []*stores.Handle) adminapi.Check {
	c := adminapi.Check{Result: adminapi.CheckOK, Stores: make([]adminapi.CheckedStore, len(handles))}
	var all sync.WaitGroup
	for i, handle := range handles {
		all.Go(func() { c.Stores[i] = checkStore(ctx, handle) })
	}
	all.Wait()
	for i := range c.Stores {
		for _, f := range c.Stores[i].Findings {
			switch {
			case f.Severity == store.SeverityError:
				c.Result = adminapi.CheckError
			case f.Severity == store.SeverityWarning && c.Result == adminapi.CheckOK:
				c.Result = adminapi.CheckWarning
			}
		}
	}
	return c
}

func checkStore(ctx context.Context, handle *stores.Handle) adminapi.CheckedStore {
	c := adminapi.CheckedStore{Name: handle.Name, Module: moduleOf(handle), Findings: []adminapi.Finding{}}
	d := diagnose(ctx, handle)
	for _, shard := range d.Shards {
		checked := adminapi.CheckedShard{Name: shard.Name, Kind: shard.Kind, Retired: shard.Retired, Servers: []adminapi.CheckedServer{}}
		for i := range shard.Servers {
			checked.Servers = append(checked.Servers, checkedServer(&shard.Servers[i]))
		}
		c.Shards = append(c.Shards, checked)
	}
	for _, severity := range []store.Severity{store.SeverityError, store.SeverityWarning, store.SeverityNote} {
		for _, f := range d.Findings {
			if f.Severity == severity {
				c.Findings = append(c.Findings, adminapi.Finding(f))
			}
		}
	}
	return c
}

// diagnose diagnoses a store, if it can be.
func diagnose(ctx context.Context, handle *stores.Handle) store.Diagnosis {
	if open := handle.EnterOpen(); open != nil {
		defer handle.Leave()
		if d, ok := open.Base.(store.Diagnoser); ok {
			return d.Diagnose(ctx)
		}
	}
	return store.Diagnosis{Findings: []store.Finding{{
		Severity: store.SeverityWarning, Code: "unchecked",
		Problem: "it cannot be checked: its module does not offer that", Remedy: "check it with the means of its module",
	}}}
}

func checkedServer(server *store.ServerDiagnosis) adminapi.CheckedServer {
	c := adminapi.CheckedServer{
		Address: server.Address, Role: server.Role, Reachable: server.Reachable, Version: server.Version,
		RoundTrip: seconds(server.RoundTrip), LagsOn: server.LagsOn,
		EvictionPolicy: server.EvictionPolicy, Persistence: server.Persistence,
	}
	if server.LagKnown {
		lag := seconds(server.Lag)
		c.Lag = &lag
	}
	if server.RightsKnown {
		missing := append([]string{}, server.MissingRights...)
		c.MissingRights = &missing
	}
	if server.SkewKnown {
		skew := seconds(server.Skew)
		c.ClockSkew = &skew
	}
	return c
}
