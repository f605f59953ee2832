package guarantees

import (
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
)

// TestGuarantees tries some corners; make guarantees tries all cells.
func TestGuarantees(t *testing.T) {
	var flags []string
	if withRace {
		flags = append(flags, "-race")
	}
	caddy, err := caddyproc.Build(t.TempDir(), flags...)
	redistest.Must(t, err)
	set := settings{&site.Workshop{Dir: t.TempDir(), Caddy: caddy}, 5 * window / 4}
	tryCorners(t, set)
	tryRoams(t, set)
	for _, f := range faults() {
		most := 4 * f.times
		f.times = (f.times + 2) / 3
		// A few times may meet no reply of some client; then there are more.
		for !tryFault(t, set, f, f.times >= most) {
			f.times *= 2
		}
	}
}

// tryFault tries a fault, and reports whether every client has met it. If not,
// that is a breach only at the last try.
func tryFault(t *testing.T, set settings, f fault, isLast bool) (met bool) {
	t.Helper()
	losses, err := f.try(t.Context(), set, faultLimits())
	redistest.Must(t, err)
	met = true
	for _, l := range losses {
		t.Log(l)
		for _, text := range l.breaches() {
			if !isLast && strings.HasSuffix(text, untouched) {
				met = false
				continue
			}
			t.Error(text)
		}
	}
	return met
}

// tryCorners tries all limits where a replica lags by a second, and those of
// charge after where a Caddy alone may not exceed them.
func tryCorners(t *testing.T, set settings) {
	m, stop := startMatrix(t, set, plan{limits: limits(), sizes: []int{1, 2}})
	defer stop()
	for _, corner := range []cell{{caddys: 2, lag: time.Second, connections: 16}, {caddys: 1, lag: 100 * time.Millisecond, connections: 16}} {
		var group []cell
		for _, l := range limits() {
			if corner.limit = l; corner.caddys > 1 || l.charge == after {
				group = append(group, corner)
			}
		}
		tryGroup(t, m, group)
	}
}

// tryRoams tries clients that roam between two Caddys.
func tryRoams(t *testing.T, set settings) {
	m, stop := startMatrix(t, set, plan{limits: roamLimits(), sizes: []int{2}, isApart: true})
	defer stop()
	for _, group := range roamGroups(roamLimits()) {
		if c := group[0]; c.caddys == 2 && c.lag == 0 {
			tryGroup(t, m, group)
		}
	}
}

func startMatrix(t *testing.T, set settings, p plan) (m *matrix, stop func()) {
	t.Helper()
	m, err := newMatrix(set, p)
	redistest.Must(t, err)
	return m, func() {
		if err := m.stop(); err != nil {
			t.Error(err)
		}
	}
}

func tryGroup(t *testing.T, m *matrix, group []cell) {
	t.Helper()
	outcomes, err := m.try(t.Context(), group)
	redistest.Must(t, err)
	for _, o := range outcomes {
		t.Log(o)
		for _, text := range o.breaches() {
			t.Error(text)
		}
	}
}
