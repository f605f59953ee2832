package admin

import (
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// started is about when the process started.
var started = time.Now()

// modulePath is the path of the module whose version is shown.
const modulePath = "github.com/shardlimit/caddy-shardlimit"

// instance describes this process.
func instance() adminapi.Instance {
	name, err := os.Hostname()
	if err != nil {
		name = "unknown"
	}
	return adminapi.Instance{ID: stores.ProcessID, Name: name, Version: version(), Uptime: seconds(time.Since(started))}
}

// version returns the version of this module in the binary, or "".
var version = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	if info.Main.Path == modulePath {
		return info.Main.Version
	}
	for _, m := range info.Deps {
		if m.Path == modulePath {
			if m.Replace != nil {
				m = m.Replace
			}
			return m.Version
		}
	}
	return ""
})
