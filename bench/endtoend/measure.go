package endtoend

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// sample is one case in one round. CPU times are per request, in microseconds.
type sample struct {
	// caddy, primary and replica are CPU times; of the latter all shards'
	// together. busiest is that of the servers of the shard that had most to do.
	caddy, primary, replica, busiest float64
	// calls are those of Redis per request, and perSecond those in a second.
	calls, perSecond float64
	// rate is requests/s.
	rate float64
}

// samples are those of all rounds, by the name of the case.
type samples map[string][]sample

// spread is that of a figure of a case.
func (s samples) spread(name string, of func(sample) float64) spread.Spread {
	values := make([]float64, 0, len(s[name]))
	for _, one := range s[name] {
		values = append(values, of(one))
	}
	return spread.Of(values)
}

// ratio is the CPU time of Caddy in a case, relative to that of the floor in the
// same round.
func (s samples) ratio(name, floor string) spread.Spread {
	var values []float64
	for i, one := range s[name] {
		values = append(values, one.caddy/s[floor][i].caddy)
	}
	return spread.Of(values)
}

// measureAll runs each case once.
func (l *lab) measureAll(ctx context.Context, cases []*site, into samples, isCounted bool) error {
	// No case is always the first after another.
	l.turn++
	for i := range cases {
		c := cases[(i+l.turn)%len(cases)]
		length := l.opts.Length
		if !isCounted {
			length /= 3
		}
		s, err := l.measure(ctx, c, length)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		if isCounted {
			into[c.name] = append(into[c.name], s)
		}
	}
	return nil
}

// lastCharges is how long those may take that are on their way.
const lastCharges = 50 * time.Millisecond

// measure runs a case with as many requests as fit.
func (l *lab) measure(ctx context.Context, c *site, length time.Duration) (s sample, err error) {
	if _, err := c.send(ctx, loadgen.Options{Connections: l.opts.Connections, Duration: leadIn(length)}); err != nil {
		return s, err
	}
	before, err := c.use()
	if err != nil {
		return s, err
	}
	result, err := c.send(ctx, loadgen.Options{Connections: l.opts.Connections, Duration: length})
	if err != nil {
		return s, err
	}
	time.Sleep(lastCharges)
	after, err := c.use()
	if err != nil {
		return s, err
	}
	return after.since(&before).per(result), nil
}

// greet has each client of the cases come once, so that those with a limit of
// one request are refused from then on.
func (l *lab) greet(ctx context.Context) error {
	for _, c := range l.cases {
		if c.floor == "" || c.keys > clients {
			continue
		}
		result, err := c.load(ctx, loadgen.Options{Connections: l.opts.Connections, Requests: c.keys})
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		if result.Requests != c.keys {
			return fmt.Errorf("%s: %d of %d clients came", c.name, result.Requests, c.keys)
		}
	}
	time.Sleep(lastCharges)
	return nil
}

// send asks the site, for its clients in turn, and wants its status.
func (c *site) send(ctx context.Context, opts loadgen.Options) (loadgen.Result, error) {
	result, err := c.load(ctx, opts)
	if err != nil {
		return result, err
	}
	if odd := result.Requests - result.Status[c.status]; odd > result.Requests/1000 {
		return result, fmt.Errorf("%d of %d responses have another status than %d", odd, result.Requests, c.status)
	}
	return result, nil
}

func (c *site) load(ctx context.Context, opts loadgen.Options) (loadgen.Result, error) {
	first := c.sent
	opts.Addr, opts.Header = c.addr, "X-Key"
	opts.Key = func(n int64) string { return clientName((first + n) % c.keys) }
	result, err := loadgen.Run(ctx, opts)
	c.sent += result.Requests
	if err != nil {
		return result, err
	}
	if err := ctx.Err(); err != nil {
		return result, fmt.Errorf("send requests: %w", err)
	}
	return result, nil
}

func clientName(n int64) string { return "client-" + strconv.FormatInt(n, 10) }

// use is what processes have used so far.
type use struct {
	caddy, primary, replica time.Duration
	// shards are the CPU times of each shard's servers.
	shards []time.Duration
	calls  int64
}

func (c *site) use() (u use, err error) {
	if u.caddy, err = c.caddy.CPU(); err != nil {
		return u, err
	}
	for _, shard := range c.store.shards {
		primary, err := shard.Primary.CPU()
		if err != nil {
			return u, err
		}
		u.primary += primary
		made, err := shard.Primary.Asked()
		if err != nil {
			return u, err
		}
		u.calls += made
		all := primary
		for _, server := range shard.Replicas {
			replica, err := server.CPU()
			if err != nil {
				return u, err
			}
			u.replica += replica
			all += replica
			made, err := server.Asked()
			if err != nil {
				return u, err
			}
			u.calls += made
		}
		u.shards = append(u.shards, all)
	}
	return u, nil
}

func (u use) since(before *use) use {
	d := use{
		caddy: u.caddy - before.caddy, primary: u.primary - before.primary, replica: u.replica - before.replica,
		calls: u.calls - before.calls,
	}
	for i := range u.shards {
		d.shards = append(d.shards, u.shards[i]-before.shards[i])
	}
	return d
}

// per divides it by the requests.
func (u use) per(r loadgen.Result) sample {
	requests := float64(max(r.Requests, 1))
	each := func(d time.Duration) float64 { return d.Seconds() * 1e6 / requests }
	s := sample{
		caddy: each(u.caddy), primary: each(u.primary), replica: each(u.replica),
		calls: float64(u.calls) / requests,
		// What came in less than a second came in a second.
		perSecond: float64(u.calls) / math.Max(r.Elapsed.Seconds(), 1),
		rate:      requests / r.Elapsed.Seconds(),
	}
	for _, d := range u.shards {
		s.busiest = max(s.busiest, each(d))
	}
	return s
}

func (s sample) requests() float64    { return s.rate }
func (s sample) redis() float64       { return s.primary + s.replica }
func (s sample) ofCaddy() float64     { return s.caddy }
func (s sample) ofPrimary() float64   { return s.primary }
func (s sample) ofReplica() float64   { return s.replica }
func (s sample) ofBusiest() float64   { return s.busiest }
func (s sample) ofCalls() float64     { return s.calls }
func (s sample) ofPerSecond() float64 { return s.perSecond }
