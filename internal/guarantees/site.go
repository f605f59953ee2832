package main

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

// clientHeader names the client that is limited.
const clientHeader = "X-Client"

// caddyfile has room for the address of the admin API, the stores, the address of
// the site, the handlers of limits, and what answers.
const caddyfile = `{
	admin %s
	persist_config off
	log {
		exclude http.log.error
	}
	rate_limit {
		%s
	}
}

http://%s {
	route {
		%s
		%s
	}
}
`

// site is a running Caddy.
type site struct {
	addr, admin string
	process     *caddyproc.Process
	logs        *logs
}

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

// startAttempts is how often Caddy is started where a port was lost.
const startAttempts = 3

// startSite runs a Caddy with these parts of a config.
func startSite(binary, dir, stores, handlers, answer string) (*site, error) {
	s := &site{logs: new(logs)}
	// A port that was free may be taken by the time at which Caddy wants it.
	var err error
	for range startAttempts {
		var addrs []string
		if addrs, err = caddyproc.FreeAddrs(2); err != nil {
			return nil, err
		}
		s.addr, s.admin = addrs[0], addrs[1]
		config := fmt.Sprintf(caddyfile, s.admin, stores, s.addr, handlers, answer)
		if s.process, err = caddyproc.Start(binary, dir, config, s.logs, addrs...); err == nil {
			return s, nil
		}
	}
	return nil, fmt.Errorf("%w; its log:\n%s", err, s.logs)
}

// startSites runs n of them.
func startSites(n int, binary, dir, stores, handlers, answer string) (sites []*site, err error) {
	for i := range n {
		s, err := startSite(binary, filepath.Join(dir, fmt.Sprintf("caddy-%d", i)), stores, handlers, answer)
		if err != nil {
			return nil, errors.Join(err, stopSites(sites))
		}
		sites = append(sites, s)
	}
	return sites, nil
}

// stopSites ends Caddys, and tells of data races.
func stopSites(sites []*site) error {
	var errs []error
	for _, s := range sites {
		s.process.Stop()
		if text := s.logs.String(); strings.Contains(text, "DATA RACE") {
			errs = append(errs, fmt.Errorf("a data race in Caddy:\n%s", text))
		}
	}
	return errors.Join(errs...)
}
