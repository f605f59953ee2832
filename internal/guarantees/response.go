package main

import (
	"net/http"
	"slices"
	"time"
)

// response is what a client was told. What its request spent, it spent between
// the two instants, or, with charge after, no longer after them than charges
// take to arrive.
type response struct {
	caddy        int
	begun, ended time.Time
	// status is 0 where there was no response.
	status int
	// reset is the second that the response told of, 0 where it told none.
	reset int64
}

func (r *response) isAdmitted() bool { return r.status == http.StatusOK }

func (r *response) isRefused() bool { return r.status == http.StatusTooManyRequests }

// those are the responses of which is says so.
func those(all []response, is func(*response) bool) (some []response) {
	for i := range all {
		if is(&all[i]) {
			some = append(some, all[i])
		}
	}
	return some
}

// count is how many responses are so.
func count(all []response, is func(*response) bool) (n int64) {
	for i := range all {
		if is(&all[i]) {
			n++
		}
	}
	return n
}

// byEnd are the responses in the order in which they ended.
func byEnd(all []response) []response {
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, func(a, b response) int { return a.ended.Compare(b.ended) })
	return sorted
}
