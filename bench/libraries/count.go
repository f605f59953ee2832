package libraries

import (
	"context"
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// checkCount returns an error unless l counts: of a limit of five the sixth
// event of a client is refused, and the first of another is not.
func checkCount(l *limiter, server *redistest.Server) error {
	ctx := context.Background()
	if err := empty(server); err != nil {
		return err
	}
	const events = 5
	d, err := l.limit(events)
	if err != nil {
		return err
	}
	for n := 1; n <= events+2; n++ {
		key, want := "a", n <= events
		if n == events+2 {
			key, want = "b", true
		}
		admitted, err := d(ctx, key)
		if err != nil {
			return fmt.Errorf("decide: %w", err)
		}
		if err := l.settled(); err != nil {
			return fmt.Errorf("settle: %w", err)
		}
		if admitted != want {
			return fmt.Errorf("limit %d: admitted is %t for call %d, of client %s", events, admitted, n, key)
		}
	}
	return nil
}

// empty removes all buckets. The server is one that this program started, or
// nil for limiters that have none.
func empty(server *redistest.Server) error {
	if server == nil {
		return nil
	}
	if err := server.Client().FlushAll(context.Background()).Err(); err != nil {
		return fmt.Errorf("empty the server: %w", err)
	}
	return nil
}
