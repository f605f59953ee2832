package shardlimit_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// exactHeap, set in the environment of a test's Caddy, makes it know of every
// allocation which is in use.
const exactHeap = "SHARDLIMIT_TEST_EXACT_HEAP"

func init() {
	if os.Getenv(exactHeap) != "" {
		runtime.MemProfileRate = 1
	}
	caddy.RegisterModule(holdingsAPI{})
}

// holdings is what code of this module, or of the Redis client that it uses, has
// started or made, and is there still.
type holdings struct {
	Goroutines int
	// Bytes are those that the code of stores has allocated.
	Bytes int64
	// Stacks tell of both.
	Stacks []string
}

// holdingsAPI tells of them at /test/holdings of a test's Caddy.
type holdingsAPI struct{}

// CaddyModule implements [caddy.Module].
func (holdingsAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.test_holdings", New: func() caddy.Module { return holdingsAPI{} }}
}

// Routes implements [caddy.AdminRouter].
func (holdingsAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: "/test/holdings", Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		var h holdings
		h.countGoroutines()
		h.countBytes()
		return json.NewEncoder(w).Encode(h)
	})}}
}

// isOurs tells goroutines that this module has started, or the libraries that it
// alone uses.
var isOurs = regexp.MustCompile(`shardlimit/caddy-shardlimit|redis/go-redis|maypok86/otter`)

const module = "github.com/shardlimit/caddy-shardlimit"

func (h *holdings) countGoroutines() {
	stacks := make([]byte, 16<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		// Both are there without a limiter: this request, and what runs Caddy.
		if isOurs.MatchString(stack) && !strings.Contains(stack, "holdingsAPI") && !strings.Contains(stack, "TestMain") {
			h.Goroutines++
			h.Stacks = append(h.Stacks, stack)
		}
	}
}

func (h *holdings) countBytes() {
	// What is in pools goes with the second collection.
	runtime.GC()
	runtime.GC()
	records := make([]runtime.MemProfileRecord, 1000)
	for n, ok := runtime.MemProfile(records, false); !ok; n, ok = runtime.MemProfile(records, false) {
		records = make([]runtime.MemProfileRecord, n+1000)
	}
	for i := range records {
		r := &records[i]
		if r.InUseBytes() == 0 {
			continue
		}
		// What libraries allocate, such as series of metrics, is theirs.
		var stack []string
		isKept := false
		for frames := runtime.CallersFrames(r.Stack()); ; {
			frame, more := frames.Next()
			// What waiting and timers take, the runtime keeps for the next of them.
			isKept = isKept || frame.Function == "runtime.acquireSudog" || strings.HasPrefix(frame.Function, "runtime.(*timers).")
			if len(stack) > 0 || !strings.HasPrefix(frame.Function, "runtime.") && !strings.HasPrefix(frame.Function, "internal/runtime/") {
				stack = append(stack, frame.Function)
			}
			if !more {
				break
			}
		}
		if len(stack) > 0 && !isKept && strings.HasPrefix(stack[0], module+"/store/") {
			h.Bytes += r.InUseBytes()
			h.Stacks = append(h.Stacks, fmt.Sprintf("%d bytes: %s", r.InUseBytes(), strings.Join(stack, " < ")))
		}
	}
}

// holdingsOf asks the process.
func holdingsOf(c *caddytest.Caddy) (h holdings) {
	c.T.Helper()
	c.AdminJSON(http.MethodGet, "/test/holdings", "", &h)
	return h
}

var _ caddy.AdminRouter = holdingsAPI{}
