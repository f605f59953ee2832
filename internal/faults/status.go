package main

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// statuses is what concerned clients saw, in words.
func (o *outcome) statuses(p phase) string {
	var some []response
	ofCaddy := 0
	for _, c := range o.concerned() {
		for _, r := range o.seen(c, p) {
			some = append(some, r)
			if o.isLocal(o.buckets, c, &r) {
				ofCaddy++
			}
		}
	}
	text := describe(some)
	if ofCaddy > 0 {
		text += fmt.Sprintf(" (local: %d)", ofCaddy)
	}
	return text
}

// seen are the responses to a client in a phase, from start on.
func (o *outcome) seen(c *client, p phase) (some []response) {
	for _, r := range c.responses() {
		if !r.ended.Before(o.start) && o.phaseOf(&r) == p {
			some = append(some, r)
		}
	}
	return some
}

// describe counts responses by kind: those that are normal have no name but their
// status.
func describe(some []response) string {
	kinds := map[string]int{}
	for _, r := range some {
		kind := strconv.Itoa(r.status)
		switch {
		case r.status == 0:
			kind = "no response"
		case r.status == http.StatusOK && !r.limited:
			kind = "200 unchecked"
		}
		kinds[kind]++
	}
	var words []string
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		words = append(words, fmt.Sprintf("%d × %s", kinds[kind], kind))
	}
	return strings.Join(words, ", ")
}
