// Command bench measures what the limiter costs in Caddy's process and in
// Redis, as CPU time per request, against Caddy without a limiter that sends
// the same headers. All cases run in turn, several rounds, in one Caddy; what
// counts is their ratio to the floor of the same round.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

var (
	rounds      = flag.Int("rounds", 7, "rounds, of which the median counts")
	duration    = flag.Duration("duration", 3*time.Second, "how long each case runs in a round")
	connections = flag.Int("connections", 64, "requests at a time")
	clients     = flag.Int64("clients", 500, "distinct client keys")
	only        = flag.String("only", "", "regular expression for the names of the cases to run, beside the floors; all if empty")
	out         = flag.String("o", "", "file to write the report to, as Markdown, besides standard output")
)

func main() {
	flag.Parse()
	wanted, err := regexp.Compile(*only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	cases = slices.DeleteFunc(cases, func(c benchCase) bool { return !isFloor(c.name) && !wanted.MatchString(c.name) })
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	shard, err := redistest.LaunchShard(1)
	if err != nil {
		return err
	}
	defer func() { _ = shard.Stop() }()
	caddy, err := startCaddy(dir, shard)
	if err != nil {
		return err
	}
	defer caddy.Stop()

	perRequest := map[string][]sample{}
	for round := range *rounds + 1 {
		for _, c := range cases {
			s, err := measure(c, caddy, shard)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			// The first round opens windows and connections.
			if round > 0 {
				perRequest[c.name] = append(perRequest[c.name], s)
			}
		}
	}
	return report(perRequest)
}

// isFloor tells whether other cases are compared with that one.
func isFloor(name string) bool {
	return slices.ContainsFunc(cases, func(c benchCase) bool { return c.floor == name })
}

// sample is one case in one round, per request in microseconds.
type sample struct{ caddy, primary, replica, rate float64 }

func measure(c benchCase, p *caddyproc.Process, shard *redistest.Shard) (s sample, err error) {
	caddyBefore, primaryBefore, replicaBefore, err := cpuTimes(p, shard)
	if err != nil {
		return s, err
	}
	keys := c.clients
	if keys == 0 {
		keys = *clients
	}
	result, err := loadgen.Run(context.Background(), loadgen.Options{
		Addr: c.addr, Header: "X-Key", Connections: *connections, Duration: *duration,
		Key: func(n int64) string { return "client-" + strconv.FormatInt(n%keys, 10) },
	})
	if err != nil {
		return s, err
	}
	// The last charges are on their way still.
	time.Sleep(50 * time.Millisecond)
	caddyAfter, primaryAfter, replicaAfter, err := cpuTimes(p, shard)
	if err != nil {
		return s, err
	}
	if odd := result.Requests - result.Status[c.status]; odd > keys {
		return s, fmt.Errorf("%d responses have another status than %d", odd, c.status)
	}
	each := func(before, after time.Duration) float64 {
		return float64((after - before).Microseconds()) / float64(result.Requests)
	}
	return sample{
		caddy:   each(caddyBefore, caddyAfter),
		primary: each(primaryBefore, primaryAfter),
		replica: each(replicaBefore, replicaAfter),
		rate:    float64(result.Requests) / result.Elapsed.Seconds(),
	}, nil
}

func cpuTimes(p *caddyproc.Process, shard *redistest.Shard) (caddy, primary, replica time.Duration, err error) {
	if caddy, err = p.CPU(); err != nil {
		return
	}
	if primary, err = shard.Primary.CPU(); err != nil {
		return
	}
	replica, err = shard.Replicas[0].CPU()
	return
}

func median(samples []sample, of func(sample) float64) float64 {
	var values []float64
	for _, s := range samples {
		values = append(values, of(s))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// startCaddy builds Caddy and runs it with one site for each case.
func startCaddy(dir string, shard *redistest.Shard) (*caddyproc.Process, error) {
	binary, err := caddyproc.Build(dir)
	if err != nil {
		return nil, err
	}
	addrs, err := caddyproc.FreeAddrs(len(cases) + 1)
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	fmt.Fprintf(&b, globalOptions, addrs[len(cases)], shard.Primary.Addr(), shard.Replicas[0].Addr())
	for i := range cases {
		cases[i].addr = addrs[i]
		fmt.Fprintf(&b, "http://%s {\n%s\n}\n", addrs[i], cases[i].site)
	}
	return caddyproc.Start(binary, filepath.Join(dir, "run"), b.String(), os.Stderr, addrs...)
}
