package main

import (
	"bytes"
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
// allowed request on the memory store, as BenchmarkHandler counts them.
func ownAllocations(ctx context.Context) (float64, error) {
	root, err := caddyproc.Root()
	if err != nil {
		return 0, err
	}
	test := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "BenchmarkHandler/own", "-benchtime", "1x", ".")
	test.Dir, test.Stderr = root, os.Stderr
	out, err := test.Output()
	if err != nil {
		return 0, fmt.Errorf("run BenchmarkHandler: %w: %s", err, out)
	}
	return readOwnAllocations(out)
}

func readOwnAllocations(out []byte) (float64, error) {
	match := ownAllocs.FindSubmatch(bytes.TrimSpace(out))
	if match == nil {
		return 0, fmt.Errorf("BenchmarkHandler told no allocations: %s", out)
	}
	own, err := strconv.ParseFloat(string(match[1]), 64)
	if err != nil {
		return 0, fmt.Errorf("read what BenchmarkHandler told: %w", err)
	}
	return own, nil
}
