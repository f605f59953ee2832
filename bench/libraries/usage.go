package libraries

import (
	"runtime"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// clientUsage is what this program has used since it began.
type clientUsage struct {
	cpu                time.Duration
	allocations, bytes uint64
}

// readClient returns the processor time, user and system, and the allocations.
func readClient() (clientUsage, error) {
	cpu, err := process.CPUTime()
	if err != nil {
		return clientUsage{}, err
	}
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return clientUsage{
		cpu:         cpu,
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
	made, err := server.Calls()
	if err != nil {
		return u, err
	}
	u.calls = countCalls(made, commands)
	u.cpu, err = server.CPU()
	return u, err
}

// countCalls adds up what a limiter sends of the commands that a server ran.
func countCalls(made, commands map[string]int64) (sum int64) {
	for name, sent := range commands {
		sum += made[name] * sent
	}
	return sum
}
