package service

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// sweepPeriod is how often a process looks for records that are due, and sweepPortion how many of
	// each shard it deals with at a time.
	sweepPeriod  = time.Second
	sweepPortion = 100
	// sweepTimes bounds how many portions follow each other.
	sweepTimes = 100
	// mostDealing bounds how many records are dealt with at the same time.
	mostDealing = 100
	// stopPatience is how long the end of a config waits for what is being settled. Other Caddys go on with it.
	stopPatience = 5 * time.Second
)

// sweeper deals with records that are due, whichever Caddy has made them: reservations that nobody has ended
// expire, what stores could not take is tried again, and old answers are removed.
type sweeper struct {
	// patience is how long a call may take before its maker is taken to have died, and settleTime the same
	// of whoever settles.
	patience, settleTime time.Duration
	life                 context.Context
	cancel               context.CancelFunc
	// dealing are the sweeps, and those that deal with a record, each of which has one of the slots.
	dealing          sync.WaitGroup
	slots            chan struct{}
	failed, unlooked telemetry.LogThrottle
	unread           unread
}

// prepareSweeps makes the process look for such records once the config runs, until stop is called.
func (s *Service) prepareSweeps() {
	s.patience = max(leastPatience, 3*s.limiter.Store.CheckTimeout())
	for _, z := range s.limiter.Zones {
		s.patience = max(s.patience, leastPatience+z.MaxWait)
	}
	s.patience = min(s.patience, store.MaxRecordLeft)
	s.settleTime = 6 * s.patience
	for _, handle := range s.limiter.Stores() {
		s.settleTime = max(s.settleTime, s.patience+handle.DeliveryTime())
	}
	s.settleTime = min(s.settleTime, store.MaxRecordLeft)
	s.life, s.cancel = context.WithCancel(context.Background())
	s.slots = make(chan struct{}, mostDealing)
	s.limiter.OnRun(func() { s.dealing.Go(s.follow) })
}

// stop ends the sweeps, if there are any, and waits a little for what is being settled.
func (s *sweeper) stop() {
	if s.cancel == nil {
		return
	}
	s.cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.dealing.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(stopPatience):
	}
}

func (s *Service) follow() {
	for {
		s.look(s.life, s.report)
		select {
		case <-time.After(sweepPeriod):
		case <-s.life.Done():
			return
		}
	}
}

// report logs that something could not be settled.
func (s *Service) report(err error) {
	if err == nil || s.life.Err() != nil {
		return
	}
	if times, log := s.failed.Report(s.limiter.Now()); log {
		s.logger.Error("reservations cannot be ended, and are tried again", zap.Int64("times", times), zap.Error(err))
	}
}

// reportLook logs that nobody knows what is due: maybe nothing is. A store that keeps no records has none.
func (s *Service) reportLook(err error) {
	if err == nil || errors.Is(err, errors.ErrUnsupported) || s.life.Err() != nil {
		return
	}
	if times, log := s.unlooked.Report(s.limiter.Now()); log {
		s.logger.Warn("the store does not say which reservations are due; if there are any, they end once it does", zap.Int64("times", times), zap.Error(err))
	}
}

// look begins to deal with what is due, and reports for each record what came of it. What takes long to settle
// holds up others only if there is too much of it.
func (s *Service) look(ctx context.Context, report func(error)) {
	for range sweepTimes {
		var due []store.Record
		s.reportLook(s.guarded(func() error {
			return s.records(false, func(kept store.Records) (err error) {
				due, err = kept.DueRecords(ctx, sweepPortion)
				return err
			})
		}))
		for _, r := range due {
			select {
			case s.slots <- struct{}{}:
			case <-ctx.Done():
				return
			}
			s.dealing.Go(func() {
				defer func() { <-s.slots }()
				report(s.guarded(func() error { return s.dealWith(ctx, r) }))
			})
		}
		if len(due) < sweepPortion || ctx.Err() != nil {
			return
		}
	}
}

// dealWith deals with a record that is due. What cannot be read stays for a while: it may be that of Caddys with
// another key_secret or version, which can.
func (s *Service) dealWith(ctx context.Context, due store.Record) error {
	// What has begun goes on after the config has ended.
	ctx = context.WithoutCancel(ctx)
	r, err := read(due)
	if err != nil && !s.unread.isOld(due, s.limiter.Now()) {
		return err
	}
	if err == nil {
		switch r.Phase {
		case open:
			// What is owed is written down first: if that fails halfway, the next one goes on.
			if r = r.ended(expired, costless(r)); r.Phase == done {
				_, err := s.put(ctx, due, r, r.kept())
				return unlessChanged(err)
			}
			if due, err = s.put(ctx, due, r, settlePause); err != nil {
				return unlessChanged(err)
			}
			return s.settle(ctx, due, r)
		case owing, settling:
			return s.settle(ctx, due, r)
		case taking, done:
		}
	}
	_, putErr := s.put(ctx, due, nil, 0)
	if putErr = unlessChanged(putErr); putErr == nil {
		s.unread.forget(due)
	}
	return cmp.Or(err, putErr)
}

const (
	// mostUnread bounds how many unread records are remembered, in some 150 bytes each. More stay for an hour longer.
	mostUnread = 100_000
	// prunePeriod is how often those are sought that others have dealt with.
	prunePeriod = time.Minute
)

// unread is when each of the records that are due and cannot be read was found first, by the version.
type unread struct {
	mu     sync.Mutex
	since  map[string]time.Time
	pruned time.Time
}

// forget forgets a record that was removed.
func (u *unread) forget(r store.Record) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.since, r.Version)
}

// isOld reports whether a record has been due for so long that those who can read it are gone.
func (u *unread) isOld(r store.Record, now time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	since, isKnown := u.since[r.Version]
	if isKnown {
		return now.Sub(since) > store.MaxRecordLeft
	}
	if now.Sub(u.pruned) > prunePeriod {
		u.pruned = now
		// Others have dealt with what was not found again for as long.
		maps.DeleteFunc(u.since, func(_ string, since time.Time) bool { return now.Sub(since) > 2*store.MaxRecordLeft })
	}
	if u.since == nil {
		u.since = map[string]time.Time{}
	}
	if len(u.since) < mostUnread {
		u.since[r.Version] = now
	}
	return false
}
