// Package luascripts embeds the scripts by which a Redis store writes, one for
// each algorithm, and those that bring a bucket to another server. Each concerns
// the bucket in KEYS[1]; its file says what it takes and replies.
package luascripts

import _ "embed"

// The scripts for one bucket.
var (
	FixedWindow   = script(fixedWindow, single)
	SlidingWindow = script(slidingWindow, single)
	GCRA          = script(gcra, single)
	SlidingLog    = script(members+slidingLog, single)
	Concurrency   = script(members+concurrency, single)
)

// The scripts for several buckets in one call, of those that take nothing but an
// operation and numbers. The file bundle.lua says what they take and reply.
var (
	FixedWindowBundle   = script(fixedWindow, bundle)
	SlidingWindowBundle = script(slidingWindow, bundle)
	GCRABundle          = script(gcra, bundle)
)

// The parts of the scripts.
var (
	//go:embed head.lua
	head string

	//go:embed guard.lua
	guard string

	//go:embed single.lua
	single string

	//go:embed bundle.lua
	bundle string

	// Dump and Restore bring a bucket to another server.

	//go:embed dump.lua
	Dump string

	//go:embed restore.lua
	Restore string

	//go:embed members.lua
	members string

	//go:embed fixed_window.lua
	fixedWindow string

	//go:embed sliding_window.lua
	slidingWindow string

	//go:embed gcra.lua
	gcra string

	//go:embed sliding_log.lua
	slidingLog string

	//go:embed concurrency.lua
	concurrency string
)

// script makes a function of what is done with one bucket, and ends with what
// runs it.
func script(body, end string) string {
	return head + "local function run(KEYS, ARGV)\n" + body + "\nend\n" + guard + end
}
