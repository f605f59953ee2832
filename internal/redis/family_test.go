//go:build check

package redis

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestBucketsMoveBetweenProducts, each to each, while requests are made: what is spent stays
// spent, and each copy expires.
func TestBucketsMoveBetweenProducts(t *testing.T) {
	t.Parallel()
	programs, err := redistest.Family()
	must(t, err)
	for _, from := range programs {
		for _, to := range programs {
			t.Run(filepath.Base(from)+" to "+filepath.Base(to), func(t *testing.T) {
				source, target := redistest.Start(t, redistest.Program(from)), redistest.Start(t, redistest.Program(to))
				was := []Member{{Name: "a", Shard: newShard(t, ShardOptions{Primary: source.Addr()})}}
				now := []Member{{Name: "b", Shard: newShard(t, ShardOptions{Primary: target.Addr()})}}
				before := New(Options{Members: was, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
				after := New(Options{Members: now, Previous: was, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
				for _, limit := range storetest.Limits {
					if algorithm.Of(limit.Algorithm).Lease {
						continue
					}
					limit.Zone, limit.Window = "moves", endless
					for client := range 5 {
						moves(t, before, after, store.Request{Limit: &limit, ClientKey: fmt.Sprint("client-", client), Events: 10, Cost: 1})
					}
				}
				for _, key := range target.Client().Keys(t.Context(), "*").Val() {
					if left := target.Client().PTTL(t.Context(), key).Val(); left <= 0 {
						t.Errorf("%s never expires: %v", key, left)
					}
				}
			})
		}
	}
}

// moves spends 7 of 10 at a store, and requires that another one allows 3 of 10 that come at once.
func moves(t *testing.T, before, after *Store, r store.Request) {
	t.Helper()
	was := store.State{}
	for i := range 7 {
		r.ID = fmt.Sprint("before-", i)
		was = store.Answers(t.Context(), before.Charge, []store.Request{r})[0]
		must(t, was.Err)
	}
	var allowed atomic.Int64
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			one := r
			one.ID = fmt.Sprint("after-", i)
			if store.Answers(t.Context(), after.Take, []store.Request{one})[0].Allowed {
				allowed.Add(1)
			}
		})
	}
	all.Wait()
	st := store.Answers(t.Context(), after.Check, []store.Request{r})[0]
	if allowed.Load() != 3 || st.Used != 10 || r.Limit.Algorithm == store.FixedWindow && st.Reset != was.Reset {
		t.Errorf("%s, %v: %d of 3 are allowed, then %+v, was %+v", r.ClientKey, r.Limit.Algorithm, allowed.Load(), st, was)
	}
}

// TestDatabaseOfACluster is used where clusters have several, and copied from; elsewhere the log and check
// name the remedy.
func TestDatabaseOfACluster(t *testing.T) {
	t.Parallel()
	programs, err := redistest.Family()
	must(t, err)
	for _, program := range programs {
		t.Run(filepath.Base(program), func(t *testing.T) {
			several := []redistest.Option{redistest.Program(program), redistest.Args("--cluster-databases", "4")}
			probe, err := redistest.Launch(several...)
			if err != nil {
				if !strings.Contains(err.Error(), "cluster-databases") {
					t.Fatal(err)
				}
				refusesDatabases(t, redistest.StartCluster(t, 1, 0, several[0], redistest.NodeTimeout(waitTimeout)))
				return
			}
			must(t, probe.Stop())
			usesDatabase(t, redistest.StartCluster(t, 2, 1, append(several, redistest.NodeTimeout(waitTimeout))...))
			refusesDatabases(t, redistest.StartCluster(t, 1, 0, several[0], redistest.NodeTimeout(waitTimeout)))
		})
	}
}

func refusesDatabases(t *testing.T, c *redistest.Cluster) {
	t.Helper()
	shard := newShard(t, ShardOptions{Cluster: c.Addrs(), DB: 3})
	j := keepJournal(shard)
	s := newStore(t, shard, nil)
	if err := store.Answers(t.Context(), s.Take, oneOf("k"))[0].Err; !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("error is %v", err)
	}
	j.awaitProblem(t, c.Addrs()[0], "database 3 cannot be used", "leave db out")
	isNamed := func(f store.Finding) bool {
		return f.Severity == store.SeverityError && f.Code == "database" && strings.Contains(f.Remedy, "leave db out")
	}
	if d := s.Diagnose(t.Context()); !slices.ContainsFunc(d.Findings, isNamed) {
		t.Errorf("the findings are %+v", d.Findings)
	}
}

func usesDatabase(t *testing.T, c *redistest.Cluster) {
	t.Helper()
	was := []Member{{Name: "a", Shard: newShard(t, ShardOptions{Cluster: c.Addrs()[:1], DB: 2})}}
	now := []Member{{Name: "b", Shard: newShard(t, ShardOptions{Cluster: c.Addrs()[:1], DB: 3})}}
	before := New(Options{Members: was, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
	after := New(Options{Members: now, Previous: was, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
	for client := range 8 {
		moves(t, before, after, store.Request{Limit: hourly, ClientKey: fmt.Sprint("client-", client), Events: 10, Cost: 1})
	}
	must(t, setOverride(t, after, block("api", "tag:alice", time.Now().Add(time.Hour))))
	sameKeys(t, "set", overridden(t, after), "tag:alice")
	for _, f := range after.Diagnose(t.Context()).Findings {
		if f.Severity == store.SeverityError {
			t.Errorf("finding %+v", f)
		}
	}
	var kept [4]int64
	for _, node := range c.Nodes {
		keyspace, err := node.Info("keyspace")
		must(t, err)
		for db := range kept {
			var keys int64
			_, _ = fmt.Sscanf(keyspace[fmt.Sprint("db", db)], "keys=%d", &keys)
			kept[db] += keys
		}
	}
	if kept[0] != 0 || kept[1] != 0 || kept[2] == 0 || kept[3] == 0 {
		t.Errorf("the databases have %d keys", kept)
	}
}
