package stores

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// The kinds of loss at the end of the process, as its log names them.
const (
	lostCharges   = "charges"
	lostRefunds   = "refunds"
	lostSlots     = "slots"
	lostHolds     = "holds"
	lostPenalties = "penalties"
)

// lossOf returns what is lost where an operation under a limit fails.
func lossOf(limit *store.Limit, op algorithm.Operation, err error) string {
	switch {
	case errors.Is(err, ledger.ErrHeld):
		return lostHolds
	case op == algorithm.Penalize:
		return lostPenalties
	case op != algorithm.Refund:
		return lostCharges
	case algorithm.Of(limit.Algorithm).Lease:
		return lostSlots
	}
	return lostRefunds
}

// loss is what was lost of a zone.
type loss struct{ store, zone, what string }

// losses counts what was lost, and of how much of it the outcome is unknown.
type losses struct {
	mu  sync.Mutex
	all map[loss]lostCount
}

type lostCount struct{ requests, uncertain int64 }

// atExit has what was lost while the process ended.
var atExit losses

func (l *losses) note(what loss, requests int64, isUncertain bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all = map[loss]lostCount{}
	}
	n := l.all[what]
	n.requests += requests
	if isUncertain {
		n.uncertain += requests
	}
	l.all[what] = n
}

// log logs an entry for each zone and kind.
func (l *losses) log(logger *zap.Logger) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lost := range slices.SortedFunc(maps.Keys(l.all), func(a, b loss) int {
		return cmp.Or(cmp.Compare(a.store, b.store), cmp.Compare(a.zone, b.zone), cmp.Compare(a.what, b.what))
	}) {
		fields := []zap.Field{
			zap.Int64(lost.what, l.all[lost].requests), zap.Int64("uncertain", l.all[lost].uncertain),
			zap.String("store", lost.store), zap.String("zone", lost.zone),
		}
		if lost.what == lostSlots || lost.what == lostHolds {
			fields = append(fields, zap.String("remedy", "none is needed: they end by themselves, within the window of the zone"))
		}
		logger.Error(lost.what+" were lost at exit", fields...)
	}
}
