package redis

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// neighbour returns a client key of a node whose slot is not that of "k".
func neighbour(t *testing.T, m *movingSlot, at *redistest.Server) string {
	t.Helper()
	keys := bucketKeys{prefix: DefaultKeyPrefix, tagged: true}
	for n := 0; ; n++ {
		key := fmt.Sprint("other-", n)
		if masterOf(t, m.Cluster, key) == at && keys.slot(key) != keys.slot("k") {
			return key
		}
	}
}

// untilRedirected waits until a node has redirected a command.
func untilRedirected(t *testing.T, node *redistest.Server) {
	t.Helper()
	eventually(t, "the call is redirected", func() error {
		if n := redirects(t, node); n == 0 {
			return errors.New("it is not")
		}
		return nil
	})
}

// TestRedirectHoldsNoConnection: without pipelining, a take that waits for a silent
// node has given back its connection to the one that redirected it.
func TestRedirectHoldsNoConnection(t *testing.T) {
	m := beginMove(t)
	s := newStore(t, newShard(t, ShardOptions{Cluster: m.Addrs()[:1], NoPipelining: true, PoolSize: 1}), nil)
	waitUntilUp(t, s)
	other := neighbour(t, m, m.from)
	must(t, s.Take(t.Context(), ask(other))[0].Err)
	silence(t, m.to)
	silent := make(chan store.State, 1)
	go func() { silent <- s.Take(t.Context(), ask("k"))[0] }()
	untilRedirected(t, m.from)
	answered := make(chan store.State, 1)
	go func() { answered <- s.Take(t.Context(), ask(other))[0] }()
	select {
	case st := <-answered:
		must(t, st.Err)
	case st := <-silent:
		t.Fatalf("the redirected take ended with %v before the other", st.Err)
	}
}

// TestRedirectedChargeDelaysNoOther of the same detached call.
func TestRedirectedChargeDelaysNoOther(t *testing.T) {
	m := beginMove(t)
	s := newStore(t, newShard(t, ShardOptions{Cluster: m.Addrs()[:1], PoolSize: 1}), nil)
	waitUntilUp(t, s)
	other := neighbour(t, m, m.from)
	must(t, s.Charge(t.Context(), ask(other))[0].Err)
	silence(t, m.to)
	told := [2]chan store.State{make(chan store.State, 1), make(chan store.State, 1)}
	s.ChargeReported(append(ask("k"), ask(other)...), func(i int, st store.State) { told[i] <- st })
	select {
	case st := <-told[1]:
		if st.Err != nil || st.Used != 2 {
			t.Errorf("the other: %+v", st)
		}
	case st := <-told[0]:
		t.Fatalf("the redirected charge ended with %v before the other", st.Err)
	}
	must(t, m.to.Resume())
	if st := <-told[0]; st.Err != nil || st.Used != 1 {
		t.Errorf("the redirected one: %+v", st)
	}
}

// TestCloseDeliversWhatIsRedirected while it waits.
func TestCloseDeliversWhatIsRedirected(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const charges = 500
		m := beginMove(t)
		shard := NewShard(ShardOptions{Cluster: m.Addrs()[:1], DialTimeout: patience, NoPipelining: plain, PoolSize: 1})
		s := newStore(t, shard, nil)
		waitUntilUp(t, s)
		for range charges {
			s.ChargeDetached(ask("k"))
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		shard.Close(ctx)
		if got := tagged(t, m.to, "k"); got != charges {
			t.Errorf("%d charges were delivered, want %d", got, charges)
		}
	})
}
