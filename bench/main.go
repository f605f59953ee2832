// Command bench compares a Take of the Redis store with a decision of other
// limiters for Go that count in Redis. All use one redis-server, which it
// starts, and take turns, several rounds; what counts is the ratio to the
// fastest of the others in the same round.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

var (
	rounds   = flag.Int("rounds", 15, "rounds, of which the median counts")
	duration = flag.Duration("duration", 300*time.Millisecond, "how long each limiter runs in a round")
	out      = flag.String("o", "", "file to write the report to, between two marks, besides standard output")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	if *rounds < 1 || *duration <= 0 {
		return errors.New("rounds and duration must be positive")
	}
	server, err := redistest.Launch(redistest.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	var all []*comparison
	for _, goroutines := range []int{64, 256} {
		comparisons, err := compare(kinds, goroutines, *rounds, *duration, server)
		if err != nil {
			return err
		}
		all = append(all, comparisons...)
	}
	text, err := report(all, *rounds, *duration, server)
	if err != nil {
		return err
	}
	fmt.Print(text)
	if *out == "" {
		return nil
	}
	return rewrite(*out, text)
}
