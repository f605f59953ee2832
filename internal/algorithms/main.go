// Command algorithms draws what each algorithm does with the same requests, as
// docs/img/algorithms.svg, and measures how exact and how dear each is, as the
// tables of docs/algorithms.md. The picture and the accuracy come from a fixed
// seed; what Redis needs is measured.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
)

var (
	picture  = flag.String("picture", "docs/img/algorithms.svg", "file to write the picture to")
	document = flag.String("document", "docs/algorithms.md", "file to write the tables to, below the mark")
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
	return rewrite(*document, accuracy+"\n"+costTable(cost))
}

const mark = "<!-- what follows is written by make algorithms -->\n"

// rewrite replaces what follows the mark in a file.
func rewrite(file, text string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the document: %w", err)
	}
	head, _, found := strings.Cut(string(old), mark)
	if !found {
		return fmt.Errorf("%s has no line %q", file, mark)
	}
	if err := os.WriteFile(file, []byte(head+mark+"\n"+text), 0o644); err != nil {
		return fmt.Errorf("write the document: %w", err)
	}
	return nil
}
