package admin

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// severities is the order in which findings are shown.
var severities = []store.Severity{store.SeverityError, store.SeverityWarning, store.SeverityNote}

// Check diagnoses the stores of a config until ctx ends, and adds the warnings about its routes. The config
// need not run.
func Check(ctx context.Context, handles []*stores.Handle, warnings []lint.Warning) adminapi.Check {
	c := adminapi.Check{Result: adminapi.CheckOK, Stores: make([]adminapi.CheckedStore, len(handles)), Routes: []store.Finding{}}
	for i := range warnings {
		w := &warnings[i]
		c.Routes = append(c.Routes, store.Finding{Severity: store.SeverityWarning, Code: w.Rule, Address: w.Place, Problem: w.About(), Remedy: w.Advice()})
		c.Result = adminapi.CheckWarning
	}
	var all sync.WaitGroup
	for i, handle := range handles {
		all.Go(func() {
			c.Stores[i] = adminapi.CheckedStore{Name: handle.Name, Module: moduleOf(handle), Diagnosis: diagnose(ctx, handle)}
		})
	}
	all.Wait()
	findShared(c.Stores)
	for i := range c.Stores {
		// An empty list is no null in JSON.
		findings := append([]store.Finding{}, c.Stores[i].Findings...)
		slices.SortStableFunc(findings, func(a, b store.Finding) int {
			return cmp.Compare(slices.Index(severities, a.Severity), slices.Index(severities, b.Severity))
		})
		c.Stores[i].Findings = findings
		switch {
		case len(findings) == 0:
		case findings[0].Severity == store.SeverityError:
			c.Result = adminapi.CheckError
		case findings[0].Severity == store.SeverityWarning && c.Result == adminapi.CheckOK:
			c.Result = adminapi.CheckWarning
		}
	}
	return c
}

// diagnose diagnoses a store, if it can be.
func diagnose(ctx context.Context, handle *stores.Handle) store.Diagnosis {
	if open := handle.EnterOpen(); open != nil {
		defer handle.Leave()
		if open.Operable != nil {
			return open.Operable.Diagnose(ctx)
		}
	}
	return store.Diagnosis{Findings: []store.Finding{{
		Severity: store.SeverityWarning, Code: "unchecked",
		Problem: "it cannot be checked: its module does not offer that", Remedy: "check it with the means of its module",
	}}}
}

// findShared adds findings of servers that two shards of a store have, or two stores under
// the same keys.
func findShared(checked []adminapi.CheckedStore) {
	type use struct {
		store                    int
		shard, address, keyspace string
	}
	uses := map[string][]use{}
	for i := range checked {
		for _, shard := range checked[i].Shards {
			for j := range shard.Servers {
				server := &shard.Servers[j]
				if server.ID == "" {
					continue
				}
				for _, other := range uses[server.ID] {
					f := store.Finding{Code: "same_server", Shard: shard.Name, Address: server.Address}
					switch {
					case other.store == i && other.shard != shard.Name:
						f.Severity, f.Problem = store.SeverityError, fmt.Sprintf("it is the same server as %s of shard %s", other.address, other.shard)
						f.Remedy = "give each shard servers of its own, or remove one of the shards"
					case other.store != i && other.keyspace == shard.Keyspace:
						f.Severity, f.Problem = store.SeverityWarning, fmt.Sprintf("store %s has its counts there under the same keys", checked[other.store].Name)
						f.Remedy = "give one of the stores another key_prefix, or use one store for both"
					default:
						continue
					}
					checked[i].Findings = append(checked[i].Findings, f)
				}
				uses[server.ID] = append(uses[server.ID], use{i, shard.Name, server.Address, shard.Keyspace})
			}
		}
	}
}
