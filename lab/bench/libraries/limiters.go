package libraries

import (
	"context"
	"fmt"
	"io"
	"math/rand"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	descriptors "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	api "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/envoyproxy/ratelimit/src/config"
	envoylimiter "github.com/envoyproxy/ratelimit/src/limiter"
	envoyredis "github.com/envoyproxy/ratelimit/src/redis"
	"github.com/envoyproxy/ratelimit/src/settings"
	"github.com/envoyproxy/ratelimit/src/stats"
	"github.com/envoyproxy/ratelimit/src/utils"
	"github.com/go-redis/redis_rate/v10"
	redigo "github.com/gomodule/redigo/redis"
	counting "github.com/lyft/gostats"
	goredis "github.com/redis/go-redis/v9"
	golimiter "github.com/sethvargo/go-limiter"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/sethvargo/go-redisstore"
	"github.com/sirupsen/logrus"
	"github.com/throttled/throttled/v2"
	throttledredis "github.com/throttled/throttled/v2/store/goredisstore.v9"
	"github.com/throttled/throttled/v2/store/memstore"
	ulule "github.com/ulule/limiter/v3"
	ululememory "github.com/ulule/limiter/v3/drivers/store/memory"
	ululeredis "github.com/ulule/limiter/v3/drivers/store/redis"
	timerate "golang.org/x/time/rate"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// decide asks for one event of a client key and reports whether it is admitted.
type decide func(ctx context.Context, key string) (admitted bool, err error)

// limits returns a decide for a limit of events an hour.
type limits = func(events int) (decide, error)

type limiter struct {
	kind   *kind
	pool   int          // its connections; 0 if it counts in memory
	limit  limits       // each limit in memory begins anew
	settle func() error // waits until all decisions count; nil if they do at once
	close  func()
}

func (l *limiter) settled() error {
	if l.settle == nil {
		return nil
	}
	return l.settle()
}

type kind struct {
	name       string
	modules    []string
	ours       bool            // not set for peers
	like       bool            // set for peers in memory that keep what headers need as well
	bounds     map[int]float64 // the goals for the ratio to the fastest peer, by goroutines
	extra      bool            // set if a Take is not judged by the bounds
	goroutines []int           // the numbers that it is measured with; nil for all
	pools      []int           // the sizes of the connection pool to choose from
	// commands are the commands that it sends, each with the number that it sends for one
	// that the server counts. The server also counts the commands in scripts.
	commands map[string]int64
	open     func(addr string, pool int) (*limiter, error)
}

// scripted are the commands of implementations that only send scripts.
var scripted = map[string]int64{"evalsha": 1, "eval": 1}

// opening are those of limiters whose checks open windows by plain commands as well: three for each
// HSETNX.
var opening = map[string]int64{"evalsha": 1, "eval": 1, "hsetnx": 3}

var unpooled = []int{0}

func openLimiter(k *kind, addr string, pool int) (*limiter, error) {
	l, err := k.open(addr, pool)
	if err == nil {
		l.kind, l.pool = k, pool
	}
	return l, err
}

var (
	redisKinds  = slices.Concat(peers, ours)
	memoryKinds = slices.Concat(memoryPeers, ourMemory)
)

func with(kinds []*kind, goroutines int) []*kind {
	return traffic.Those(kinds, func(k *kind) bool { return k.goroutines == nil || slices.Contains(k.goroutines, goroutines) })
}

// timeout replaces the 50 ms after which a Take gives up, and which can pass on a busy
// machine.
const timeout = 5 * time.Second

var takeBounds = map[int]float64{64: 1.3, 256: 1.9, 1024: 1.7}

// refusedBounds are the goals of the same for refused requests, of all algorithms.
var refusedBounds = map[int]float64{64: 1.2, 256: 1.8}

// Ours have their default pool.
var (
	takeFixedWindow = &kind{
		name: "Take, fixed window", ours: true, bounds: takeBounds,
		pools: []int{wire.DefaultPoolSize}, commands: scripted, open: openOurs(store.FixedWindow, false, take),
	}
	// A single goroutine never has two calls for one pipeline.
	takePlain = &kind{
		name: "Take, fixed window, pipelining off", ours: true, bounds: map[int]float64{1: 0.9}, goroutines: []int{1},
		pools: []int{wire.DefaultPlainPoolSize}, commands: scripted, open: openOurs(store.FixedWindow, true, take),
	}
	takeGCRA = &kind{
		name: "Take, GCRA", ours: true, bounds: map[int]float64{64: 1.1, 256: 1.5, 1024: 1.3}, extra: true,
		pools: []int{wire.DefaultPoolSize}, commands: scripted, open: openOurs(store.GCRA, false, take),
	}
	checkAndCharge = &kind{
		name: "check + charge, fixed window", ours: true, bounds: map[int]float64{64: 0.75, 256: 1},
		pools: []int{wire.DefaultPoolSize}, commands: opening, open: openOurs(store.FixedWindow, false, takeInTwo),
	}
	// As in the handler, no request waits for the charge.
	checkAndDetach = &kind{
		name: "check + detached charge, fixed window", ours: true, bounds: map[int]float64{64: 0.9, 256: 1.2},
		pools: []int{wire.DefaultPoolSize}, commands: opening, open: openDetaching,
	}
	ours = []*kind{takeFixedWindow, takePlain, takeGCRA, checkAndCharge, checkAndDetach}

	ourMemory = []*kind{
		{name: "Take, fixed window", ours: true, pools: unpooled, open: inMemory(limitOurMemory(store.FixedWindow))},
		{name: "Take, GCRA", ours: true, pools: unpooled, open: inMemory(limitOurMemory(store.GCRA))},
	}
)

// calling makes a decision of a store's calls.
type calling func(ctx context.Context, s store.Store, reqs []store.Request) store.State

func take(ctx context.Context, s store.Store, reqs []store.Request) store.State {
	return store.Answers(ctx, s.Take, reqs)[0]
}

func takeInTwo(ctx context.Context, s store.Store, reqs []store.Request) store.State {
	checked := store.Answers(ctx, s.Check, reqs)[0]
	if checked.Err == nil && checked.Allowed {
		checked.Err = store.Answers(ctx, s.Charge, reqs)[0].Err
	}
	return checked
}

func openOurs(algorithm store.Algorithm, plain bool, call calling) func(addr string, pool int) (*limiter, error) {
	return func(addr string, pool int) (*limiter, error) {
		shard := redis.NewShard(redis.ShardOptions{Primary: addr, PoolSize: pool, NoPipelining: plain, DialTimeout: timeout})
		s := redis.New(redis.Options{
			Members: []redis.Member{{Name: "a", Shard: shard}}, CheckTimeout: timeout, ChargeTimeout: timeout,
		})
		return &limiter{
			limit: limitOf(s, algorithm, call),
			close: func() {
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				shard.Close(ctx)
			},
		}, nil
	}
}

// openDetaching is openOurs, but its decisions do not wait for the charges.
func openDetaching(addr string, pool int) (*limiter, error) {
	var pending sync.WaitGroup
	var failed atomic.Pointer[error]
	call := func(ctx context.Context, s store.Store, reqs []store.Request) store.State {
		checked := store.Answers(ctx, s.Check, reqs)[0]
		if checked.Err == nil && checked.Allowed {
			pending.Add(1)
			s.(store.Remote).ChargeReported([]*store.Request{&reqs[0]}, func(_ int, st store.State) {
				if st.Err != nil {
					failed.Store(&st.Err)
				}
				pending.Done()
			})
		}
		return checked
	}
	l, err := openOurs(store.FixedWindow, false, call)(addr, pool)
	if err != nil {
		return nil, err
	}
	l.settle = func() error {
		pending.Wait()
		if err := failed.Load(); err != nil {
			return *err
		}
		return nil
	}
	return l, nil
}

// inMemory opens an implementation in memory, which needs no connection.
func inMemory(limit limits) func(addr string, pool int) (*limiter, error) {
	return func(string, int) (*limiter, error) { return &limiter{limit: limit, close: func() {}}, nil }
}

// limitOurMemory takes as the limiter in Caddy does: the answer goes into room that the
// caller has.
func limitOurMemory(algorithm store.Algorithm) limits {
	return func(events int) (decide, error) {
		s := memory.New(memory.NewBuckets(), memory.Options{})
		zone := &store.Limit{Zone: "bench", Algorithm: algorithm, Window: time.Hour}
		return func(ctx context.Context, key string) (bool, error) {
			asked := store.Ask{Request: store.Request{Limit: zone, ClientKey: key, Events: int64(events), Cost: 1}}
			s.Take(ctx, []*store.Ask{&asked})
			return asked.Allowed, asked.Err
		}, nil
	}
}

func limitOf(s store.Store, algorithm store.Algorithm, call calling) limits {
	zone := &store.Limit{Zone: "bench", Algorithm: algorithm, Window: time.Hour}
	return func(events int) (decide, error) {
		return func(ctx context.Context, key string) (bool, error) {
			st := call(ctx, s, []store.Request{{Limit: zone, ClientKey: key, Events: int64(events), Cost: 1}})
			return st.Allowed, st.Err
		}, nil
	}
}

// peers are set up as in their documentation. Where that leaves the client to the user,
// the client has its default options except for its pool.
var peers = []*kind{
	{
		name: "redis_rate", modules: []string{"github.com/go-redis/redis_rate/v10", goredisModule},
		pools: peerPools, commands: scripted, open: overClient(limitRedisRate),
	},
	{name: "ulule/limiter", modules: []string{ululeModule, goredisModule}, pools: peerPools, commands: scripted, open: overClient(limitUlule)},
	{
		name: "throttled", modules: []string{throttledModule, goredisModule}, pools: peerPools,
		// A GET goes with every TIME; other GETs are in its script.
		commands: map[string]int64{"time": 2, "eval": 1, "setnx": 1, "expire": 1}, open: overClient(limitThrottled),
	},
	{
		name: "go-redisstore", modules: []string{"github.com/sethvargo/go-redisstore", redigoModule},
		pools: peerPools, commands: scripted, open: openRedisstore,
	},
	{
		name: "envoy ratelimit", modules: []string{"github.com/envoyproxy/ratelimit", radixModule},
		pools: sharedPools, commands: map[string]int64{"incrby": 1, "expire": 1}, open: openEnvoy,
	},
}

const (
	goredisModule   = "github.com/redis/go-redis/v9"
	redigoModule    = "github.com/gomodule/redigo"
	radixModule     = "github.com/mediocregopher/radix/v4"
	ululeModule     = "github.com/ulule/limiter/v3"
	throttledModule = "github.com/throttled/throttled/v2"
)

var (
	// peerPools: with fewer connections goroutines wait for one, with more the
	// server serves each less often.
	peerPools = []int{64, 256}
	// sharedPools includes the default of a pool whose connections goroutines share.
	sharedPools = []int{10, 64, 256}
)

// overClient opens an implementation over a go-redis client.
func overClient(limit func(client *goredis.Client) (limits, error)) func(addr string, pool int) (*limiter, error) {
	return func(addr string, pool int) (*limiter, error) {
		// The second pool, which pipelines use, holds ten by default.
		client := goredis.NewClient(&goredis.Options{Addr: addr, PoolSize: pool, PipelinePoolSize: pool})
		byEvents, err := limit(client)
		if err != nil {
			_ = client.Close()
			return nil, fmt.Errorf("open the store: %w", err)
		}
		return &limiter{limit: byEvents, close: func() { _ = client.Close() }}, nil
	}
}

func limitRedisRate(client *goredis.Client) (limits, error) {
	l := redis_rate.NewLimiter(client)
	return func(events int) (decide, error) {
		limit := redis_rate.PerHour(events)
		return func(ctx context.Context, key string) (bool, error) {
			res, err := l.Allow(ctx, key, limit)
			return err == nil && res.Allowed > 0, err
		}, nil
	}, nil
}

func limitUlule(client *goredis.Client) (limits, error) {
	store, err := ululeredis.NewStore(client)
	return func(events int) (decide, error) { return decideUlule(store, events), nil }, err
}

func decideUlule(store ulule.Store, events int) decide {
	l := ulule.New(store, ulule.Rate{Period: time.Hour, Limit: int64(events)})
	return func(ctx context.Context, key string) (bool, error) {
		state, err := l.Get(ctx, key)
		return !state.Reached, err
	}
}

func limitThrottled(client *goredis.Client) (limits, error) {
	store, err := throttledredis.NewCtx(client, "throttled:")
	return func(events int) (decide, error) { return decideThrottled(store, events) }, err
}

func decideThrottled(store throttled.GCRAStoreCtx, events int) (decide, error) {
	l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerHour(events), MaxBurst: events - 1})
	if err != nil {
		return nil, fmt.Errorf("make a limit of throttled: %w", err)
	}
	return func(ctx context.Context, key string) (bool, error) {
		limited, _, err := l.RateLimitCtx(ctx, key, 1)
		return !limited, err
	}, nil
}

var memoryPeers = []*kind{
	{name: "x/time/rate", modules: []string{"golang.org/x/time"}, pools: unpooled, open: inMemory(limitTimeRate)},
	{name: "ulule/limiter", modules: []string{ululeModule}, like: true, pools: unpooled, open: inMemory(limitUluleMemory)},
	{name: "throttled", modules: []string{throttledModule}, like: true, pools: unpooled, open: inMemory(limitThrottledMemory)},
	{name: "go-limiter", modules: []string{"github.com/sethvargo/go-limiter"}, pools: unpooled, open: openGoLimiter},
}

// limitTimeRate keeps a limiter for each client, as its users do.
func limitTimeRate(events int) (decide, error) {
	var clients sync.Map
	every := timerate.Every(time.Hour / time.Duration(events))
	return func(_ context.Context, key string) (bool, error) {
		l, ok := clients.Load(key)
		if !ok {
			l, _ = clients.LoadOrStore(key, timerate.NewLimiter(every, events))
		}
		return l.(*timerate.Limiter).Allow(), nil
	}, nil
}

func limitUluleMemory(events int) (decide, error) {
	return decideUlule(ululememory.NewStore(), events), nil
}

// limitThrottledMemory does not bound the number of clients: with a bound the decisions
// would wait for each other.
func limitThrottledMemory(events int) (decide, error) {
	store, err := memstore.NewCtx(0)
	if err != nil {
		return nil, fmt.Errorf("open the store of throttled: %w", err)
	}
	return decideThrottled(store, events)
}

// openGoLimiter makes a store for each limit, because a store has only one.
func openGoLimiter(string, int) (*limiter, error) {
	var store golimiter.Store
	done := func() {
		if store != nil {
			_ = store.Close(context.Background())
		}
	}
	return &limiter{
		limit: func(events int) (_ decide, err error) {
			done()
			store, err = memorystore.New(&memorystore.Config{Tokens: uint64(events), Interval: time.Hour})
			if err != nil {
				return nil, fmt.Errorf("open the store of go-limiter: %w", err)
			}
			return decideGoLimiter(store), nil
		},
		close: func() { done() },
	}, nil
}

// openRedisstore uses a pool that keeps its connections and makes goroutines wait for
// one. go-redisstore's own pool closes a connection after each use, and fails if more
// than a hundred are in use.
func openRedisstore(addr string, size int) (*limiter, error) {
	dial := func() (redigo.Conn, error) { return redigo.Dial("tcp", addr) }
	pool := &redigo.Pool{MaxIdle: size, MaxActive: size, Wait: true, Dial: dial}
	return &limiter{
		limit: func(events int) (decide, error) {
			store, err := redisstore.NewWithPool(&redisstore.Config{Tokens: uint64(events), Interval: time.Hour}, pool)
			if err != nil {
				return nil, fmt.Errorf("open the store of go-redisstore: %w", err)
			}
			return decideGoLimiter(store), nil
		},
		close: func() { _ = pool.Close() },
	}, nil
}

func decideGoLimiter(store golimiter.Store) decide {
	return func(ctx context.Context, key string) (bool, error) {
		_, _, _, ok, err := store.Take(ctx, key)
		return ok, err
	}
}

// openEnvoy does what the rate limit service does with its default settings, except for
// one Redis and a pool. Its client pipelines the calls of goroutines that share a
// connection; REDIS_PIPELINE_WINDOW and REDIS_PIPELINE_LIMIT have no effect with one Redis.
func openEnvoy(addr string, pool int) (_ *limiter, err error) {
	defer recoverEnvoy(&err)
	// The client logs a warning for each connection.
	logrus.SetOutput(io.Discard)
	counters := counting.NewStore(counting.NewNullSink(), false)
	manager := stats.NewStatManager(counters, settings.Settings{})
	client := envoyredis.NewClientImpl(counters, false, "", "tcp", "single", addr, pool,
		0, 0, nil, false, nil, timeout, "", "")
	const jitter, nearLimit = 300, 0.8 // the defaults
	cache := envoyredis.NewFixedRateLimitCacheImpl(client, nil, utils.NewTimeSourceImpl(),
		rand.New(utils.NewLockedSource(time.Now().Unix())), jitter, nil, nearLimit, "", manager, false)
	return &limiter{
		limit: func(events int) (decide, error) {
			// Its windows begin and end on the clock; none may end while refusals are measured.
			limit := config.NewRateLimit(uint32(events), api.RateLimitResponse_RateLimit_YEAR,
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

// recoverEnvoy turns panics, by which the package signals a failure of Redis, into errors,
// as the service does.
func recoverEnvoy(err *error) {
	switch failure := recover().(type) {
	case nil:
	case envoyredis.RedisError:
		*err = fmt.Errorf("envoy ratelimit: %w", failure)
	default:
		panic(failure)
	}
}

// Versions returns the names and versions of the modules of the peers and of their Redis
// clients.
func Versions() (texts []string) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	var wanted []string
	for _, k := range slices.Concat(redisKinds, memoryKinds) {
		wanted = append(wanted, k.modules...)
	}
	for _, m := range info.Deps {
		if slices.Contains(wanted, m.Path) {
			texts = append(texts, shortName(m.Path)+" "+m.Version)
		}
	}
	return texts
}

func shortName(module string) string {
	if last := path.Base(module); len(last) > 1 && last[0] == 'v' && last[1] >= '0' && last[1] <= '9' {
		module = path.Dir(module)
	}
	_, name, _ := strings.Cut(module, "/")
	return name
}
