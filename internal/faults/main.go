// Command faults breaks Redis in many ways while a Caddy serves requests, holds
// what comes of it against what docs/failure-modes.md promises, and writes there
// what it has seen. It starts its own servers, on the loopback interface.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/document"
)

var (
	target  = flag.String("document", "docs/failure-modes.md", "file to write the tables to, below the mark")
	only    = flag.String("only", "", "try the cells that match this expression, such as 'killed.*deny', and write no document")
	binary  = flag.String("caddy", "", "the Caddy to try; without it, it is built")
	timeout = flag.Duration("check-timeout", 250*time.Millisecond, "the store's check_timeout; a busy machine exceeds the default")
	during  = flag.Duration("during", 3*time.Second, "how long faults last that do not end by themselves")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	wanted, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("read -only: %w", err)
	}
	dir, err := os.MkdirTemp("", "faults-")
	if err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	defer os.RemoveAll(dir)
	set := settings{
		caddy: *binary, checkTimeout: *timeout, dialTimeout: 200 * time.Millisecond,
		before: 2 * time.Second, during: *during, after: time.Second,
	}
	if set.caddy == "" {
		if set.caddy, err = caddyproc.Build(dir); err != nil {
			return err
		}
	}
	outcomes, err := try(ctx, set, wanted)
	if *only == "" && ctx.Err() == nil {
		err = errors.Join(err, document.Rewrite(*target, "faults", report(set, outcomes)))
	}
	return err
}

// try tries the wanted cells one after the other, and goes on where promises are
// not kept: the error tells which.
func try(ctx context.Context, set settings, wanted *regexp.Regexp) (outcomes []*outcome, err error) {
	for _, c := range cells() {
		if !wanted.MatchString(c.String()) {
			continue
		}
		o, failed := c.run(ctx, set)
		switch {
		case ctx.Err() != nil:
			return outcomes, ctx.Err()
		case failed != nil:
			failed = fmt.Errorf("%s: %w", c, failed)
			fmt.Println(failed)
			err = errors.Join(err, failed)
			continue
		}
		outcomes = append(outcomes, o)
		fmt.Println(o)
		for _, b := range o.unknown() {
			err = errors.Join(err, fmt.Errorf("%s: %s", c, b.text))
		}
	}
	return outcomes, err
}
