// Command algorithms draws what each algorithm does with the same requests, as
// docs/img/algorithms.svg, and measures how exact and how dear each is, as the
// tables of docs/algorithms.md. The picture and the accuracy come from a fixed
// seed; what Redis needs is measured.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/shardlimit/caddy-shardlimit/internal/document"
)

var (
	picture  = flag.String("picture", "docs/img/algorithms.svg", "file to write the picture to")
	target   = flag.String("document", "docs/algorithms.md", "file to write the tables to, below the mark")
	requests = flag.Int("requests", 1_000_000, "requests of the simulation, of a hundredth as many clients")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "algorithms:", err)
		os.Exit(1)
	}
}

func run() error {
	if err := os.WriteFile(*picture, []byte(draw()), 0o644); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	accuracy := accuracyTable(simulate(*requests))
	cost, err := measureRedis()
	if err != nil {
		return fmt.Errorf("measure Redis: %w", err)
	}
	return document.Rewrite(*target, "algorithms", accuracy+"\n"+costTable(cost))
}
