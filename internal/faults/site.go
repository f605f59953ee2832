package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

const (
	// zone is what clients are limited by.
	zone = "api"
	// survey is a zone that shows which clients belong to a shard.
	survey = "survey"
	// faulty is what Caddy calls the shard that the fault happens to, sound the
	// other one.
	faulty, sound = "faulty", "sound"
)

// caddyfile has room for the address of the admin API, the shards, check_timeout,
// dial_timeout, the address of the site, charge and on_error.
const caddyfile = `{
	admin %s
	persist_config off
	log {
		exclude http.log.error
	}
	rate_limit {
		store redis {
			shard ` + faulty + ` {
				%s
			}
			shard ` + sound + ` {
				%s
			}
			check_timeout %s
			dial_timeout %s
		}
	}
}

http://%s {
	handle /survey {
		rate_limit {header.X-Client} 1000000 1h ` + survey + `
		respond "ok"
	}
	handle {
		rate_limit {
			zone ` + zone + ` {
				key {header.X-Client}
				events {header.X-Events} 1000000
				window 1h
				charge %s
				on_error %s
			}
		}
		respond "ok"
	}
}
`

// site is a running Caddy.
type site struct {
	url, admin string
	process    *caddyproc.Process
	logs       *logs
	client     *http.Client
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

// startSite runs Caddy for a cell, on these two shards.
func startSite(c cell, set settings, dir string, broken, other *shard) (*site, error) {
	s := &site{logs: new(logs), client: &http.Client{Timeout: requestPatience}}
	// A port that was free may be taken by the time at which Caddy wants it.
	var err error
	for range startAttempts {
		var addrs []string
		if addrs, err = caddyproc.FreeAddrs(2); err != nil {
			return nil, err
		}
		s.url, s.admin = "http://"+addrs[0], "http://"+addrs[1]
		config := fmt.Sprintf(caddyfile, addrs[1], strings.Join(broken.config, "\n"), strings.Join(other.config, "\n"),
			set.checkTimeout, set.dialTimeout, addrs[0], c.charge, c.onError)
		if s.process, err = caddyproc.Start(set.caddy, filepath.Join(dir, "caddy"), config, s.logs, addrs...); err == nil {
			return s, nil
		}
	}
	return nil, fmt.Errorf("%w; its log:\n%s", err, s.logs)
}

// stop ends Caddy, once.
func (s *site) stop() {
	if s.process != nil {
		s.process.Stop()
		s.process = nil
	}
}

const (
	// surveyed is how many clients are looked at, so that each shard surely has
	// enough of them.
	surveyed = 24
	// surveyPatience bounds that.
	surveyPatience = 20 * time.Second
)

// clients returns names of clients that belong to each of the shards.
func (s *site) clients(ctx context.Context, broken, other *shard) (mine, others []string, err error) {
	for n := range surveyed {
		if err := s.visit(fmt.Sprintf("client-%d", n)); err != nil {
			return nil, nil, err
		}
	}
	err = poll(ctx, surveyPatience, func() error {
		if mine, err = broken.clients(ctx, survey); err != nil {
			return err
		}
		if others, err = other.clients(ctx, survey); err != nil {
			return err
		}
		if n := len(mine) + len(others); n < surveyed {
			return fmt.Errorf("%d of %d clients are charged", n, surveyed)
		}
		return nil
	})
	return mine, others, err
}

// visit makes a request that tells whom its client belongs to.
func (s *site) visit(client string) error {
	req, err := http.NewRequest(http.MethodGet, s.url+"/survey", nil)
	if err != nil {
		return err
	}
	req.Header.Set("X-Client", client)
	resp, err := s.client.Do(req)
	if err != nil {
		return fmt.Errorf("look whom %s belongs to: %w", client, err)
	}
	resp.Body.Close()
	return nil
}

// metrics are Caddy's counters.
type metrics struct {
	// storeErrors are checks and takes without an answer.
	storeErrors int64
	// undelivered are charges, by shard and outcome.
	undelivered map[string]map[string]int64
}

// metrics reads them.
func (s *site) metrics() (m metrics, err error) {
	resp, err := s.client.Get(s.admin + "/metrics")
	if err != nil {
		return m, fmt.Errorf("read metrics: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return m, fmt.Errorf("read metrics: %w", err)
	}
	m.undelivered = map[string]map[string]int64{faulty: {}, sound: {}}
	var errs []error
	for line := range strings.Lines(string(text)) {
		errs = append(errs, m.read(strings.TrimSpace(line)))
	}
	return m, errors.Join(errs...)
}

// read takes over a line such as name{label="value"} 1.
func (m *metrics) read(line string) error {
	name, value, _ := strings.Cut(line, " ")
	name, labels, _ := strings.Cut(name, "{")
	if name != "caddy_rate_limit_store_errors_total" && name != "caddy_rate_limit_undelivered_total" {
		return nil
	}
	n, err := strconv.ParseFloat(value, 64)
	if err != nil {
		return fmt.Errorf("read metric %s: %w", line, err)
	}
	if name == "caddy_rate_limit_store_errors_total" {
		m.storeErrors += int64(n)
	} else {
		m.undelivered[label(labels, "shard")][label(labels, "outcome")] += int64(n)
	}
	return nil
}

// label is the value of one of some labels.
func label(labels, name string) string {
	_, rest, _ := strings.Cut(labels, name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

// failed is how many charges of a shard did.
func (m *metrics) failed(shard string) (n int64) {
	for _, of := range m.undelivered[shard] {
		n += of
	}
	return n
}
