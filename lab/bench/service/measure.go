package service

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// What a server is asked by. A connection of Envoy belongs to one of its threads, and has many calls at a
// time.
const (
	connections = 8
	callers     = 64
	// steady is how many questions a second are due where latency is measured, so that no server is busy.
	steady = 2_000
)

// trial is a server with the questions that it is asked.
type trial struct {
	name      string
	server    *caddyproc.Process
	commands  []string // that it sends to Redis
	conns     []*grpc.ClientConn
	questions []*ratelimitv3.RateLimitRequest // of all clients
	want      ratelimitv3.RateLimitResponse_Code
	asked     int // questions so far; the next ones come from the clients that follow
}

// prepare connects to a server, and makes the questions about the values of a key.
func (t *trial) prepare(addr, key string) error {
	values := clients
	if t.want = ratelimitv3.RateLimitResponse_OK; key == full {
		values, t.want = 1, ratelimitv3.RateLimitResponse_OVER_LIMIT
	}
	for n := range values {
		entry := &commonv3.RateLimitDescriptor_Entry{Key: key, Value: "client-" + strconv.Itoa(n)}
		t.questions = append(t.questions, &ratelimitv3.RateLimitRequest{
			Domain: "bench", Descriptors: []*commonv3.RateLimitDescriptor{{Entries: []*commonv3.RateLimitDescriptor_Entry{entry}}},
		})
	}
	for range connections {
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return errors.Join(fmt.Errorf("connect: %w", err), t.close())
		}
		t.conns = append(t.conns, conn)
	}
	return nil
}

func (t *trial) close() error { return traffic.Each(t.conns, (*grpc.ClientConn).Close) }

// greet asks once for each client, and uses up what is full.
func (t *trial) greet(ctx context.Context) error {
	const some = 2 // the first question of a refused client is admitted
	if _, err := t.ask(ctx, schedule{questions: max(len(t.questions), some), isFirst: true}); err != nil {
		return err
	}
	_, err := t.ask(ctx, schedule{questions: some})
	return err
}

// schedule says how many questions are asked, and when.
type schedule struct {
	length    time.Duration // how long; or
	questions int           // how many
	rate      int           // due in a second; 0 means that a caller asks as soon as it has an answer
	isFirst   bool          // set if answers may be others than the trial wants
}

// ask asks, and returns how long the answers took, sorted: from when the questions were due, if they have a
// rate.
func (t *trial) ask(ctx context.Context, s schedule) ([]time.Duration, error) {
	took := make([][]time.Duration, callers)
	start := time.Now()
	err := traffic.Together(callers, func(i int) (err error) {
		client := ratelimitv3.NewRateLimitServiceClient(t.conns[i%len(t.conns)])
		sleeper := loadgen.NewSleeper()
		defer sleeper.Close()
		for n := i; ctx.Err() == nil; n += callers {
			due := time.Now()
			if s.rate > 0 {
				due = start.Add(time.Duration(n) * time.Second / time.Duration(s.rate))
				sleeper.Until(due)
			}
			if s.questions > 0 && n >= s.questions || s.questions == 0 && due.Sub(start) >= s.length {
				return nil
			}
			answer, err := client.ShouldRateLimit(ctx, t.questions[(t.asked+n)%len(t.questions)])
			switch {
			case err != nil:
				return fmt.Errorf("ask: %w", err)
			case answer.GetOverallCode() != t.want && !s.isFirst:
				return fmt.Errorf("an answer is %v, want %v", answer.GetOverallCode(), t.want)
			}
			took[i] = append(took[i], time.Since(due))
		}
		return ctx.Err()
	})
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	t.asked += len(all)
	return all, err
}

// sample is one trial in one round.
type sample struct {
	rate          float64 // decisions a second
	server, redis float64 // microseconds of CPU time per decision
	calls         float64 // calls to Redis per decision
	median, high  float64 // milliseconds until half of the answers, and 99 % of them, at the steady rate
	fullMedian    float64 // and until half of them when callers never pause
}

func (s sample) perSecond() float64    { return s.rate }
func (s sample) ofServer() float64     { return s.server }
func (s sample) ofBoth() float64       { return s.server + s.redis }
func (s sample) ofRedis() float64      { return s.redis }
func (s sample) ofCalls() float64      { return s.calls }
func (s sample) p50() float64          { return s.median }
func (s sample) p99() float64          { return s.high }
func (s sample) p50AtFull() float64    { return s.fullMedian }
func (s sample) perCPUSecond() float64 { return 1e6 / s.server }

// measure measures a trial once: as fast as it answers, then at the steady rate.
func (b *bench) measure(ctx context.Context, t *trial) (s sample, err error) {
	// Pipelines and batches reach their length.
	if _, err := t.ask(ctx, schedule{length: b.opts.Length / 4}); err != nil {
		return s, err
	}
	var took []time.Duration
	var elapsed time.Duration
	before, after, err := traffic.Around(func() (use, error) { return b.use(t) }, func() (err error) {
		start := time.Now()
		took, err = t.ask(ctx, schedule{length: b.opts.Length})
		elapsed = time.Since(start)
		return err
	})
	if err != nil {
		return s, err
	}
	n := float64(len(took))
	s = sample{
		rate: n / elapsed.Seconds(), server: micros(after.server-before.server) / n, redis: micros(after.redis-before.redis) / n,
		calls: float64(after.calls-before.calls) / n, fullMedian: micros(loadgen.Quantile(took, 0.5)) / 1e3,
	}
	if took, err = t.ask(ctx, schedule{length: b.opts.Length / 2, rate: steady}); err != nil {
		return s, err
	}
	s.median, s.high = micros(loadgen.Quantile(took, 0.5))/1e3, micros(loadgen.Quantile(took, 0.99))/1e3
	return s, nil
}

// use is the CPU time of the server and of Redis so far, and the calls to Redis.
type use struct {
	server, redis time.Duration
	calls         int64
}

func (b *bench) use(t *trial) (u use, err error) {
	if u.server, err = t.server.CPU(); err != nil {
		return u, err
	}
	if u.redis, err = b.redis.CPU(); err != nil {
		return u, err
	}
	calls, err := b.redis.Calls()
	for _, name := range t.commands {
		u.calls += calls[name]
	}
	return u, err
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
