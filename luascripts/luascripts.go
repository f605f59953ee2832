// Package luascripts embeds the Lua scripts of the Redis store: one for each
// algorithm, bundles of them for several buckets, those that migrate a bucket to
// another server, and the one that keeps overrides. A script concerns the bucket in KEYS[1]; the head of its file
// describes its arguments and its reply. The package imports nothing of the project.
package luascripts

import "embed"

//go:embed *.lua
var files embed.FS

// The scripts for one bucket.
var (
	FixedWindow   = script("fixed_window", "single")
	SlidingWindow = script("sliding_window", "single")
	GCRA          = script("gcra", "single")
	SlidingLog    = script("members", "sliding_log", "single")
	Concurrency   = script("members", "concurrency", "single")
)

// The scripts for several buckets in one call: those whose arguments are only an
// operation and numbers. The file bundle.lua describes arguments and reply.
var (
	FixedWindowBundle   = script("fixed_window", "bundle")
	SlidingWindowBundle = script("sliding_window", "bundle")
	GCRABundle          = script("gcra", "bundle")
)

// Whole scripts, which migrate a bucket to another server.
var (
	Dump    = read("dump")
	Restore = read("restore")
)

// Override keeps what operators have changed for single clients.
var Override = read("override")

// script makes files, which handle one bucket, a function, and appends the last one,
// which runs it.
func script(names ...string) (text string) {
	end := len(names) - 1
	for _, name := range names[:end] {
		text += read(name)
	}
	return read("head") + "local function run(KEYS, ARGV)\n" + text + "\nend\n" + read("guard") + read(names[end])
}

func read(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err)
	}
	return string(text)
}
