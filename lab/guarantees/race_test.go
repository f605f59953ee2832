//go:build race

package guarantees

// withRace is set if the tests run with the race detector.
const withRace = true
