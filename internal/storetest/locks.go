package storetest

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// AwaitLock waits until a goroutine waits for a mutex in all of the functions, by parts of their names.
func AwaitLock(tb testing.TB, functions ...string) {
	tb.Helper()
	room := make([]byte, 1<<20)
	redistest.Eventually(tb, "a goroutine waits for a mutex in "+strings.Join(functions, ", "), func() error {
		for stack := range strings.SplitSeq(string(room[:runtime.Stack(room, true)]), "\n\n") {
			isElsewhere := func(function string) bool { return !strings.Contains(stack, function) }
			if strings.Contains(stack, "[sync.Mutex.Lock") && !slices.ContainsFunc(functions, isElsewhere) {
				return nil
			}
		}
		return errors.New("none does")
	})
}
