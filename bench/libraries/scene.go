package libraries

import "fmt"

// scene is the circumstances of a comparison.
type scene struct {
	goroutines int
	// refused is set if nothing is admitted; otherwise everything is.
	refused bool
}

// The limits of the scenes, in events an hour: one that is used up by the first
// event, and one that is not used up.
const (
	scarce = 1
	plenty = 1_000_000
)

// events is the limit.
func (s scene) events() int {
	if s.refused {
		return scarce
	}
	return plenty
}

// admitted is how many of some decisions have to admit.
func (s scene) admitted(decisions int) int {
	if s.refused {
		return 0
	}
	return decisions
}

func (s scene) String() string {
	what := "admitted"
	if s.refused {
		what = "refused"
	}
	return fmt.Sprintf("%d, %s", s.goroutines, what)
}

// crowd is how many goroutines there are, in words.
func (s scene) crowd() string {
	words := fmt.Sprintf("%d goroutines", s.goroutines)
	if s.goroutines == 1 {
		words = "1 goroutine"
	}
	if s.refused {
		words += ", refused"
	}
	return words
}
