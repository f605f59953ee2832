package libraries

import (
	"context"
	"slices"
)

// decide asks for one event of a client key and tells whether it is admitted.
type decide func(ctx context.Context, key string) (admitted bool, err error)

// limiter is an implementation that is ready, connected if it has a server.
type limiter struct {
	kind *kind
	// pool is how many connections it has; 0 if it counts in memory.
	pool int
	// limit returns what decides by a limit of so many events an hour. What
	// counts in memory begins anew with each limit.
	limit func(events int) (decide, error)
	// settle waits until everything that was decided counts; nil if it does at
	// once.
	settle func() error
	close  func()
}

func (l *limiter) settled() error {
	if l.settle == nil {
		return nil
	}
	return l.settle()
}

// kind is an implementation that is to be compared.
type kind struct {
	name string
	// modules are where it comes from.
	modules []string
	// ours is set for what is compared with the others, the peers.
	ours bool
	// bounds are how many times as fast as the fastest peer it is to be, by
	// goroutines.
	bounds map[int]float64
	// extra is set if its bounds are not those that a Take is judged by.
	extra bool
	// goroutines are the numbers that it is measured with; nil for all.
	goroutines []int
	// pools are the sizes of the connection pool to choose from.
	pools []int
	// commands are those that it sends, and how many it sends for each of them
	// that the server counts. The server also counts what scripts run.
	commands map[string]int64
	open     func(addr string, pool int) (*limiter, error)
}

// scripted are the commands of those that send nothing but scripts.
var scripted = map[string]int64{"evalsha": 1, "eval": 1}

// unpooled are the pools of those that have none.
var unpooled = []int{0}

// openLimiter makes an implementation ready.
func openLimiter(k *kind, addr string, pool int) (*limiter, error) {
	l, err := k.open(addr, pool)
	if err != nil {
		return nil, err
	}
	l.kind, l.pool = k, pool
	return l, nil
}

// All that are compared.
var (
	redisKinds  = slices.Concat(peers, ours)
	memoryKinds = slices.Concat(memoryPeers, ourMemory)
)

// with are those of them that are measured with so many goroutines.
func with(kinds []*kind, goroutines int) (some []*kind) {
	for _, k := range kinds {
		if k.goroutines == nil || slices.Contains(k.goroutines, goroutines) {
			some = append(some, k)
		}
	}
	return some
}
