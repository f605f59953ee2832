package operate

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

// These are short, as nearly every line of a test has one.
var (
	must       = redistest.Must
	eventually = redistest.Eventually
	soon       = redistest.Soon
)

const masterName = "limits"

var hourly = &store.Limit{Zone: "hourly", Algorithm: store.FixedWindow, Window: time.Hour}

// newShard returns a shard that is closed when the test ends.
func newShard(t testing.TB, opts wire.Options) *Shard {
	t.Helper()
	if opts.DialTimeout == 0 {
		opts.DialTimeout = redistest.WaitTimeout
	}
	s := NewShard(opts)
	redistest.CloseAtEnd(t, s)
	return s
}

// newOperator returns an operator of a store on one shard with generous timeouts.
func newOperator(t testing.TB, opts wire.Options, change func(*Operator)) *Operator {
	t.Helper()
	shard := newShard(t, opts)
	if opts.DialTimeout == 0 {
		t.Cleanup(shard.Use(redistest.WaitTimeout))
	}
	p := NewOperator(
		[]Member{{Name: "a", Shard: shard}},
		nil,
		&ask.Asker{Keys: ask.Keys{Prefix: "rl"}, CheckTimeout: redistest.WaitTimeout, ChargeTimeout: redistest.WaitTimeout},
		time.Now,
		&Overrides{},
	)
	p.Follow()
	if change != nil {
		change(p)
	}
	return p
}

// run runs an operation on the first shard.
func run(t *testing.T, p *Operator, op algorithm.Operation, reqs []store.Request) []store.State {
	t.Helper()
	return store.Answers(t.Context(), func(ctx context.Context, asks []*store.Ask) {
		p.asker.Run(ctx, op, p.members[0].Shard.Owner(0), asks, time.Now().Add(redistest.WaitTimeout))
	}, reqs)
}

func login(username, password string) wire.Credentials {
	return func(context.Context) (string, string, error) { return username, password, nil }
}

func sentinelOptions(sentinels *redistest.Sentinels) wire.Options {
	return wire.Options{Sentinel: &wire.SentinelOptions{Master: masterName, Addrs: sentinels.Addrs()}}
}

// reply is a server's error reply.
type reply string

func (r reply) Error() string { return string(r) }

// RedisError implements [redis.Error].
func (reply) RedisError() {}

// limitsOf returns changes that set limits of so many clients of that name.
func limitsOf(name string, n int) []store.OverrideChange {
	changes := make([]store.OverrideChange, n)
	for i := range changes {
		changes[i] = store.OverrideChange{Expected: store.AnyVersion, Override: store.Override{
			Kind: store.OverrideLimit, Zone: "api", ClientKey: fmt.Sprint("tag:", name, i), Events: 5, Since: time.Now().UnixMicro(), Until: store.NoEnd,
		}}
	}
	return changes
}

func mustChange(t *testing.T, p *Operator, changes []store.OverrideChange) {
	t.Helper()
	for _, outcome := range p.ChangeOverrides(t.Context(), changes) {
		must(t, outcome.Err)
	}
}
