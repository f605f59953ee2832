package caddyproc

import "fmt"

// Site is a running Caddy with a site and an admin API, on ports of their own.
type Site struct {
	// Addr and Admin are the addresses of both, host:port.
	Addr, Admin string
	// Logs is what it has said.
	Logs    *Logs
	process *Process
}

// startAttempts is how often Caddy is started where a port was lost.
const startAttempts = 3

// StartSite runs Caddy in a folder of its own, with the Caddyfile that config
// returns for the addresses.
func StartSite(binary, dir string, config func(site, admin string) string) (*Site, error) {
	s := &Site{Logs: new(Logs)}
	// A port that was free may be taken by the time at which Caddy wants it.
	var err error
	for range startAttempts {
		var addrs []string
		if addrs, err = FreeAddrs(2); err != nil {
			return nil, err
		}
		s.Addr, s.Admin = addrs[0], addrs[1]
		if s.process, err = Start(binary, dir, config(s.Addr, s.Admin), s.Logs, addrs...); err == nil {
			return s, nil
		}
	}
	return nil, fmt.Errorf("%w; its log:\n%s", err, s.Logs)
}

// Stop ends Caddy gracefully, once, and waits for it.
func (s *Site) Stop() {
	if s.process != nil {
		s.process.Stop()
		s.process = nil
	}
}
