package libraries

import (
	"fmt"
	"strconv"
	"strings"
)

// Markdown returns the tables of all that was measured.
func (r *Result) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Each limiter in Redis had %v in each of %d rounds, each in memory %v, and %d clients in turn. "+
		"In every round all take turns. Calls are commands that were sent to Redis for a decision; one of the Redis store is for several, where they leave together.\n",
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
	writeHead(b, c.scene.String(), "pool", "decisions/s", "÷ fastest peer", "client µs", "server µs", "calls", "allocations", "bytes", "p50 ms", "p99 ms")
	for i, l := range c.limiters {
		cell := func(format string, of func(*sample) float64) string { return c.spread(i, of).Text(format) }
		writeRow(b, l.kind.name, strconv.Itoa(l.pool), cell("%.0f", rate), c.ratios(i).Text("%.2f"),
			cell("%.1f", clientMicros), cell("%.1f", serverMicros), cell("%.2f", calls),
			cell("%.1f", allocations), cell("%.0f", allocated), cell("%.2f", p50), cell("%.2f", p99))
	}
}

func writeRow(b *strings.Builder, cells ...string) {
	fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
}

func writeHead(b *strings.Builder, columns ...string) {
	writeRow(b, columns...)
	fmt.Fprintf(b, "|%s\n", strings.Repeat("---|", len(columns)))
}

// detailedWith is the number of goroutines of which there is more than the
// rate.
const detailedWith = 64

// writeMemory writes the rates of all scenes, and more of one scene.
func (r *Result) writeMemory(b *strings.Builder) {
	var scenes []*comparison
	columns := []string{"million decisions/s"}
	for _, refused := range []bool{false, true} {
		for _, c := range r.apart {
			if c.scene.refused == refused {
				scenes, columns = append(scenes, c), append(columns, c.scene.String())
			}
		}
	}
	writeHead(b, columns...)
	detailed := find(r.apart, scene{goroutines: nearest(r.opts.Goroutines, detailedWith)})
	for i, l := range detailed.limiters {
		row := []string{l.kind.name}
		for _, c := range scenes {
			row = append(row, c.spread(i, millions).Text("%.2f"))
		}
		writeRow(b, row...)
	}
	b.WriteString("\n")
	writeHead(b, detailed.scene.String(), "÷ fastest peer", "CPU µs", "allocations", "bytes")
	for i, l := range detailed.limiters {
		writeRow(b, l.kind.name, detailed.ratios(i).Text("%.2f"), detailed.spread(i, clientMicros).Text("%.2f"),
			detailed.spread(i, allocations).Text("%.1f"), detailed.spread(i, allocated).Text("%.0f"))
	}
}

// writeCeiling writes what redis-benchmark reached beside what a Take did.
func (r *Result) writeCeiling(b *strings.Builder) {
	c := r.admitted(ceilingWith)
	take := c.place(takeFixedWindow)
	writeHead(b, c.scene.crowd(), "calls/s", "÷ ceiling", "server µs")
	writeRow(b, fmt.Sprintf("redis-benchmark, %d connections, %d calls in a pipeline", ceilingConnections, ceilingPipeline),
		c.ceilings(ceilingRate).Text("%.0f"), "", c.ceilings(ceilingMicros).Text("%.1f"))
	writeRow(b, takeFixedWindow.name, c.spread(take, rate).Text("%.0f"), c.parts(take).Text("%.2f"), c.spread(take, serverMicros).Text("%.1f"))
}
