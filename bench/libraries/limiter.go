package main

import "context"

// decide asks for one event of a client key and tells whether it is admitted.
type decide func(ctx context.Context, key string) (admitted bool, err error)

// limiter is an implementation that is connected to a server.
type limiter struct {
	kind *kind
	// pool is how many connections it has.
	pool int
	// limit returns what decides by a limit of so many events an hour.
	limit func(events int) (decide, error)
	close func()
}

// kind is an implementation that is to be compared.
type kind struct {
	name string
	// module is where it comes from.
	module string
	// ours is set for what is compared with the others, the peers.
	ours bool
	// pools are the sizes of the connection pool to choose from.
	pools []int
	open  func(addr string, pool int) (*limiter, error)
}

// openLimiter connects an implementation.
func openLimiter(k *kind, addr string, pool int) (*limiter, error) {
	l, err := k.open(addr, pool)
	if err != nil {
		return nil, err
	}
	l.kind, l.pool = k, pool
	return l, nil
}

// kinds are all that are compared.
var kinds = append(peers, ours...)
