// Package adversary models what the limiter should answer, written from the documents. It imports
// nothing of the product, so that no mistake is in both. A test sends requests to a
// whole Caddy and compares: [Zone] is a random definition, [Model] knows what clients have spent,
// and a [Verdict] is what a zone says about a request.
//
// Real time passes, so each call has a [Span]: an instant before and one after it. What follows from any
// instant between them may be seen, and nothing else.
package adversary

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// The algorithms.
const (
	FixedWindow   = "fixed_window"
	SlidingWindow = "sliding_window"
	SlidingLog    = "sliding_log"
	GCRA          = "gcra"
	Concurrency   = "concurrency"
)

// Zone is the definition of a zone.
type Zone struct {
	Name, Algorithm string
	// Align is empty for windows that begin with the first request, "aligned", or a calendar.
	Align         string
	Window        time.Duration
	Events, Burst int64
	// Dynamic zones take their limit from a header, with Events as the fallback.
	Dynamic bool
	Cost    Cost
	// Before is set for charge before.
	Before                   bool
	CountStatus, ResetStatus string
	Penalty                  time.Duration
	// Enforced is false for a zone that only observes.
	Enforced bool
	// Inner zones belong to the second handler.
	Inner bool
}

// Cost is a constant, or a weighted sum of a request header and a response header.
type Cost struct {
	Text              string
	Constant          int64
	Request, Response float64
	Fallback          int64
}

var costs = []Cost{
	{Text: "1", Constant: 1}, {Text: "1", Constant: 1}, {Text: "1", Constant: 1}, {Text: "2", Constant: 2}, {Text: "0"},
	{Text: "{header.X-Cost} 2", Request: 1, Fallback: 2},
	{Text: "{http.response.header.X-Cost} 1", Response: 1, Fallback: 1},
	{Text: "0.5*{header.X-Cost} + {http.response.header.X-Cost} 3", Request: .5, Response: 1, Fallback: 3},
}

// Kind bounds what zones are drawn.
type Kind struct {
	// Moves makes windows that end during a history.
	Moves bool
	// Caddys is how many count together.
	Caddys int
}

// DrawZone returns a random definition.
func DrawZone(rng *rand.Rand, name string, kind Kind) *Zone {
	z := &Zone{
		Name: name, Window: 1000 * time.Hour, Events: pick[int64](rng, 1, 2, 3, 5, 5, 8), Enforced: rng.IntN(5) > 0,
		Algorithm: pick(rng, FixedWindow, FixedWindow, FixedWindow, SlidingWindow, SlidingLog, GCRA, GCRA, Concurrency),
		Cost:      pick(rng, costs...), Before: rng.IntN(2) == 0 || kind.Caddys > 1,
		CountStatus: pick(rng, "", "", "not 304 4xx", "401 403", "all", "2xx"), ResetStatus: pick(rng, "", "", "201"),
	}
	if kind.Moves {
		z.Window, z.ResetStatus = time.Duration(2+rng.IntN(2))*time.Second, ""
	}
	switch z.Algorithm {
	case Concurrency:
		z.Window, z.Before, z.CountStatus, z.ResetStatus = time.Hour, true, "", ""
		if z.Cost.Response != 0 {
			z.Cost = costs[0]
		}
	case GCRA:
		z.Burst = pick[int64](rng, 0, 1, 2, 4, 7)
	default:
		z.Dynamic = rng.IntN(3) == 0
	}
	if z.Algorithm == FixedWindow {
		z.Align = pick(rng, "", "", "aligned", "day", "month in Europe/Berlin")
		if kind.Moves && z.Align != "" {
			z.Align = "aligned"
		}
	}
	if z.CountStatus == "2xx" {
		z.ResetStatus = ""
	}
	if z.Cost.Constant > z.Events || z.Burst > 0 && z.Cost.Constant > z.Burst {
		z.Cost = costs[0] // a config whose requests never fit is refused
	}
	if z.Algorithm != Concurrency && z.Algorithm != SlidingLog && rng.IntN(5) == 0 {
		z.Penalty = 100 * time.Hour
		if kind.Moves {
			z.Penalty = time.Second
		}
	}
	return z
}

func pick[T any](rng *rand.Rand, values ...T) T { return values[rng.IntN(len(values))] }

// String returns the zone as a Caddyfile has it.
func (z *Zone) String() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, "\t"+format+"\n", args...) }
	fmt.Fprintf(&b, "zone %s {\n", z.Name)
	line("key {header.X-Key}")
	line("algorithm %s", z.Algorithm)
	switch z.Align {
	case "", "aligned":
		line("window %s %s", z.Window, z.Align)
	default:
		line("window %s", z.Align)
	}
	if z.Dynamic {
		line("events {header.X-Events-%s} %d", z.Name, z.Events)
	} else {
		line("events %d", z.Events)
	}
	if z.Burst != 0 {
		line("burst %d", z.Burst)
	}
	line("cost %s", z.Cost.Text)
	if z.Before {
		line("charge before")
	} else {
		line("charge after")
	}
	if z.CountStatus != "" {
		line("count_status %s", z.CountStatus)
	}
	if z.ResetStatus != "" {
		line("reset_status %s", z.ResetStatus)
	}
	if z.Penalty != 0 {
		line("penalty %s", z.Penalty)
	}
	if !z.Enforced {
		line("enforce 0")
	}
	b.WriteString("}\n")
	return b.String()
}

// amount returns the cost by the values of the two headers, of which an empty one is none.
func (c *Cost) amount(request, response string) int64 {
	if c.Request == 0 && c.Response == 0 {
		return c.Constant
	}
	known, missing := 0.0, false
	for _, term := range []struct {
		weight float64
		value  string
	}{{c.Request, request}, {c.Response, response}} {
		n, err := strconv.ParseFloat(term.value, 64)
		switch {
		case term.weight == 0:
		case err != nil:
			missing = true
		default:
			known += term.weight * n
		}
	}
	if total := int64(math.Ceil(known)); !missing || total > c.Fallback {
		return total
	}
	return c.Fallback
}

// counts reports whether a status costs something.
func (z *Zone) counts(status int) bool {
	switch words := strings.Fields(z.CountStatus); {
	case len(words) == 0:
		return status != 304
	case words[0] == "all":
		return true
	case words[0] == "not":
		return !isAmong(status, words[1:])
	default:
		return isAmong(status, words)
	}
}

func (z *Zone) forgives(status int) bool { return isAmong(status, strings.Fields(z.ResetStatus)) }

// isAmong reports whether words name the status or its class.
func isAmong(status int, words []string) bool {
	code := strconv.Itoa(status)
	for _, w := range words {
		if w == code || w == code[:1]+"xx" {
			return true
		}
	}
	return false
}

// mayReturn reports whether a take of the zone can come back.
func (z *Zone) mayReturn() bool {
	return z.CountStatus != "all" || z.ResetStatus != "" || z.Cost.Response != 0
}

// calendar returns the unit of a calendar's windows, and their time zone.
func (z *Zone) calendar() (unit string, in *time.Location) {
	unit, name, _ := strings.Cut(z.Align, " in ")
	in, err := time.LoadLocation(name)
	if err != nil {
		panic(err)
	}
	return unit, in
}
