package endtoend

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// wrkScript makes wrk send the clients in turn.
const wrkScript = `
local n = 0
request = function()
	n = n + 1
	return wrk.format("GET", "/", {["X-Key"] = "client-" .. n %% %d})
end
`

// wrkCases are those that wrk sees, too.
var wrkCases = []string{floor, ChargeAfter}

// crossCheck has wrk ask some of the cases, and then the load generator.
func (l *lab) crossCheck(ctx context.Context, r *Result, isCounted bool) error {
	wrk, err := process.Find("wrk")
	if err != nil {
		return err
	}
	script := filepath.Join(l.dir, "clients.lua")
	if err := os.WriteFile(script, fmt.Appendf(nil, wrkScript, clients), 0o600); err != nil {
		return fmt.Errorf("write the script of wrk: %w", err)
	}
	// It takes whole seconds.
	length := max(l.opts.Length.Round(time.Second), time.Second)
	for _, name := range wrkCases {
		c := called(l.cases, name)
		out, err := exec.CommandContext(ctx, wrk, "-t1", "-c"+strconv.Itoa(l.opts.Connections),
			"-d"+strconv.Itoa(int(length.Seconds()))+"s", "--timeout", "30s", "-s", script, "http://"+c.addr).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, out)
		}
		rate, err := wrkRate(string(out))
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		own, err := c.send(ctx, loadgen.Options{Connections: l.opts.Connections, Duration: length})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if isCounted {
			r.wrk[name] = append(r.wrk[name], rate)
			r.own[name] = append(r.own[name], float64(own.Requests)/own.Elapsed.Seconds())
		}
	}
	return nil
}

var wrkRates = regexp.MustCompile(`(?m)^Requests/sec: *([0-9.]+)$`)

// wrkRate is the number of requests/s in what wrk says.
func wrkRate(out string) (float64, error) {
	found := wrkRates.FindStringSubmatch(out)
	if found == nil || strings.Contains(out, "Non-2xx") || strings.Contains(out, "Socket errors") {
		return 0, fmt.Errorf("wrk had trouble: %s", out)
	}
	rate, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		return 0, fmt.Errorf("read what wrk says: %w", err)
	}
	return rate, nil
}
