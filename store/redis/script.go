package redis

import (
	"crypto/sha1"
	"encoding/hex"

	"github.com/shardlimit/caddy-shardlimit/luascripts"
)

// script is one Lua script. Its name is boxed once, because a command is built
// for every request.
type script struct {
	source string
	sha    any
}

var (
	scriptFixedWindow   = newScript(luascripts.FixedWindow)
	scriptSlidingWindow = newScript(luascripts.SlidingWindow)
	scriptSlidingLog    = newScript(luascripts.SlidingLog)
	scriptGCRA          = newScript(luascripts.GCRA)
	scriptConcurrency   = newScript(luascripts.Concurrency)
)

var allScripts = []*script{scriptFixedWindow, scriptSlidingWindow, scriptSlidingLog, scriptGCRA, scriptConcurrency}

func newScript(source string) *script {
	sum := sha1.Sum([]byte(source)) // SHA-1 is how Redis names scripts.
	return &script{source: source, sha: hex.EncodeToString(sum[:])}
}
