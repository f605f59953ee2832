package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/machine"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// goals are how many times as fast as the fastest peer a Take is to be, by
// goroutines.
var goals = map[int]float64{64: 1.3, 256: 1.8}

// report returns what was measured, as Markdown.
func report(comparisons []*comparison, rounds int, length time.Duration, server *redistest.Server) (string, error) {
	info, err := server.Info("server")
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s, Redis %s, %s, %s. %d clients, %d rounds of %v.\n",
		machine.Processor(), runtime.NumCPU(), runtime.Version(), info["redis_version"],
		strings.Join(versions(), ", "), time.Now().UTC().Format(time.DateOnly),
		len(clientKeys), rounds, length)
	for _, c := range comparisons {
		b.WriteString("\n")
		c.write(&b)
	}
	return b.String(), nil
}

// write writes the table of one scene.
func (c *comparison) write(b *strings.Builder) {
	fmt.Fprintf(b, "| %v | pool | decisions/s | ÷ fastest peer: median (min to max) | goal | client µs | server µs | p50 ms | p99 ms |\n", c.scene)
	b.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for i, l := range c.limiters {
		ratios, goal := c.ratios(i), ""
		if g, ok := goals[c.scene.goroutines]; ok && l.kind.ours {
			goal = fmt.Sprintf("≥ %.2f", g)
		}
		fmt.Fprintf(b, "| %s | %d | %.0f | %.2f (%.2f to %.2f) | %s | %.1f | %.1f | %.2f | %.2f |\n",
			l.kind.name, l.pool,
			c.median(i, func(s sample) float64 { return s.rate }),
			median(ratios), ratios[0], ratios[len(ratios)-1], goal,
			c.median(i, func(s sample) float64 { return micros(s.client) }),
			c.median(i, func(s sample) float64 { return micros(s.server) }),
			c.median(i, func(s sample) float64 { return micros(s.p50) / 1e3 }),
			c.median(i, func(s sample) float64 { return micros(s.p99) / 1e3 }))
	}
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// versions are those of the peers, and of the client that all of them use.
func versions() (texts []string) {
	wanted := map[string]string{"github.com/redis/go-redis/v9": "go-redis"}
	for _, p := range peers {
		wanted[p.module] = p.name
	}
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		if name, ok := wanted[m.Path]; ok {
			texts = append(texts, name+" "+m.Version)
		}
	}
	return texts
}

// Where the report is in a file that says other things as well.
const (
	startMark = "<!-- what follows is written by make bench-peers -->\n"
	endMark   = "<!-- end of what make bench-peers writes -->\n"
)

// rewrite replaces what is between the marks in a file.
func rewrite(file, text string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the report: %w", err)
	}
	head, rest, started := strings.Cut(string(old), startMark)
	_, tail, ended := strings.Cut(rest, endMark)
	if !started || !ended {
		return fmt.Errorf("%s lacks the line %q, or %q after it", file, startMark, endMark)
	}
	if err := os.WriteFile(file, []byte(head+startMark+"\n"+text+"\n"+endMark+tail), 0o644); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
