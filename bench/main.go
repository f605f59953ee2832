// Command bench measures the limiter: its stores against other limiters for Go,
// and in Caddy against Caddy without it. It starts the servers that it needs, and
// writes docs/benchmarks.md and its pictures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/shardlimit/caddy-shardlimit/bench/endtoend"
	"github.com/shardlimit/caddy-shardlimit/bench/libraries"
	"github.com/shardlimit/caddy-shardlimit/internal/document"
	"github.com/shardlimit/caddy-shardlimit/internal/machine"
)

var (
	docs   = flag.String("docs", "", "folder of the documents to write to; none if empty")
	quick  = flag.Bool("quick", false, "measure everything once, for a moment: it shows that it runs, and no speed")
	rounds = flag.Int("rounds", 5, "rounds, of which the median counts")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// What -quick makes of each measurement.
const (
	quickLibraries = 50 * time.Millisecond
	quickEndToEnd  = 100 * time.Millisecond
)

func run(ctx context.Context) error {
	if *rounds < 1 {
		return errors.New("rounds must be positive")
	}
	if *quick && *docs != "" {
		return errors.New("-quick shows no speed: leave out -docs")
	}
	began, times := time.Now(), machine.Now()
	library, caddy := libraries.Options{Rounds: *rounds}, endtoend.Options{Rounds: *rounds}
	if *quick {
		library = libraries.Options{Rounds: 1, Length: quickLibraries, Goroutines: []int{1, 64}}
		caddy = endtoend.Options{Rounds: 1, Length: quickEndToEnd, Quick: true}
	}
	m := new(measured)
	var err error
	if m.versions, err = versions(ctx); err != nil {
		return err
	}
	if m.own, err = ownAllocations(ctx, library.Rounds); err != nil {
		return err
	}
	if m.endToEnd, err = endtoend.Run(ctx, caddy, os.Stderr); err != nil {
		return fmt.Errorf("measure the limiter in Caddy: %w", err)
	}
	if m.libraries, err = libraries.Run(ctx, library, os.Stderr); err != nil {
		return fmt.Errorf("measure the stores: %w", err)
	}
	m.took, m.stolen = time.Since(began), machine.Now().StolenSince(times)
	text := m.markdown()
	fmt.Print(text)
	if *docs == "" {
		return m.drawNowhere()
	}
	pictures := filepath.Join(*docs, "img")
	return errors.Join(
		m.endToEnd.Draw(pictures),
		m.libraries.Draw(pictures),
		document.Rewrite(filepath.Join(*docs, "benchmarks.md"), "bench", text),
	)
}

// drawNowhere draws the pictures to see that it can be done.
func (m *measured) drawNowhere() error {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	return errors.Join(m.endToEnd.Draw(dir), m.libraries.Draw(dir), os.RemoveAll(dir))
}
