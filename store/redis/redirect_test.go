package redis

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestOthersDoNotWaitForARedirect: what is sent together with a charge that
// another node has to be asked for is answered although that node is silent.
func TestOthersDoNotWaitForARedirect(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 0)
	keys := bucketKeys{prefix: DefaultKeyPrefix, tagged: true}
	from := masterOf(t, c, "k")
	to := c.Nodes[0]
	if to == from {
		to = c.Nodes[1]
	}
	s := newStore(t, newShard(t, ShardOptions{Cluster: c.Addrs()[:1]}), func(o *Options) { o.ChargeTimeout = 5 * time.Second })
	waitUntilUp(t, s)
	var others []string
	for n := 0; len(others) < 32; n++ {
		key := fmt.Sprint("other-", n)
		if masterOf(t, c, key) == from && keys.slot(key) != keys.slot("k") {
			others = append(others, key)
			must(t, s.Charge(t.Context(), ask(key))[0].Err)
		}
	}
	m, err := c.BeginMigration(t.Context(), int(keys.slot("k")), from, to)
	must(t, err)
	t.Cleanup(func() { must(t, m.Finish(context.Background())) })
	must(t, to.Pause())
	t.Cleanup(func() { must(t, to.Resume()) })

	silent := make(chan store.State, 1)
	answered := make(chan error, len(others))
	go func() { silent <- s.Charge(t.Context(), ask("k"))[0] }()
	for _, key := range others {
		go func() { answered <- s.Charge(t.Context(), ask(key))[0].Err }()
	}
	for range others {
		select {
		case err := <-answered:
			must(t, err)
		case st := <-silent:
			t.Fatalf("the redirected charge ended with %v before the others", st.Err)
		}
	}
	if st := <-silent; st.Err == nil {
		t.Error("a silent node has answered")
	}
}
