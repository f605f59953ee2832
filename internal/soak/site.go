package main

import (
	"fmt"
	"path/filepath"
	"strconv"

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

type sites []*caddyproc.Site

func startSites(dir string, w *world) (sites, error) {
	binary, err := caddyproc.Build(dir)
	if err != nil {
		return nil, err
	}
	var all sites
	for i := range 2 {
		s, err := caddyproc.StartSite(binary, filepath.Join(dir, strconv.Itoa(i)), func(addr, admin string) string {
			return fmt.Sprintf(caddyfile, admin, w.config(), addr)
		})
		if err != nil {
			all.stop()
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// stop ends all of them, which delivers what waits.
func (all sites) stop() {
	for _, s := range all {
		s.Stop()
	}
}

// need is what the Caddys take.
type need struct{ memory, goroutines float64 }

func (all sites) need() (n need, err error) {
	for _, s := range all {
		m, err := s.Metrics()
		if err != nil {
			return n, err
		}
		n.memory += m.Sum("process_resident_memory_bytes")
		n.goroutines += m.Sum("go_goroutines")
	}
	return n, nil
}
