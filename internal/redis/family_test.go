//go:build check

package redis

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestDatabaseOfACluster is used where clusters have several; elsewhere the log and check
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
	after := New(Options{Members: now, Previous: steps(was), CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
	for client := range 8 {
		for _, shard := range []string{"a", "b"} {
			r := store.Request{Limit: hourly, ClientKey: fmt.Sprint("client-", client), At: &store.Place{Shard: shard}, Events: 10, Cost: 1}
			used(t, shard, store.Answers(t.Context(), after.Take, []store.Request{r})[0], 1)
		}
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
