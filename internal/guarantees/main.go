// Command guarantees measures how much more than their limits, and how much less,
// clients get of real Caddys on real Redis servers whose replica lags, holds that
// against what docs/guarantees.md promises, and writes there what it has seen. It
// starts its own servers, on the loopback interface.
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
	target = flag.String("document", "docs/guarantees.md", "file to write the tables to, below the mark")
	only   = flag.String("only", "", "try the cells that match this expression, such as 'gcra.*4 Caddys', and write no document")
	binary = flag.String("caddy", "", "the Caddy to try; without it, it is built")
	lasts  = flag.Duration("lasts", 5*window/2, "how long each cell is tried")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "guarantees:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	wanted, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("read -only: %w", err)
	}
	dir, err := os.MkdirTemp("", "guarantees-")
	if err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	defer os.RemoveAll(dir)
	set := settings{caddy: *binary, dir: dir, lasts: *lasts}
	if set.caddy == "" {
		if set.caddy, err = caddyproc.Build(dir); err != nil {
			return err
		}
	}
	began := time.Now()
	outcomes, err := tryCells(ctx, set, wanted)
	broken, failed := tryFaults(ctx, set, wanted)
	err = errors.Join(err, failed)
	if *only == "" && ctx.Err() == nil {
		err = errors.Join(err, document.Rewrite(*target, "guarantees", report(set, time.Since(began), outcomes, broken)))
	}
	return err
}

// tryCells tries the wanted cells, and goes on where a bound is exceeded: the
// error tells which.
func tryCells(ctx context.Context, set settings, wanted *regexp.Regexp) (all []*outcome, err error) {
	m, err := newMatrix(set, limits(), caddyCounts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.stop()) }()
	for _, group := range groups(m.limits) {
		var some []cell
		for _, c := range group {
			if wanted.MatchString(c.String()) {
				some = append(some, c)
			}
		}
		if len(some) == 0 {
			continue
		}
		outcomes, failed := m.try(ctx, some)
		if failed != nil {
			return all, errors.Join(err, failed)
		}
		for _, o := range outcomes {
			fmt.Println(o)
			for _, text := range o.breaches() {
				fmt.Println("EXCEEDED", text)
				err = errors.Join(err, errors.New(text))
			}
		}
		all = append(all, outcomes...)
	}
	return all, err
}
