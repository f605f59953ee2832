package main

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
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
	*caddyproc.Site
	client *http.Client
}

// startSite runs Caddy for a cell, on these two shards.
func startSite(c cell, set settings, dir string, broken, other *shard) (*site, error) {
	running, err := caddyproc.StartSite(set.caddy, filepath.Join(dir, "caddy"), func(addr, admin string) string {
		return fmt.Sprintf(caddyfile, admin, strings.Join(broken.config, "\n"), strings.Join(other.config, "\n"),
			set.checkTimeout, set.dialTimeout, addr, c.charge, c.onError)
	})
	if err != nil {
		return nil, err
	}
	return &site{running, &http.Client{Timeout: requestPatience}}, nil
}

const (
	// surveyed is how many clients are looked at, so that each shard surely has
	// enough of them.
	surveyed = 24
	// surveyPatience bounds that.
	surveyPatience = time.Minute
)

// clients returns names of clients that belong to each of the shards.
func (s *site) clients(ctx context.Context, broken, other *shard) (mine, others []string, err error) {
	// A request that a busy machine did not serve in time is made again.
	visit := func() error {
		for n := range surveyed {
			name := fmt.Sprintf("client-%d", n)
			if slices.Contains(mine, name) || slices.Contains(others, name) {
				continue
			}
			if err := s.visit(name); err != nil {
				return err
			}
		}
		return nil
	}
	if err := visit(); err != nil {
		return nil, nil, err
	}
	visited := time.Now()
	err = poll(ctx, surveyPatience, func() error {
		if mine, err = broken.clients(ctx, survey); err != nil {
			return err
		}
		if others, err = other.clients(ctx, survey); err != nil {
			return err
		}
		if n := len(mine) + len(others); n < surveyed {
			if time.Since(visited) > time.Second {
				if err := visit(); err != nil {
					return err
				}
				visited = time.Now()
			}
			return fmt.Errorf("%d of %d clients are charged", n, surveyed)
		}
		return nil
	})
	return mine, others, err
}

// visit makes a request that tells whom its client belongs to.
func (s *site) visit(client string) error {
	req, err := http.NewRequest(http.MethodGet, "http://"+s.Addr+"/survey", nil)
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
	all, err := s.Metrics()
	if err != nil {
		return m, err
	}
	return metricsIn(all), nil
}

func metricsIn(all caddyproc.Metrics) metrics {
	m := metrics{
		storeErrors: int64(all.Sum("caddy_rate_limit_store_errors_total")),
		undelivered: map[string]map[string]int64{faulty: {}, sound: {}},
	}
	for key, n := range all {
		if caddyproc.Has(key, "caddy_rate_limit_undelivered_total") {
			m.undelivered[caddyproc.Label(key, "shard")][caddyproc.Label(key, "outcome")] += int64(n)
		}
	}
	return m
}

// failed is how many charges of a shard did.
func (m *metrics) failed(shard string) (n int64) {
	for _, of := range m.undelivered[shard] {
		n += of
	}
	return n
}
