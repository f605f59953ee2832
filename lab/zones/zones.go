// Package zones measures Caddys with many zones, in memory and on a Redis server: the CPU time of start, reload,
// idling, scrape, a request in each zone, removal and exit, and the memory, beside that of the same sites without zones.
package zones

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/shards"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
)

var (
	flags = flag.NewFlagSet("zones", flag.ExitOnError)
	sites = flags.Int("sites", 200, "how many sites there are")
	zones = flags.Int("zones", 50, "how many zones each of them has")
	idle  = flags.Duration("idle", 10*time.Second, "for how long it idles")
	caddy = flags.String("caddy", "", "the Caddy to measure, instead of one that is built")
)

// Run measures, and prints a table.
func Run(ctx context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	w, err := site.Open(*caddy)
	if err != nil {
		return err
	}
	defer w.Close()
	redis, err := shards.Static(0)
	if err != nil {
		return err
	}
	defer func() { _ = redis.Stop() }()
	stores := map[string]any{"default": map[string]any{
		"module": "redis", "shards": []any{map[string]any{"name": "a", "primary": redis.Primary().Addr()}},
	}}
	table := report.NewTable("zones", "store", "start, CPU s", "reload, CPU s", "scrape, CPU s", "a request, CPU µs", "removal, CPU s", "exit, CPU s",
		"idle, % of a core", "kB a zone", "kB once it is removed")
	var without float64
	for _, c := range []struct {
		zones, store string
		perSite      int
		stores       any
	}{
		{"0", "none", 0, nil},
		{strconv.Itoa(*sites * *zones), "memory", *zones, map[string]any{}},
		{strconv.Itoa(*sites * *zones), "Redis", *zones, stores},
	} {
		f, err := measure(ctx, w, c.perSite, c.stores)
		if err != nil {
			return fmt.Errorf("%s: %w", c.store, err)
		}
		perZone := func(float64) string { return "-" }
		if c.perSite == 0 {
			without = f.heap
		} else {
			perZone = func(heap float64) string { return fmt.Sprintf("%.1f", (heap-without)/float64(*sites**zones)/1e3) }
		}
		table.Row(c.zones, c.store, seconds(f.start), seconds(f.reload), seconds(f.scrape),
			fmt.Sprintf("%.0f", float64(f.round.Microseconds())/float64(*sites**zones)), seconds(f.removal), seconds(f.exit),
			fmt.Sprintf("%.1f", 100*f.idle), perZone(f.heap), perZone(f.left))
	}
	fmt.Print(table.String())
	return ctx.Err()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()) }

// figures are CPU times, the share of a core that idling takes, and the bytes of the heap, with zones
// before the round of requests and once they are removed after it.
type figures struct {
	start, reload, scrape, round, removal, exit time.Duration
	idle, heap, left                            float64
}

// running is a Caddy that is measured.
type running struct {
	*caddyproc.Process
	admin string
}

func measure(ctx context.Context, w *site.Workshop, perSite int, stores any) (f figures, err error) {
	var addrs []string
	for range 2 {
		port, release, err := process.ReservePort()
		if err != nil {
			return f, err
		}
		defer func() { _ = release() }()
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", port))
	}
	admin, addr := addrs[0], addrs[1]
	file := filepath.Join(w.Dir, "many.json")
	if err := os.WriteFile(file, config(admin, addr, perSite, stores, "ok"), 0o600); err != nil {
		return f, fmt.Errorf("write the config: %w", err)
	}
	logs := new(caddyproc.Logs)
	cmd := exec.CommandContext(ctx, w.Caddy, "run", "--config", file)
	cmd.Env = append(os.Environ(), "XDG_DATA_HOME="+w.Dir, "XDG_CONFIG_HOME="+w.Dir)
	p, err := caddyproc.Run(cmd, w.Dir, logs, addr)
	if err != nil {
		return f, errors.Join(err, logs.Fault())
	}
	defer p.Stop()
	c := running{p, admin}
	if f.start, err = p.CPU(); err != nil {
		return f, err
	}
	load := func(perSite int, answer string) (time.Duration, error) {
		return c.costOf(func() error {
			_, err := c.call(ctx, http.MethodPost, "/load", config(admin, addr, perSite, stores, answer))
			return err
		})
	}
	if f.reload, err = load(perSite, "changed"); err != nil {
		return f, err
	}
	time.Sleep(5 * time.Second) // until the collector of garbage and first looks are over
	idled, err := c.costOf(func() error { time.Sleep(*idle); return nil })
	if err != nil {
		return f, err
	}
	f.idle = idled.Seconds() / idle.Seconds()
	if f.scrape, err = c.costOf(func() error { _, err := c.call(ctx, http.MethodGet, "/metrics", nil); return err }); err != nil {
		return f, err
	}
	if f.heap, err = c.heap(ctx); err != nil {
		return f, err
	}
	if f.round, err = c.costOf(func() error { return round(ctx, addr) }); err != nil {
		return f, err
	}
	if f.removal, err = load(0, "none"); err != nil {
		return f, err
	}
	time.Sleep(time.Second)
	if f.left, err = c.heap(ctx); err != nil {
		return f, err
	}
	if _, err = load(perSite, "again"); err != nil {
		return f, err
	}
	f.exit, err = c.costOfExit()
	return f, err
}

func (c running) costOf(do func() error) (time.Duration, error) {
	before, err := c.CPU()
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	after, err := c.CPU()
	return after - before, err
}

// costOfExit returns the last CPU time that can be read while the process ends.
func (c running) costOfExit() (time.Duration, error) {
	before, err := c.CPU()
	if err != nil {
		return 0, err
	}
	ended := make(chan struct{})
	go func() {
		c.Stop()
		close(ended)
	}()
	for last := before; ; time.Sleep(10 * time.Millisecond) {
		select {
		case <-ended:
			return last - before, nil
		default:
		}
		if now, err := c.CPU(); err == nil && now > last {
			last = now
		}
	}
}

var heapAlloc = regexp.MustCompile(`# HeapAlloc = (\d+)`)

func (c running) heap(ctx context.Context) (float64, error) {
	text, err := c.call(ctx, http.MethodGet, "/debug/pprof/heap?gc=1&debug=1", nil)
	if err != nil {
		return 0, err
	}
	return report.Figure(text, heapAlloc)
}

func (c running) call(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.admin+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("call %s: %w", path, err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("call %s: %w", path, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %s", resp.StatusCode, strings.TrimSpace(string(text)))
	}
	return text, err
}

// round makes a request in each zone.
func round(ctx context.Context, addr string) error {
	for s := range *sites {
		for z := range *zones {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s/%d/", addr, z), nil)
			if err != nil {
				return fmt.Errorf("request a page: %w", err)
			}
			req.Host = fmt.Sprintf("site%d.example.com", s)
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return fmt.Errorf("request a page: %w", err)
			}
			_, err = io.Copy(io.Discard, resp.Body)
			if resp.Body.Close(); err != nil || resp.StatusCode != http.StatusOK {
				return fmt.Errorf("request a page: status %d: %w", resp.StatusCode, err)
			}
		}
	}
	return nil
}

// config is a config in JSON, so that it costs nothing to adapt.
func config(admin, addr string, perSite int, stores any, answer string) []byte {
	type object = map[string]any
	var routes []any
	for s := range *sites {
		handle := []any{object{"handler": "static_response", "body": answer}}
		var own []any
		for z := range perSite {
			own = append(own, object{
				"name": fmt.Sprintf("site%d.zone%d", s, z), "key": []string{"{http.vars.client_ip}"}, "events": 100, "window": "1m",
				"match": []any{object{"path": []string{fmt.Sprintf("/%d/*", z)}}},
			})
		}
		if len(own) > 0 {
			handle = append([]any{object{"handler": "rate_limit", "zones": own}}, handle...)
		}
		routes = append(routes, object{
			"match": []any{object{"host": []string{fmt.Sprintf("site%d.example.com", s)}}}, "handle": handle, "terminal": true,
		})
	}
	apps := object{"http": object{"servers": object{"many": object{
		"listen": []string{addr}, "routes": routes, "automatic_https": object{"disable": true},
	}}}}
	if stores != nil {
		apps["rate_limit"] = object{"stores": stores}
	}
	text, err := json.Marshal(object{"admin": object{"listen": admin}, "apps": apps})
	if err != nil {
		panic(err)
	}
	return text
}
