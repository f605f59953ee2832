package redis

import (
	"errors"
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

var errReply = errors.New("reply is not that of a fixed window script")

// decodeCheck reads the reply of a check. A bucket whose window is not open at
// now comes back as the zero value.
func decodeCheck(reply []int64, now int64) (algorithm.FixedWindow, error) {
	if len(reply) != 2 {
		return algorithm.FixedWindow{}, fmt.Errorf("%w: %d values, want 2", errReply, len(reply))
	}
	b := algorithm.FixedWindow{Used: reply[0], Reset: reply[1]}
	if !b.IsOpen(now) {
		return algorithm.FixedWindow{}, nil
	}
	return b, sane(b, now)
}

// decodeWrite reads the reply of a script that leaves a window open, and the
// instant at which it ran, for which about stands if the script does not tell.
func decodeWrite(reply []int64, about int64) (b algorithm.FixedWindow, now int64, err error) {
	if len(reply) != 3 {
		return b, 0, fmt.Errorf("%w: %d values, want 3", errReply, len(reply))
	}
	b, now = algorithm.FixedWindow{Used: reply[0], Reset: reply[1]}, reply[2]
	if now == 0 {
		now = about
	}
	return b, now, sane(b, now)
}

func sane(b algorithm.FixedWindow, now int64) error {
	if b.Used < 0 || !b.IsOpen(now) {
		return fmt.Errorf("%w: count %d, reset %d at %d", errReply, b.Used, b.Reset, now)
	}
	return nil
}
