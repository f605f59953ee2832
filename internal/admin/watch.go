package admin

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

const (
	// lookPeriod is how often a watch looks for problems, and firstLookPeriod how often it does so at
	// first, as many times as firstLooks says: most are there from the start.
	lookPeriod      = 2 * time.Second
	firstLookPeriod = 250 * time.Millisecond
	firstLooks      = 12
	// problemLasts is how long after it was found last a problem is over, for the log.
	problemLasts = 5 * time.Second
	// mostProblems is how many problems are listed and remembered.
	mostProblems = 100
)

// Watch finds what is wrong while a config runs. For problems of all kinds it decides when they
// begin, when the first look finds them, and when they end, once none has found them for
// problemLasts. It logs both, once each, unless the source of the problem does.
type Watch struct {
	running runningConfig
	logger  *zap.Logger
	now     func() time.Time
	done    chan struct{}
	start   sync.Once
	stop    sync.Once

	mu      sync.Mutex
	traffic traffic
	lasting map[subject]*lasting
	// judged is when problems were looked for last.
	judged time.Time
}

// lasting is a problem that has begun and not ended.
type lasting struct {
	problem
	began, found time.Time
}

// NewWatch returns the watch of a config.
func NewWatch(running runningConfig, logger *zap.Logger, now func() time.Time) *Watch {
	return &Watch{running: running, logger: logger, now: now, done: make(chan struct{}), lasting: map[subject]*lasting{}}
}

// Start looks for problems from now on: the config runs.
func (w *Watch) Start() {
	w.start.Do(func() {
		w.look()
		go w.follow()
	})
}

// Stop ends what Start began. The problems end without a word, because the next config has a
// watch of its own.
func (w *Watch) Stop() { w.stop.Do(func() { close(w.done) }) }

func (w *Watch) follow() {
	for n := 0; ; n++ {
		pause := lookPeriod
		if n < firstLooks {
			pause = firstLookPeriod
		}
		select {
		case <-time.After(pause):
			// A config that has ended may wait for the last request of its servers.
			if app, err := runningApp(); err == nil && app == w.running {
				w.look()
			}
		case <-w.done:
			return
		}
	}
}

// look measures the traffic of the zones, and looks for problems.
func (w *Watch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.traffic.measure(w.running, w.now())
	w.judge()
}

// Problems returns what is wrong now, the worst first. It calls no server.
func (w *Watch) Problems() []adminapi.Problem {
	w.mu.Lock()
	defer w.mu.Unlock()
	unlisted := w.judge()
	all := make([]*lasting, 0, len(w.lasting))
	for _, p := range w.lasting {
		// One that is over for the log later is none now.
		if p.found.Equal(w.judged) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *lasting) int {
		return cmp.Or(cmp.Compare(a.of.kind.Rank(), b.of.kind.Rank()), cmp.Compare(a.Store, b.Store), cmp.Compare(a.of.order, b.of.order), cmp.Compare(a.Text, b.Text))
	})
	listed := make([]adminapi.Problem, 0, len(all)+1)
	for _, p := range all {
		shown := p.Problem
		shown.Kind, shown.Since = p.of.kind, float64(p.began.UnixMilli())/1e3
		listed = append(listed, shown)
	}
	if unlisted > 0 {
		listed = append(listed, adminapi.Problem{Kind: adminapi.ProblemMore, Text: fmt.Sprintf("%d more problems are not listed", unlisted)})
	}
	return listed
}

// judge begins the problems that are found and ends others, and returns how many there is no room
// for. mu is held.
func (w *Watch) judge() (unlisted int) {
	now := w.now()
	w.judged = now
	for _, p := range findProblems(w.running, &w.traffic, now) {
		if was := w.lasting[p.of]; was != nil {
			was.problem, was.found = p, now
			continue
		}
		if len(w.lasting) >= mostProblems {
			unlisted++
			if !w.makeRoom(p.of.kind) {
				continue
			}
		}
		w.lasting[p.of] = &lasting{p, now, now}
		w.log(zap.WarnLevel, &p, "a problem began", zap.String("problem", p.Text))
	}
	for of, p := range w.lasting {
		if now.Sub(p.found) >= problemLasts {
			delete(w.lasting, of)
			w.log(zap.InfoLevel, &p.problem, "a problem is over", zap.String("problem", p.Text), zap.Duration("lasted", now.Sub(p.began)))
		}
	}
	return unlisted
}

// makeRoom forgets the least problem, and reports whether it was less than those of a kind. mu is held.
func (w *Watch) makeRoom(k kind) bool {
	least := subject{kind: k}
	for of := range w.lasting {
		if of.kind.Rank() > least.kind.Rank() {
			least = of
		}
	}
	delete(w.lasting, least)
	return least.kind != k
}

func (w *Watch) log(level zapcore.Level, p *problem, message string, fields ...zap.Field) {
	if slices.Contains(logsItself, p.of.kind) {
		return
	}
	w.logger.Log(level, message, append([]zap.Field{zap.String("kind", string(p.of.kind)), zap.String("store", p.Store), zap.String("zone", p.Zone)}, fields...)...)
}
