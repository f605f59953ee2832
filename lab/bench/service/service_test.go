package service

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestRun runs one short round of everything.
func TestRun(t *testing.T) {
	var r *Result
	err := errors.New("not run")
	// The slower the machine, the longer a case has to run until its figures mean something.
	for length := 200 * time.Millisecond; length < 4*time.Second && err != nil; length *= 4 {
		r, err = Run(t.Context(), Options{Rounds: 1, More: 1, Length: length}, io.Discard)
		redistest.Must(t, err)
		err = checkFigures(r)
	}
	redistest.Must(t, err)
	for _, name := range names {
		want := 1
		if slices.Contains(r.undecided(), name) { // two rounds decide no goal either
			want = 2
		}
		if len(r.samples[name]) != want {
			t.Errorf("%s: %d rounds, want %d", name, len(r.samples[name]), want)
		}
	}
	template, err := os.ReadFile("../benchmarks.md")
	redistest.Must(t, errors.Join(err, report.CheckPlaces(string(template), r.Sections())))
	table := r.Sections()["services"]
	for _, name := range names {
		if strings.Count(table, "| "+name+" |") != 1 {
			t.Errorf("not one row of %s in\n%s", name, table)
		}
	}
	for _, g := range r.Goals() {
		if len(g.Rounds) != 2 || g.Bound <= 0 {
			t.Errorf("goal %+v", g)
		}
	}
}

// checkFigures requires that each sample has figures, and calls as expected.
func checkFigures(r *Result) error {
	for name, samples := range r.samples {
		for _, s := range samples {
			if s.rate <= 0 || s.server < 0 || s.redis < 0 || s.median <= 0 || s.high < s.median || s.fullMedian <= 0 {
				return fmt.Errorf("%s: %+v", name, s)
			}
			// A refusal that a process knows makes no call. Calls that leave together are one, of up to 100 decisions.
			least, most := 0.01, 2.5
			switch name {
			case Refused, peerRefusedHere:
				least, most = 0, 0.2
			case Batched, floor:
				least = 0
			}
			if s.calls < least || s.calls > most {
				return fmt.Errorf("%s: %g calls per decision", name, s.calls)
			}
		}
	}
	return nil
}

func TestPeerOf(t *testing.T) {
	for _, name := range names {
		if peer := peerOf(name); strings.HasSuffix(peer, "refused") != strings.HasSuffix(name, "refused") || !strings.HasPrefix(peer, "envoyproxy/ratelimit, ") {
			t.Errorf("%s is compared with %s", name, peer)
		}
	}
}
