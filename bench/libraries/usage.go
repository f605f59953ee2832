package libraries

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// clientUsage is what this program has used since it began.
type clientUsage struct {
	cpu                time.Duration
	allocations, bytes uint64
}

// readClient returns the processor time, user and system, and the allocations.
func readClient() (clientUsage, error) {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return clientUsage{}, fmt.Errorf("get the used processor time: %w", err)
	}
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return clientUsage{
		cpu:         time.Duration(used.Utime.Nano() + used.Stime.Nano()),
		allocations: memory.Mallocs,
		bytes:       memory.TotalAlloc,
	}, nil
}

// serverUsage is what the server has used since it began.
type serverUsage struct {
	cpu time.Duration
	// calls are the commands that were sent to it.
	calls int64
}

// readServer returns what the server, if there is one, has used. Of commands
// those count that a limiter sends.
func readServer(server *redistest.Server, commands map[string]int64) (u serverUsage, err error) {
	if server == nil {
		return u, nil
	}
	stats, err := server.Info("commandstats")
	if err != nil {
		return u, err
	}
	if u.calls, err = countCalls(stats, commands); err != nil {
		return u, err
	}
	u.cpu, err = server.CPU()
	return u, err
}

// countCalls adds up commands of the server's statistics.
func countCalls(stats map[string]string, commands map[string]int64) (sum int64, err error) {
	for name, sent := range commands {
		text, ok := stats["cmdstat_"+name]
		if !ok {
			// It was never called.
			continue
		}
		first, _, _ := strings.Cut(text, ",")
		n, err := strconv.ParseInt(strings.TrimPrefix(first, "calls="), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read the calls of %s from %q: %w", name, text, err)
		}
		sum += n * sent
	}
	return sum, nil
}
