// Command lab is the laboratory: it measures the limiter, breaks its stores, and writes
// the results to dist/evidence. Each of its programs is a package with a function Run,
// which parses its flags, and starts and stops its servers on the loopback interface.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/shardlimit/caddy-shardlimit/lab/algorithms"
	"github.com/shardlimit/caddy-shardlimit/lab/bench"
	"github.com/shardlimit/caddy-shardlimit/lab/calls"
	"github.com/shardlimit/caddy-shardlimit/lab/demo"
	"github.com/shardlimit/caddy-shardlimit/lab/faults"
	"github.com/shardlimit/caddy-shardlimit/lab/guarantees"
	"github.com/shardlimit/caddy-shardlimit/lab/scaling"
	"github.com/shardlimit/caddy-shardlimit/lab/soak"
	"github.com/shardlimit/caddy-shardlimit/lab/zones"
)

var programs = []struct {
	name, does string
	run        func(ctx context.Context, args []string) error
}{
	{"bench", "measure the limiter and its peers", bench.Run},
	{"faults", "break Redis in many ways while Caddy serves", faults.Run},
	{"guarantees", "measure what clients get against the bounds", guarantees.Run},
	{"calls", "count the calls to Redis per request", calls.Run},
	{"algorithms", "draw and measure the algorithms", algorithms.Run},
	{"scaling", "compute the servers that traffic needs, for docs/capacity.md too", scaling.Run},
	{"zones", "measure Caddys with many zones", zones.Run},
	{"soak", "break something every few seconds under load, and balance the books", soak.Run},
	{"demo", "show the limiter at work on Redis servers of its own", demo.Run},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	name := "help"
	if len(os.Args) > 1 {
		name = os.Args[1]
	}
	for _, p := range programs {
		if p.name == name {
			if err := p.run(ctx, os.Args[2:]); err != nil {
				fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
				os.Exit(1)
			}
			return
		}
	}
	out, status := os.Stdout, 0
	if name != "help" {
		out, status = os.Stderr, 2
	}
	fmt.Fprintln(out, "usage: go run . <program> [flags]; go run . <program> -help lists the flags")
	for _, p := range programs {
		fmt.Fprintf(out, "  %-10s  %s\n", p.name, p.does)
	}
	os.Exit(status)
}
