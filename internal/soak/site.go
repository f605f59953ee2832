package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

// caddyfile has room for the address of the admin API, the shards, and the
// address of the site. Every zone has a path of its own.
const caddyfile = `{
	admin %s
	persist_config off
	log {
		level WARN
	}
	rate_limit {
		store redis {
			%s
		}
	}
}

http://%s {
	handle /after {
		rate_limit {header.X-Key} 1000000000 24h after
	}
	handle /before {
		rate_limit {
			zone before {
				key {header.X-Key}
				events 1000000000
				window 24h
				charge before
				on_error deny
			}
		}
	}
	handle /batch {
		rate_limit {
			zone batch {
				key {header.X-Key}
				events 1000000
				window 24h
				charge before
				batch auto
				on_error deny
			}
		}
	}
	handle /local {
		rate_limit {
			zone local {
				key {header.X-Key}
				events 1000000000
				window 24h
				on_error local
			}
		}
	}
	handle /others {
		rate_limit {
			zone sliding {
				key {header.X-Key}
				events 50
				window 2s
				algorithm sliding_window
			}
			zone pace {
				key {header.X-Key}
				events 100
				window 1s
				algorithm gcra
			}
			zone slots {
				key {header.X-Key}
				events 20
				window 5s
				algorithm concurrency
			}
		}
	}
	respond ok
}
`

// counted are the zones whose counts are compared with what was served.
var counted = []string{"after", "before", "batch", "local"}

// site is a running Caddy.
type site struct {
	addr, admin string
	process     *caddyproc.Process
	logs        *logs
}

type sites []*site

// logs is what Caddy has said.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements [io.Writer].
func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func startSites(dir string, w *world) (sites, error) {
	binary, err := caddyproc.Build(dir)
	if err != nil {
		return nil, err
	}
	var all sites
	for i := range 2 {
		addrs, err := caddyproc.FreeAddrs(2)
		if err != nil {
			return nil, err
		}
		s := &site{addr: addrs[0], admin: "http://" + addrs[1], logs: new(logs)}
		config := fmt.Sprintf(caddyfile, addrs[1], w.config(), s.addr)
		if s.process, err = caddyproc.Start(binary, filepath.Join(dir, strconv.Itoa(i)), config, s.logs, addrs...); err != nil {
			return nil, fmt.Errorf("%w; its log:\n%s", err, s.logs)
		}
		all = append(all, s)
	}
	return all, nil
}

// stop ends all of them, which delivers what waits.
func (all sites) stop() {
	for _, s := range all {
		s.process.Stop()
	}
}

// need is what the Caddys take.
type need struct{ memory, goroutines float64 }

func (all sites) need() (n need, err error) {
	for _, s := range all {
		m, err := s.metrics()
		if err != nil {
			return n, err
		}
		n.memory += m.sum("process_resident_memory_bytes")
		n.goroutines += m.sum("go_goroutines")
	}
	return n, nil
}

// metrics are a Caddy's, by name and labels.
type metrics map[string]float64

var client = &http.Client{Timeout: 10 * time.Second}

func (s *site) metrics() (metrics, error) {
	resp, err := client.Get(s.admin + "/metrics")
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	m := metrics{}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && !strings.HasPrefix(line, "#") {
			if m[name], err = strconv.ParseFloat(value, 64); err != nil {
				return nil, fmt.Errorf("read metric %s: %w", line, err)
			}
		}
	}
	return m, nil
}

// sum adds up the metrics of a name that have all of these labels.
func (m metrics) sum(name string, wanted ...string) (n float64) {
	for key, value := range m {
		metric, labels, _ := strings.Cut(key, "{")
		if metric == name && !slices.ContainsFunc(wanted, func(label string) bool { return !strings.Contains(labels, label) }) {
			n += value
		}
	}
	return n
}
