package redistest

import (
	"context"
	"fmt"
	"time"
)

const (
	// patience bounds every wait that has no context of the caller's.
	patience = time.Minute

	// replicationPatience bounds the waits for replication even if the
	// caller's context has no deadline.
	replicationPatience = time.Minute

	// groupPatience bounds the waits for a group of servers to agree even if
	// the caller's context has no deadline.
	groupPatience = time.Minute

	// answerPatience bounds one attempt at getting an answer from a server that
	// may not be there; others follow.
	answerPatience = 200 * time.Millisecond

	pollInterval = 2 * time.Millisecond

	// groupPollInterval is for questions to all members of a group of servers,
	// which cost them time that they need to agree.
	groupPollInterval = 20 * time.Millisecond
)

// poll calls done until it returns nil. Once ctx has ended it returns the
// error of ctx together with what done last reported as missing.
func poll(ctx context.Context, done func() error) error {
	return pollEvery(ctx, pollInterval, done)
}

func pollEvery(ctx context.Context, interval time.Duration, done func() error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()

	var missing error
	for {
		err := done()
		if err == nil {
			return nil
		}
		// An error that the end of ctx caused tells less than the one before. A
		// connection can notice the deadline before ctx does.
		end, bounded := ctx.Deadline()
		ended := ctx.Err() != nil || bounded && !time.Now().Before(end)
		if !ended || missing == nil {
			missing = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), missing)
		case <-ticker.C:
		}
	}
}
