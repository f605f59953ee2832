// Package goal tells which of the speeds that were aimed at were reached.
package goal

import (
	"fmt"
	"math"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/bench/spread"
)

// Goal is a bound for a figure, and what was measured.
type Goal struct {
	// What is measured.
	What string
	// AtLeast is set if Bound is the least that the figure may be; otherwise it
	// is the most.
	AtLeast bool
	Bound   float64
	// Unit stands after the figures, with its space; empty for a ratio.
	Unit string
	// Spread is that of what was measured.
	spread.Spread
}

// IsReached tells whether the median is within the bound.
func (g *Goal) IsReached() bool {
	if g.AtLeast {
		return g.Median >= g.Bound
	}
	return g.Median <= g.Bound
}

// Table is a Markdown table of goals.
func Table(goals []Goal) string {
	var b strings.Builder
	b.WriteString("| what | goal | measured: median (min to max) | reached |\n|---|---|---|---|\n")
	for i := range goals {
		g := &goals[i]
		sign, reached := "≤", "yes"
		if g.AtLeast {
			sign = "≥"
		}
		if !g.IsReached() {
			reached = "**no**"
		}
		fmt.Fprintf(&b, "| %s | %s %s%s | %s%s | %s |\n", g.What, sign, number(g.Bound), g.Unit,
			g.As(number), g.Unit, reached)
	}
	return b.String()
}

// number writes what is small with more digits.
func number(f float64) string {
	switch {
	case f != 0 && math.Abs(f) < 0.005:
		return fmt.Sprintf("%.5f", f)
	case math.Abs(f) < 10:
		return fmt.Sprintf("%.2f", f)
	case math.Abs(f) < 1000:
		return fmt.Sprintf("%.1f", f)
	default:
		return fmt.Sprintf("%.0f", f)
	}
}
