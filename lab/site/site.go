// Package site runs Caddys of this module as processes, for the programs of the
// laboratory. A Workshop has a folder and a Caddy binary, from which it starts Sites
// with ports of their own; a Config says what a Site serves and where it counts. The
// package is built on caddyproc, and independent of Redis.
package site

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// Workshop is a temporary folder and the path of a Caddy.
type Workshop struct {
	Dir, Caddy string
	starts     atomic.Int64
}

// Open makes a workshop with the Caddy at a path, or builds one if the path is empty.
func Open(caddy string) (*Workshop, error) {
	dir, err := os.MkdirTemp("", "lab-")
	if err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	w := &Workshop{Dir: dir, Caddy: caddy}
	if caddy == "" {
		if w.Caddy, err = caddyproc.Build(dir); err != nil {
			return nil, errors.Join(err, w.Close())
		}
	}
	return w, nil
}

// Close removes the folder.
func (w *Workshop) Close() error { return os.RemoveAll(w.Dir) }

// Config is a Caddyfile without its addresses.
type Config struct {
	Log     string   // an option of the log
	Stores  string   // the block of the global option rate_limit
	Servers string   // the block of the global option servers
	Routes  []string // the block of each site
	Stderr  bool     // copies the log to stderr
}

func (c *Config) text(admin string, addrs []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "{\nadmin %s\npersist_config off\ndefault_bind 127.0.0.1\nlog {\n%s\n}\nservers {\n%s\n}\nrate_limit {\n%s\n}\n}\n", admin, c.Log, c.Servers, c.Stores)
	for i, route := range c.Routes {
		fmt.Fprintf(&b, "http://%s {\n%s\n}\n", addrs[i], route)
	}
	return b.String()
}

// Site is a running Caddy.
type Site struct {
	Addrs []string // of the sites, as host:port
	Admin string   // the address of the admin API
	Logs  *caddyproc.Logs
	*caddyproc.Process
}

// Start runs a Caddy in a folder of its own.
func (w *Workshop) Start(config Config) (*Site, error) {
	s := &Site{Logs: new(caddyproc.Logs)}
	log := io.Writer(s.Logs)
	if config.Stderr {
		log = io.MultiWriter(log, os.Stderr)
	}
	dir := filepath.Join(w.Dir, fmt.Sprintf("caddy-%d", w.starts.Add(1)))
	var addrs []string
	for range len(config.Routes) + 1 {
		port, release, err := process.ReservePort()
		if err != nil {
			return nil, err
		}
		defer func() { _ = release() }()
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", port))
	}
	s.Admin, s.Addrs = addrs[0], addrs[1:]
	var err error
	if s.Process, err = caddyproc.Start(w.Caddy, dir, config.text(s.Admin, s.Addrs), log, addrs...); err != nil {
		return nil, fmt.Errorf("%w; its log:\n%s", err, s.Logs)
	}
	return s, nil
}

// StartAll runs n Caddys with the same config.
func (w *Workshop) StartAll(n int, config Config) (sites []*Site, err error) {
	for range n {
		s, err := w.Start(config)
		if err != nil {
			return nil, errors.Join(err, StopAll(sites))
		}
		sites = append(sites, s)
	}
	return sites, nil
}

// StopAll ends Caddys gracefully. A panic or a data race in one of them is an error.
func StopAll(sites []*Site) error {
	return traffic.Each(sites, func(s *Site) error {
		s.Stop()
		return s.Logs.Fault()
	})
}

var client = &http.Client{Timeout: 10 * time.Second}

// Get reads a path of the admin API.
func (s *Site) Get(path string) (text []byte, err error) {
	resp, err := client.Get("http://" + s.Admin + path)
	if err == nil {
		defer resp.Body.Close()
		text, err = io.ReadAll(resp.Body)
	}
	if err != nil {
		return nil, fmt.Errorf("query the admin API: %w", err)
	}
	return text, nil
}

// Metrics reads the metrics.
func (s *Site) Metrics() (caddyproc.Metrics, error) {
	text, err := s.Get("/metrics")
	if err != nil {
		return nil, err
	}
	return caddyproc.ParseMetrics(string(text))
}

// AllMetrics reads the metrics of several Caddys.
func AllMetrics(sites []*Site) (all []caddyproc.Metrics, err error) {
	for _, s := range sites {
		m, err := s.Metrics()
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}
