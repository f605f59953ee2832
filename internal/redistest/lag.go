package redistest

import (
	"fmt"
	"time"
)

// DelayReplication makes everything that a replica hears of its primary arrive
// later by d, rounded up to whole milliseconds; 0 ends it. The replica goes on
// to receive all of it, in order, so it lags by d and never falls behind. It is
// not for replicas that sentinels watch: they choose a replica's connection.
func (s *Server) DelayReplication(d time.Duration) error {
	if s.link == nil {
		return fmt.Errorf("delay replication to %s: %w", s.Addr(), errNotReplica)
	}
	if err := s.link.Delay(d); err != nil {
		return fmt.Errorf("delay replication to %s: %w", s.Addr(), err)
	}
	return nil
}
