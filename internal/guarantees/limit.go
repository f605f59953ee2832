package main

import (
	"fmt"
	"time"
)

// What zones can be told.
const (
	fixedWindow   = "fixed_window"
	slidingWindow = "sliding_window"
	slidingLog    = "sliding_log"
	gcra          = "gcra"
	concurrency   = "concurrency"

	after  = "after"
	before = "before"
)

// limit is what a zone holds each client to.
type limit struct {
	algorithm, charge string
	// batched is set if Caddys take events in advance.
	batched bool
	// events and burst are those of the zone; burst is that of gcra alone.
	events, burst int64
	window        time.Duration
	// takes is how long the backend takes for each request.
	takes time.Duration
}

const (
	// window is that of all zones: long enough that a client with one request at
	// a time spends all in it, so short that several go by.
	window = 4 * time.Second
	// batchShare is the default of batch_share, in percent.
	batchShare = 10
)

// limits are one of each kind.
func limits() (all []limit) {
	for _, algorithm := range []string{fixedWindow, slidingWindow, slidingLog, gcra} {
		l := limit{algorithm: algorithm, events: 100, window: window, takes: 10 * time.Millisecond}
		if algorithm == gcra {
			l.burst = 25
		}
		for _, charge := range []string{after, before} {
			l.charge = charge
			all = append(all, l)
		}
		if algorithm == fixedWindow || algorithm == slidingWindow {
			l.batched = true
			all = append(all, l)
		}
	}
	return append(all, limit{algorithm: concurrency, charge: before, events: 8, window: window, takes: 50 * time.Millisecond})
}

// zone is the name of the zone.
func (l limit) zone() string {
	name := l.algorithm + "." + l.charge
	if l.batched {
		name += ".batch"
	}
	return name
}

// String is the limit as the table calls it.
func (l limit) String() string {
	switch {
	case l.algorithm == concurrency:
		return l.algorithm
	case l.batched:
		return l.algorithm + ", " + l.charge + ", batch auto"
	default:
		return l.algorithm + ", " + l.charge
	}
}

// caddyfile is the zone in a Caddyfile, for the requests whose path it is.
func (l limit) caddyfile() string {
	text := fmt.Sprintf("zone %s {\nmatch {\npath /%s\n}\nkey {header.X-Client}\nevents %d\nwindow %s\nalgorithm %s\n",
		l.zone(), l.zone(), l.events, l.window, l.algorithm)
	if l.algorithm != concurrency {
		text += "charge " + l.charge + "\n"
	}
	if l.burst > 0 {
		text += fmt.Sprintf("burst %d\n", l.burst)
	}
	if l.batched {
		text += "batch auto\n"
	}
	return text + "}\n"
}

// capacity is how much a client can spend at once.
func (l limit) capacity() int64 {
	if l.burst > 0 {
		return l.burst
	}
	return l.events
}
