// Command calls counts the calls to Redis that a request costs, for the table
// and the plot of docs/ledger.md. It starts its own Redis servers, on the
// loopback interface, and takes the counts from their INFO commandstats.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/document"
)

var (
	picture = flag.String("picture", "docs/img/calls.svg", "file to write the picture to")
	target  = flag.String("document", "docs/ledger.md", "file to write the tables to, below the mark")
	span    = flag.Duration("duration", 3*time.Second, "how long each case without batches runs")
	window  = flag.Duration("window", 8*time.Second, "the window of the limits with batches; each case takes four")
)

// patience bounds the whole.
const patience = 10 * time.Minute

func main() {
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "calls:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	singles, err := measureSingles(ctx, singleCases, *span)
	if err != nil {
		return err
	}
	fmt.Println(singleTable(singles))
	batches, err := measureBatches(ctx, batchLimits, batchProcesses, *window)
	if err != nil {
		return err
	}
	text := head() + singleTable(singles) + "\n" + batchTable(batches)
	fmt.Print(text)
	if err := os.WriteFile(*picture, []byte(draw(batches)), 0o644); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	return document.Rewrite(*target, "calls", text)
}

// errEnded is the error of a measurement that was told to end.
var errEnded = errors.New("ended early")
