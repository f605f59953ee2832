// Package luascripts embeds the Lua scripts of the Redis store: one for each
// algorithm, bundles of them for several buckets, and those that migrate a bucket to
// another server. A script concerns the bucket in KEYS[1]; the head of its file
// describes its arguments and its reply. The package imports nothing.
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

// The scripts for several buckets in one call: those whose arguments are only an
// operation and numbers. The file bundle.lua describes arguments and reply.
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

// Whole scripts, which migrate a bucket to another server.
var (
	//go:embed dump.lua
	Dump string

	//go:embed restore.lua
	Restore string
)

// script makes body, which handles one bucket, a function, and appends the code that
// runs it.
func script(body, end string) string {
	return head + "local function run(KEYS, ARGV)\n" + body + "\nend\n" + guard + end
}
