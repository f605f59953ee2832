package libraries

// Figures are medians that a text is about.
type Figures struct {
	// Goroutines is how many asked for a Take at the same time.
	Goroutines int
	// TakeRate is decisions per second by a Take of a fixed window, of what is
	// admitted, and TakeServerMicros the server's CPU time for each.
	TakeRate, TakeServerMicros float64
	// CeilingRate is calls of the same script per second by redis-benchmark, and
	// CeilingServerMicros the server's CPU time for each.
	CeilingRate, CeilingServerMicros float64
	// CeilingPart is which part of the ceiling a Take reached in the same round.
	CeilingPart float64
}

// Figures returns those with 256 goroutines or, if nothing was measured with
// those, with the most.
func (r *Result) Figures() Figures {
	c := r.admitted(ceilingWith)
	take := c.place(takeFixedWindow)
	return Figures{
		Goroutines:          c.scene.goroutines,
		TakeRate:            c.spread(take, rate).Median,
		TakeServerMicros:    c.spread(take, serverMicros).Median,
		CeilingPart:         c.parts(take).Median,
		CeilingRate:         c.ceilings(ceilingRate).Median,
		CeilingServerMicros: c.ceilings(ceilingMicros).Median,
	}
}
