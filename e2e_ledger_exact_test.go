package shardlimit_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestOneRequestAfterTheOtherIsCountedExactly: a client that waits for each
// response is told what it has used, and is refused not one request too early or
// too late, although charges come after responses, checks go to a replica, and
// the primary's time is only estimated there.
func TestOneRequestAfterTheOtherIsCountedExactly(t *testing.T) {
	const clients, events = 400, 3
	servers := caddytest.StartShards(t, 1, 1)
	c := startWith(t, servers.Store(), sequentialZones(events), "respond ok")
	for _, algorithm := range counting {
		t.Run(algorithm, func(t *testing.T) {
			caddytest.Together(t, 2, func(worker int) error {
				for i := range clients / 2 {
					key := fmt.Sprint("X-Key: ", worker, "-", i)
					for used := range int64(events) {
						a, err := c.TryProbe(t.Context(), "/"+algorithm, key)
						if err := errors.Join(err, a.Shows(200, events, used+1)); err != nil {
							return fmt.Errorf("client %d, request %d: %w", i, used+1, err)
						}
					}
					a, err := c.TryProbe(t.Context(), "/"+algorithm, key)
					if err := errors.Join(err, a.Refuses(algorithm), want("used", a.Used, events)); err != nil {
						return fmt.Errorf("client %d, request too many: %w", i, err)
					}
				}
				return nil
			})
		})
	}
}

// sequentialZones are zones for each algorithm.
func sequentialZones(events int) (zones string) {
	for _, algorithm := range counting {
		zones += pathZone(algorithm, "algorithm "+algorithm, fmt.Sprint("events ", events))
	}
	return zones
}
