// Command soak runs two Caddys on three shards of different kinds under load,
// breaks something every few seconds, and in the end requires that the books
// balance: what was served is in Redis, or was counted as lost or uncertain, and
// neither memory nor goroutines have grown.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"
)

var (
	duration = flag.Duration("duration", 10*time.Minute, "how long the load lasts")
	seed     = flag.Uint64("seed", 0, "of the faults; 0 means another one each time")
	pause    = flag.Duration("pause", 3*time.Second, "how long all is well between two faults, on average")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano()) //nolint:gosec // any number will do
	}
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "soak")
	if err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	defer os.RemoveAll(dir)
	w, err := launchWorld()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	sites, err := startSites(dir, w)
	if err != nil {
		return err
	}
	defer sites.stop()

	fmt.Printf("seed %d, %v of load\n", *seed, *duration)
	loading, end := context.WithTimeout(ctx, *duration)
	defer end()
	served := startLoad(loading, sites)
	early, err := warmed(loading, sites)
	if err != nil {
		return err
	}
	faults := bringFaults(loading, w, rand.New(rand.NewPCG(*seed, 1)))
	served.wait()
	if err := mended(ctx, w); err != nil {
		return fmt.Errorf("mend what is broken (seed %d): %w", *seed, err)
	}
	fmt.Println(faults)
	return balance(ctx, w, sites, served, early)
}

// mendTimeout bounds the time until the world is whole after the last fault.
const mendTimeout = 3 * time.Minute

// mended mends the world. A step that fails because another server is not ready
// yet is tried again.
func mended(ctx context.Context, w *world) error {
	ctx, cancel := context.WithTimeout(ctx, mendTimeout)
	defer cancel()
	for {
		err := w.mend(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Second):
		}
	}
}

// warmed is what the Caddys need once all has been used: a tenth into the load.
func warmed(ctx context.Context, s sites) (need, error) {
	select {
	case <-time.After(min(*duration/10, time.Minute)):
	case <-ctx.Done():
	}
	return s.need()
}
