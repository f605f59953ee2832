package main

import "testing"

func TestReadOwnAllocations(t *testing.T) {
	const told = `goos: linux
BenchmarkHandler/own_allocations-2         	       1	    135515 ns/op	         5.517 own-allocs/op	    4152 B/op	      35 allocs/op
PASS
`
	if own, err := readOwnAllocations([]byte(told)); err != nil || own != 5.517 {
		t.Errorf("%v, error %v", own, err)
	}
	if own, err := readOwnAllocations([]byte("PASS\n")); err == nil {
		t.Errorf("%v without an error", own)
	}
}
