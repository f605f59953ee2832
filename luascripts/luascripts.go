// Package luascripts embeds the Lua scripts of the Redis store: one for each
// algorithm, bundles of them for several buckets, and those that keep overrides and
// records. A script concerns the bucket in KEYS[1]; the head of its file
// describes its arguments and its reply.
package luascripts

import (
	"embed"
	"strings"
)

//go:embed *.lua
var files embed.FS

// Single returns the script of these files for one bucket.
func Single(names ...string) string { return script("single", names) }

// Bundle returns the script of these files for several buckets in one call, if its
// arguments are only an operation and numbers. The file bundle.lua describes arguments
// and reply.
func Bundle(names ...string) string { return script("bundle", names) }

// Override keeps what operators have changed for clients and zones.
var Override = read("override")

// Record keeps small values that processes share.
var Record = read("record")

// script makes files, which handle one bucket, a function, and appends end, which runs
// it and includes what follows the run.
func script(end string, names []string) (text string) {
	for _, name := range names {
		text += read(name)
	}
	return read("head") + "local function run(KEYS, ARGV)\n" + text + "\nend\n" + read("guard") +
		strings.Replace(read(end), "-- include held\n", read("held"), 1)
}

func read(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err)
	}
	return string(text)
}
