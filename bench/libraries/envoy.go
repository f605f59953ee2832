package libraries

import (
	"context"
	"fmt"
	"io"
	"math/rand"
	"time"

	descriptors "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	api "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/envoyproxy/ratelimit/src/config"
	envoylimiter "github.com/envoyproxy/ratelimit/src/limiter"
	envoyredis "github.com/envoyproxy/ratelimit/src/redis"
	"github.com/envoyproxy/ratelimit/src/settings"
	"github.com/envoyproxy/ratelimit/src/stats"
	"github.com/envoyproxy/ratelimit/src/utils"
	counting "github.com/lyft/gostats"
	"github.com/sirupsen/logrus"
)

// What the service's settings are by default.
const (
	envoyJitter    = 300
	envoyNearLimit = 0.8
)

// openEnvoy makes what the rate limit service makes of its settings, but for
// those that this comparison needs: one Redis, and a pool. Its pipelining is
// that of its client, whose connections goroutines share; REDIS_PIPELINE_WINDOW
// and REDIS_PIPELINE_LIMIT do nothing with one Redis.
func openEnvoy(addr string, pool int) (_ *limiter, err error) {
	defer recoverEnvoy(&err)
	// It warns of each connection that it makes.
	logrus.SetOutput(io.Discard)
	counters := counting.NewStore(counting.NewNullSink(), false)
	manager := stats.NewStatManager(counters, settings.Settings{})
	client := envoyredis.NewClientImpl(counters, false, "", "tcp", "single", addr, pool,
		0, 0, nil, false, nil, timeout, "", "")
	cache := envoyredis.NewFixedRateLimitCacheImpl(client, nil, utils.NewTimeSourceImpl(),
		rand.New(utils.NewLockedSource(time.Now().Unix())), envoyJitter, nil, envoyNearLimit, "", manager, false)
	return &limiter{
		limit: func(events int) (decide, error) {
			limit := config.NewRateLimit(uint32(events), api.RateLimitResponse_RateLimit_HOUR,
				manager.NewStats("bench_client"), false, false, false, "", nil, false)
			return decideEnvoy(cache, []*config.RateLimit{limit}), nil
		},
		close: func() { _ = client.Close() },
	}, nil
}

func decideEnvoy(cache envoylimiter.RateLimitCache, limits []*config.RateLimit) decide {
	return func(ctx context.Context, key string) (admitted bool, err error) {
		defer recoverEnvoy(&err)
		request := &api.RateLimitRequest{
			Domain: "bench",
			Descriptors: []*descriptors.RateLimitDescriptor{{
				Entries: []*descriptors.RateLimitDescriptor_Entry{{Key: "client", Value: key}},
			}},
			HitsAddend: 1,
		}
		status := cache.DoLimit(ctx, request, limits)[0]
		return status.GetCode() == api.RateLimitResponse_OK, nil
	}
}

// recoverEnvoy turns its panics, by which it tells that Redis failed, into
// errors, as the service does.
func recoverEnvoy(err *error) {
	switch failure := recover().(type) {
	case nil:
	case envoyredis.RedisError:
		*err = fmt.Errorf("envoy ratelimit: %w", failure)
	default:
		panic(failure)
	}
}
