package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

var ownAllocs = regexp.MustCompile(`(?m)^BenchmarkHandler/own_allocations\S*\s.*\s([0-9.]+) own-allocs/op`)

// ownAllocations is how many allocations the limiter's own code makes for an
// allowed request on the memory store, as BenchmarkHandler counts them in so many
// rounds.
func ownAllocations(ctx context.Context, rounds int) (own []float64, err error) {
	root, err := caddyproc.Root()
	if err != nil {
		return nil, err
	}
	test := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "BenchmarkHandler/own", "-benchtime", "1x", "-count", strconv.Itoa(rounds), ".")
	test.Dir, test.Stderr = root, os.Stderr
	out, err := test.Output()
	if err != nil {
		return nil, fmt.Errorf("run BenchmarkHandler: %w: %s", err, out)
	}
	if own, err = readOwnAllocations(out); err == nil && len(own) != rounds {
		err = fmt.Errorf("BenchmarkHandler told of %d rounds, want %d: %s", len(own), rounds, out)
	}
	return own, err
}

func readOwnAllocations(out []byte) (own []float64, err error) {
	for _, match := range ownAllocs.FindAllSubmatch(out, -1) {
		each, err := strconv.ParseFloat(string(match[1]), 64)
		if err != nil {
			return nil, fmt.Errorf("read what BenchmarkHandler told: %w", err)
		}
		own = append(own, each)
	}
	return own, nil
}
