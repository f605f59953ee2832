package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
)

const (
	// clients is how many come to each path.
	clients = 50
	// workers is how many requests of a path run at the same time at each Caddy.
	workers = 4
)

// load is what was served.
type load struct {
	running sync.WaitGroup
	mu      sync.Mutex
	// statuses count the answers, by path.
	statuses map[string]map[int]int64
	failed   []error
}

// startLoad sends requests to all paths of all Caddys until ctx ends.
func startLoad(ctx context.Context, all sites) *load {
	l := &load{statuses: map[string]map[int]int64{}}
	for _, path := range append([]string{"others"}, counted...) {
		l.statuses[path] = map[int]int64{}
		for _, s := range all {
			l.running.Go(func() { l.run(ctx, s, path) })
		}
	}
	return l
}

// run sends requests in short spells, so that an end is soon seen.
func (l *load) run(ctx context.Context, s *caddyproc.Site, path string) {
	for ctx.Err() == nil {
		result, err := loadgen.Run(context.Background(), loadgen.Options{
			Addr: s.Addr, Path: "/" + path, Header: "X-Key", Connections: workers, Duration: time.Second,
			Key:        func(n int64) string { return "client-" + strconv.FormatInt(n%clients, 10) },
			OnResponse: func(string, *http.Response) { time.Sleep(5 * time.Millisecond) },
		})
		l.mu.Lock()
		for status, n := range result.Status {
			l.statuses[path][status] += n
		}
		if err != nil {
			l.failed = append(l.failed, fmt.Errorf("%s: %w", path, err))
		}
		l.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (l *load) wait() { l.running.Wait() }
