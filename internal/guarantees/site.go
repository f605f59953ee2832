package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

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
type site struct{ *caddyproc.Site }

// startSite runs a Caddy with these parts of a config.
func startSite(binary, dir, stores, handlers, answer string) (*site, error) {
	running, err := caddyproc.StartSite(binary, dir, func(addr, admin string) string {
		return fmt.Sprintf(caddyfile, admin, stores, addr, handlers, answer)
	})
	if err != nil {
		return nil, err
	}
	return &site{running}, nil
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
		s.Stop()
		if text := s.Logs.String(); strings.Contains(text, "DATA RACE") {
			errs = append(errs, fmt.Errorf("a data race in Caddy:\n%s", text))
		}
	}
	return errors.Join(errs...)
}
