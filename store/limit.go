package store

import "time"

// Limit is one zone's rule as the stores know it. It identifies, with a client
// key, a bucket; a limit that differs in any field has buckets of its own.
type Limit struct {
	Zone      string
	Algorithm Algorithm `json:",omitzero"`
	// Window is the length of a window, or of a lease: whole microseconds, at
	// least one, and at most MaxWindow, so that instants stay below
	// MaxInteger. Package algorithm says what configs may have.
	Window time.Duration `json:",omitzero"`
	// Align makes windows of [FixedWindow] begin at multiples of their length
	// since the epoch, and not with a client's first request.
	Align bool `json:",omitzero"`
	// Calendar, if it has a unit, makes windows of [FixedWindow] those of a calendar.
	// Then Window is Calendar.Window, and Align is set.
	Calendar Calendar `json:",omitzero"`
}

// Algorithm is a way of counting. Package algorithm has its arithmetic, and its traits.
type Algorithm uint8

// The algorithms.
const (
	// FixedWindow counts in windows of a fixed length; a client's first
	// request opens its window.
	FixedWindow Algorithm = iota
	// SlidingWindow counts in windows that begin at multiples of their length
	// since the epoch, and adds what was spent in the window before, by the
	// part of it that the last Window of time still covers. Events are at most
	// MaxWeighted.
	SlidingWindow
	// SlidingLog remembers the instant of every event of the last Window.
	// Events are at most MaxMembers.
	SlidingLog
	// GCRA is the generic cell rate algorithm: a bucket of Burst events that
	// leaks Events per Window.
	GCRA
	// Concurrency counts what runs at the same time, as leases that last for
	// Window unless they are charged again or refunded. Events are at most
	// MaxMembers.
	Concurrency
	// Algorithms is how many there are.
	Algorithms
)

// algorithms has what the contract itself needs to know of each.
var algorithms = [...]struct {
	name string
	// hasBurst is set if Request.Burst counts.
	hasBurst bool
}{
	FixedWindow:   {name: "fixed_window"},
	SlidingWindow: {name: "sliding_window"},
	SlidingLog:    {name: "sliding_log"},
	GCRA:          {name: "gcra", hasBurst: true},
	Concurrency:   {name: "concurrency"},
}

// Without the last row this does not compile, and without another one tests fail.
const _ = uint(len(algorithms) - int(Algorithms))

// String returns the name of the algorithm in configs.
func (a Algorithm) String() string { return algorithms[a].name }

// HasBurst reports whether Burst events are admitted at once and drain one by one,
// Events in a Window.
func (a Algorithm) HasBurst() bool { return algorithms[a].hasBurst }

// ParseAlgorithm returns the algorithm of that name.
func ParseAlgorithm(name string) (a Algorithm, ok bool) {
	for a := range Algorithms {
		if a.String() == name {
			return a, true
		}
	}
	return 0, false
}

const (
	// MaxEvents is the most that a limit admits in a window, or at once.
	MaxEvents = 1 << 52
	// MaxWindow is the longest window.
	MaxWindow = 100 * 365 * 24 * time.Hour
	// MaxWeighted is the most that is counted of a window of [SlidingWindow]
	// once it has gone by, because its weight is a product that has to be exact.
	MaxWeighted = 1<<32 - 1
	// MaxMembers is how many events a bucket holds one by one: of a cost above
	// it, the rest is not counted.
	MaxMembers = 100_000
)
