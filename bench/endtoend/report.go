package main

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/document"
	"github.com/shardlimit/caddy-shardlimit/internal/machine"
)

// report prints the medians, and what they are to be compared with.
func report(samples map[string][]sample) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s, %s, %s. %d requests at a time, %d clients, %d rounds of %v a case.\n\n",
		machine.Processor(), runtime.NumCPU(), runtime.Version(), machine.Redis(), time.Now().UTC().Format(time.DateOnly),
		*connections, *clients, *rounds, *duration)
	b.WriteString("| case | Caddy µs | primary µs | replica µs | Caddy ÷ floor: median (min to max) | goal | requests/s |\n")
	b.WriteString("|---|---|---|---|---|---|---|\n")
	for _, c := range cases {
		s := samples[c.name]
		ratio, goal := "", ""
		if c.floor != "" {
			var ratios []float64
			for i := range s {
				ratios = append(ratios, s[i].caddy/samples[c.floor][i].caddy)
			}
			slices.Sort(ratios)
			ratio = fmt.Sprintf("%.2f (%.2f to %.2f)", ratios[len(ratios)/2], ratios[0], ratios[len(ratios)-1])
		}
		if c.limit > 0 {
			goal = fmt.Sprintf("≤ %.2f", c.limit)
		}
		fmt.Fprintf(&b, "| %s | %.1f | %.1f | %.1f | %s | %s | %.0f |\n", c.name,
			median(s, func(s sample) float64 { return s.caddy }),
			median(s, func(s sample) float64 { return s.primary }),
			median(s, func(s sample) float64 { return s.replica }), ratio, goal,
			median(s, func(s sample) float64 { return s.rate }))
	}
	fmt.Print(b.String())
	if *out == "" {
		return nil
	}
	return document.Rewrite(*out, "bench", b.String())
}
