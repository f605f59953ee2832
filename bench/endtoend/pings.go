package endtoend

import (
	"context"
	"fmt"
	"slices"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
)

// pingCount is how many pings tell in a round how far away a server is.
const pingCount = 40

// pings are how many milliseconds a PING takes to the default store's primary,
// while nothing else runs: at once, and through the relays in the order of
// roundTrips.
func (l *lab) pings(ctx context.Context) (all []spread.Spread, err error) {
	addrs := []string{l.stores.base.shards[0].Primary.Addr()}
	for _, far := range l.stores.far {
		addrs = append(addrs, far.relays[0].addr())
	}
	took := make([][]float64, len(addrs))
	for range l.opts.Rounds {
		for i, addr := range addrs {
			d, err := ping(ctx, addr)
			if err != nil {
				return nil, err
			}
			took[i] = append(took[i], milliseconds(d))
		}
	}
	for _, values := range took {
		all = append(all, spread.Of(values))
	}
	return all, nil
}

// ping is the median of how long a PING takes.
func ping(ctx context.Context, addr string) (time.Duration, error) {
	client := goredis.NewClient(&goredis.Options{Addr: addr})
	defer client.Close()
	took := make([]time.Duration, pingCount)
	for i := -pingCount; i < pingCount; i++ {
		start := time.Now()
		if err := client.Ping(ctx).Err(); err != nil {
			return 0, fmt.Errorf("ping %s: %w", addr, err)
		}
		// The first ones wake up what sleeps.
		if i >= 0 {
			took[i] = time.Since(start)
		}
	}
	slices.Sort(took)
	return loadgen.Quantile(took, 0.5), nil
}
