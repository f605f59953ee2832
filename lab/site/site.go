// Package site runs Caddys of this module as processes, for the programs of the
// laboratory: a Workshop has a folder and a Caddy, from which it starts Sites with
// ports of their own. A Config says what a Site serves and where it counts. The
// package builds upon caddyproc, and knows nothing of Redis.
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
)

// Workshop is a folder that is removed in the end, and a Caddy.
type Workshop struct {
	Dir, Caddy string
	starts     atomic.Int64
}

// Open makes a workshop with the Caddy of a path, or one that it builds.
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
	Log    string   // an option of the log
	Stores string   // the block of the global option rate_limit
	Routes []string // the block of each site
	Stderr bool     // show the log as well
}

func (c *Config) text(admin string, addrs []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "{\nadmin %s\npersist_config off\nlog {\n%s\n}\nrate_limit {\n%s\n}\n}\n", admin, c.Log, c.Stores)
	for i, route := range c.Routes {
		fmt.Fprintf(&b, "http://%s {\n%s\n}\n", addrs[i], route)
	}
	return b.String()
}

// Site is a running Caddy.
type Site struct {
	// Addrs are the addresses of the sites, host:port, and Admin that of the admin
	// API.
	Addrs []string
	Admin string
	Logs  *caddyproc.Logs
	*caddyproc.Process
}

// startAttempts is how often Caddy is started where it loses a port that was free.
const startAttempts = 3

// Start runs a Caddy in a folder of its own.
func (w *Workshop) Start(config Config) (*Site, error) {
	s := &Site{Logs: new(caddyproc.Logs)}
	log := io.Writer(s.Logs)
	if config.Stderr {
		log = io.MultiWriter(log, os.Stderr)
	}
	dir := filepath.Join(w.Dir, fmt.Sprintf("caddy-%d", w.starts.Add(1)))
	var err error
	for range startAttempts {
		var addrs []string
		if addrs, err = caddyproc.FreeAddrs(len(config.Routes) + 1); err != nil {
			return nil, err
		}
		s.Admin, s.Addrs = addrs[0], addrs[1:]
		if s.Process, err = caddyproc.Start(w.Caddy, dir, config.text(s.Admin, s.Addrs), log, addrs...); err == nil {
			return s, nil
		}
	}
	return nil, fmt.Errorf("%w; its log:\n%s", err, s.Logs)
}

// StartAll runs n Caddys.
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

// StopAll ends Caddys gracefully. It is an error if one panicked or had a data
// race.
func StopAll(sites []*Site) error {
	var errs []error
	for _, s := range sites {
		s.Stop()
		errs = append(errs, s.Logs.Fault())
	}
	return errors.Join(errs...)
}

var client = &http.Client{Timeout: 10 * time.Second}

// Get asks the admin API.
func (s *Site) Get(path string) ([]byte, error) {
	resp, err := client.Get("http://" + s.Admin + path)
	if err != nil {
		return nil, fmt.Errorf("ask the admin API: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("ask the admin API: %w", err)
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

// AllMetrics reads the metrics of Caddys.
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
