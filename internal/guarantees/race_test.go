//go:build race

package main

// withRace is set if the tests run with the race detector.
const withRace = true
