// Package luascripts embeds the scripts by which a Redis store writes, one for
// each algorithm, and those that bring a bucket to another server. Each concerns
// the bucket in KEYS[1]; its file says what it takes and replies.
package luascripts

import _ "embed"

// The scripts.
var (
	//go:embed fixed_window.lua
	FixedWindow string

	//go:embed sliding_window.lua
	SlidingWindow string

	//go:embed gcra.lua
	GCRA string

	// SlidingLog is complete with what it shares.
	SlidingLog = members + slidingLog

	// Concurrency is complete with what it shares.
	Concurrency = members + concurrency

	// Dump and Restore bring a bucket to another server.

	//go:embed dump.lua
	Dump string

	//go:embed restore.lua
	Restore string

	//go:embed members.lua
	members string

	//go:embed sliding_log.lua
	slidingLog string

	//go:embed concurrency.lua
	concurrency string

	//go:embed bundle.lua
	bundle string
)

// Bundle makes of a script for one bucket, which takes nothing but an operation
// and numbers, one for several buckets. The file bundle.lua says what it takes and
// replies.
func Bundle(script string) string {
	return "local function run(KEYS, ARGV)\n" + script + "\nend\n" + bundle
}
