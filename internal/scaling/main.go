// Command scaling computes what docs/scaling.md says: what requests cost Redis in
// many Caddys and on many shards, and what hardware that needs. It simulates
// from a fixed seed, without Redis and without a clock, and takes what single
// calls cost from the tables of the other documents.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

var (
	documents = flag.String("documents", "docs", "directory of what was measured")
	target    = flag.String("document", "docs/scaling.md", "file to write to, between the marks")
	pictures  = flag.String("pictures", "docs/img", "directory to write the pictures to")
)

// The pictures.
const (
	clientPicture = "scaling-client.svg"
	shardPicture  = "scaling-shard.svg"
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "scaling:", err)
		os.Exit(1)
	}
}

func run() error {
	read := map[string]measured{}
	for _, name := range []string{"benchmarks", "design", "ledger"} {
		m, err := readMeasured(filepath.Join(*documents, name+".md"))
		if err != nil {
			return err
		}
		read[name] = m
	}
	sc, err := newScenario(read["benchmarks"], read["design"], read["ledger"])
	if err != nil {
		return err
	}
	for name, text := range map[string]string{clientPicture: drawClient(sc), shardPicture: drawShard(sc)} {
		if err := os.WriteFile(filepath.Join(*pictures, name), []byte(text), 0o644); err != nil {
			return fmt.Errorf("write the picture: %w", err)
		}
	}
	return rewrite(*target, map[string]string{
		"costs": costTable(&sc.costs), "requests": requestTable(sc), "shards": shardTable(sc),
		"example": exampleText(sc), "anchors": anchorTable(sc.anchors),
	})
}
