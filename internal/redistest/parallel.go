package redistest

import (
	"flag"
	"fmt"
	"testing"
)

// atOnce is how many parallel tests run at a time.
const atOnce = 8

// RunTests runs tests for a TestMain, and returns its exit code. Parallel tests
// with servers mostly wait, so that several run at a time on however few
// processors, unless -parallel is given.
func RunTests(m *testing.M) int {
	flag.Parse()
	isGiven := false
	flag.Visit(func(f *flag.Flag) { isGiven = isGiven || f.Name == "test.parallel" })
	if !isGiven {
		if err := flag.Set("test.parallel", fmt.Sprint(atOnce)); err != nil {
			panic(err)
		}
	}
	return m.Run()
}
