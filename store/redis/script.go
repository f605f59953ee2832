package redis

import (
	"context"
	"crypto/sha1"
	"encoding/hex"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/luascripts"
)

// script is one Lua script. Its name is boxed once, because a command is built
// for every request.
type script struct {
	source string
	sha    any
	// bundle does the same for several buckets; nil if there is no such script.
	bundle *script
}

var (
	scriptFixedWindow   = newBundled(luascripts.FixedWindow, luascripts.FixedWindowBundle)
	scriptSlidingWindow = newBundled(luascripts.SlidingWindow, luascripts.SlidingWindowBundle)
	scriptSlidingLog    = newScript(luascripts.SlidingLog)
	scriptGCRA          = newBundled(luascripts.GCRA, luascripts.GCRABundle)
	scriptConcurrency   = newScript(luascripts.Concurrency)

	// Servers are given these when a bucket is brought for the first time.
	scriptDump    = newScript(luascripts.Dump)
	scriptRestore = newScript(luascripts.Restore)
)

var allScripts = []*script{scriptFixedWindow, scriptSlidingWindow, scriptSlidingLog, scriptGCRA, scriptConcurrency}

func newScript(source string) *script {
	sum := sha1.Sum([]byte(source)) // SHA-1 is how Redis names scripts.
	return &script{source: source, sha: hex.EncodeToString(sum[:])}
}

func newBundled(source, bundle string) *script {
	s := newScript(source)
	s.bundle = newScript(bundle)
	return s
}

// load adds to a pipeline what makes a server know the script, for one bucket and
// for several.
func (s *script) load(ctx context.Context, pipe goredis.Pipeliner) {
	pipe.ScriptLoad(ctx, s.source)
	if s.bundle != nil {
		s.bundle.load(ctx, pipe)
	}
}
