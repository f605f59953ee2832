package redis

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// probePeriod is how often it is looked for servers that are left out.
	probePeriod = 250 * time.Millisecond
	// probeTimeout bounds a ping, beside connecting.
	probeTimeout = 500 * time.Millisecond
)

// probe pings the servers that are left out, until the shard is closed. So
// requests never wait to see whether a server is back.
func (s *Shard) probe() {
	for pause(s.life, probePeriod) {
		var pings sync.WaitGroup
		for _, l := range s.allLanes() {
			if !l.isUp() {
				pings.Go(func() { l.ping(s.life) })
			}
		}
		pings.Wait()
	}
}

// allLanes are those in use, also the ones that only redirections lead to.
func (s *Shard) allLanes() []*lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.lanes))
}

// ping lets the breaker close if the server answers, once it is time to try.
func (l *lane) ping(ctx context.Context) {
	reported, err := l.breaker.Allow()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err = l.client.Load().Ping(ctx).Err()
	l.fault.note(err)
	reported(err)
}

// fault is the last error that spoke against a server.
type fault struct{ err atomic.Pointer[error] }

func (f *fault) note(err error) {
	if err != nil {
		f.err.Store(&err)
	}
}

func (f *fault) load() error {
	if err := f.err.Load(); err != nil {
		return *err
	}
	return nil
}
