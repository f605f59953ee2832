//go:build race

package faults

// withRace is set if the tests run with the race detector.
const withRace = true
