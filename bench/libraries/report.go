package libraries

import (
	"fmt"
	"slices"
	"strings"
)

// Markdown returns the tables of all that was measured.
func (r *Result) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Each limiter in Redis had %v in each of %d rounds, each in memory %v, and %d clients in turn. "+
		"Figures are medians. Calls are commands that were sent to Redis for a decision.\n",
		r.opts.Length, r.opts.Rounds, r.opts.Length/memoryShare, len(clientKeys))
	b.WriteString("\n### In Redis\n\n")
	fmt.Fprintf(&b, "![decisions per second by goroutines](img/%s)\n\n![CPU time per decision](img/%s)\n",
		decisionsFile, cpuFile)
	for _, c := range r.shared {
		b.WriteString("\n")
		c.write(&b)
	}
	b.WriteString("\n### In memory\n\n")
	r.writeMemory(&b)
	b.WriteString("\n### The ceiling\n\n")
	r.writeCeiling(&b)
	return b.String()
}

// write writes the table of one scene.
func (c *comparison) write(b *strings.Builder) {
	writeHead(b, c.scene.String(), "pool", "decisions/s (min to max)", "÷ fastest peer: median (min to max)",
		"client µs", "server µs", "calls", "allocations", "bytes", "p50 ms", "p99 ms")
	for i, l := range c.limiters {
		fmt.Fprintf(b, "| %s | %d | %s | %s | %.1f | %.1f | %.2f | %.1f | %.0f | %.2f | %.2f |\n",
			l.kind.name, l.pool, c.spread(i, rate).Text("%.0f"), c.ratios(i).Text("%.2f"),
			c.spread(i, clientMicros).Median, c.spread(i, serverMicros).Median, c.spread(i, calls).Median,
			c.spread(i, allocations).Median, c.spread(i, allocated).Median,
			c.spread(i, p50).Median, c.spread(i, p99).Median)
	}
}

func writeHead(b *strings.Builder, columns ...string) {
	fmt.Fprintf(b, "| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
}

// detailedWith is the number of goroutines of which there is more than the
// rate.
const detailedWith = 64

// writeMemory writes one table: limiters by scenes, and more of one scene.
func (r *Result) writeMemory(b *strings.Builder) {
	detailed := find(r.apart, scene{goroutines: nearest(r.opts.Goroutines, detailedWith)})
	columns := []string{"million decisions/s"}
	for _, refused := range []bool{false, true} {
		for _, c := range r.apart {
			if c.scene.refused == refused {
				columns = append(columns, c.scene.String())
			}
		}
	}
	with := fmt.Sprintf("%d: ", detailed.scene.goroutines)
	writeHead(b, append(columns, with+"÷ fastest peer: median (min to max)", "CPU µs", "allocations", "bytes")...)
	for i, l := range detailed.limiters {
		fmt.Fprintf(b, "| %s |", l.kind.name)
		for _, column := range columns[1:] {
			at := slices.IndexFunc(r.apart, func(c *comparison) bool { return c.scene.String() == column })
			fmt.Fprintf(b, " %.2f |", r.apart[at].spread(i, rate).Median/1e6)
		}
		fmt.Fprintf(b, " %s | %.2f | %.1f | %.0f |\n", detailed.ratios(i).Text("%.2f"), detailed.spread(i, clientMicros).Median,
			detailed.spread(i, allocations).Median, detailed.spread(i, allocated).Median)
	}
}

// writeCeiling writes what redis-benchmark reached beside what a Take did.
func (r *Result) writeCeiling(b *strings.Builder) {
	c := r.admitted(ceilingWith)
	take := c.place(takeFixedWindow)
	writeHead(b, c.scene.crowd(), "calls/s (min to max)", "÷ ceiling: median (min to max)", "server µs")
	fmt.Fprintf(b, "| redis-benchmark, %d connections, %d calls in a pipeline | %s |  | %.1f |\n",
		ceilingConnections, ceilingPipeline, c.ceilings(ceilingRate).Text("%.0f"), c.ceilings(ceilingMicros).Median)
	fmt.Fprintf(b, "| %s | %s | %s | %.1f |\n",
		takeFixedWindow.name, c.spread(take, rate).Text("%.0f"), c.parts(take).Text("%.2f"), c.spread(take, serverMicros).Median)
}
