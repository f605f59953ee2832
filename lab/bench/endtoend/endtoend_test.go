package endtoend

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// TestRunMeasuresAll requires that a run, however short, has figures in all rows.
func TestRunMeasuresAll(t *testing.T) {
	var r *Result
	err := errors.New("not run")
	// The slower the machine, the longer a case has to run until its figures mean something.
	for length := 100 * time.Millisecond; length < 2*time.Second && err != nil; length *= 4 {
		r, err = Run(t.Context(), Options{Rounds: 1, More: 1, Length: length, Quick: true}, io.Discard)
		redistest.Must(t, err)
		err = checkFigures(r)
	}
	sections := r.Sections()
	text := strings.Join(slices.Collect(maps.Values(sections)), "\n")
	t.Log("\n" + text)
	template, failed := os.ReadFile("../benchmarks.md")
	redistest.Must(t, errors.Join(err, failed, report.CheckPlaces(string(template), sections)))
	rows := map[string]int{}
	for line := range strings.Lines(text) {
		if cells := strings.Split(line, " | "); len(cells) > 1 {
			rows[strings.TrimPrefix(cells[0], "| ")]++
			for _, cell := range cells[1:] {
				if strings.Contains(cell, "NaN") || strings.Contains(cell, "Inf") {
					t.Errorf("no figure: %s", line)
				}
			}
		}
	}
	for _, c := range r.baseCases {
		if rows[c.name] == 0 {
			t.Errorf("there is no row %q", c.name)
		}
	}
	// A single round decides no goal, so one was added for each.
	for _, g := range r.goals() {
		want := 2
		if len(g.cases) == 0 {
			want = 1
		}
		if len(g.Rounds) != want {
			t.Errorf("%s has %d rounds, want %d", g.What, len(g.Rounds), want)
		}
	}
	if n := len(r.cases["respond"]); n != 1 {
		t.Errorf("a case without a goal has %d rounds", n)
	}
	if rows[ManyClients] == 0 || rows[countingName(clients)] != 1 || rows[countingName(manyClients)] != 1 || rows[pacingName(clients)] != 1 || rows[pacingName(manyClients)] != 1 || len(r.delays) != len(delayClients)*(len(chargeDelays)+1) {
		t.Errorf("%d rows of returning clients, %d and %d of the calibration, %d cases in the sweep of charge_delay", rows[ManyClients], rows[countingName(clients)], rows[countingName(manyClients)], len(r.delays))
	}
	for _, row := range sweepRows(&r.opts) {
		if rows[row.factor] == 0 || len(r.sweep[row.name]) != 1 {
			t.Errorf("there is no sample of %q", row.name)
		}
	}
	for _, row := range factorRows(&r.opts) {
		if rows[row.title()] == 0 || len(r.latency[row.name]) != 1 {
			t.Errorf("there is no latency of %q", row.title())
		}
		if got, all := r.latency[row.name][0], r.latency[SweepBase][0]; got.rate != all.rate || got.floor != all.floor {
			t.Errorf("%s has another rate or floor than the base", row.title())
		}
	}
	for _, name := range latencyCases {
		if rows[name] < 2 || len(r.latency[name]) != 1 {
			t.Errorf("there is no latency of %q", name)
		}
	}
	if picture := r.Picture().String(); !strings.Contains(picture, ">"+ManyClients+"<") {
		t.Errorf("the picture is not of the cases: %s", picture)
	}
}

// TestCountKeepsPace counts no faster than the case whose pace it keeps.
func TestCountKeepsPace(t *testing.T) {
	server := redistest.Start(t)
	c := &endpoint{status: 200, keys: 10, direct: server.Client(), paceOf: &endpoint{rate: 1000}}
	got, err := c.count(t.Context(), 200*time.Millisecond)
	redistest.Must(t, err)
	if most := 1000*got.Elapsed.Seconds() + calibrationLength; got.Requests == 0 || float64(got.Requests) > most {
		t.Errorf("%d requests in %v, at most %.0f may be", got.Requests, got.Elapsed, most)
	}
}

// checkFigures returns an error for each implausible figure.
func checkFigures(r *Result) (err error) {
	complain := func(format string, args ...any) { err = errors.Join(err, fmt.Errorf(format, args...)) }
	known, counted := r.Cost(ChargeAfter), r.Cost(countingName(clients))
	swept := func(name string) sample { return r.sweep[name][0] }
	for what, figure := range map[string]float64{
		"CPU of the floor": r.Cost(Floor).Caddy, "CPU of the limiter": known.Caddy, "CPU of the primary": known.Primary,
		"CPU of the replica": known.Replica, "requests/s": r.cases[ChargeAfter][0].rate,
		"CPU of the primary that counts": counted.Primary, "CPU of the replica that counts": counted.Replica,
		"CPU of a shard": swept(SweepBase).redis(), "CPU of one of two shards": swept(TwoShards).busiest, "CPU of four shards": swept(FourShards).redis(), "CPU of the limiter, relative to the floor": known.OverFloor,
	} {
		if figure <= 0 {
			complain("%s is %v", what, figure)
		}
	}
	within := func(what string, least, most, got float64) {
		if got < least || got > most {
			complain("%s: %v, want %v to %v", what, got, least, most)
		}
	}
	if len(r.resident) != 1 {
		complain("one round has measured %v", r.resident)
	}
	calls := func(s samples, name string) float64 { return s[name][0].calls }
	within("calls without a limiter", 0, 0.01, calls(r.cases, Floor))
	within("calls of the memory store", 0, 0.01, calls(r.cases, memoryStore))
	// A take; on a busy machine some have no reply in time, and are settled by another call.
	within("calls of charge before", 0.9, 1.5, calls(r.cases, ChargeBefore))
	within("calls of a refused key", 0, 0.1, calls(r.cases, refusedHot))
	// A check and a charge; on a slow machine each client comes once, and a charge that
	// finds no window reads its bucket twice.
	within("calls of a client that comes seldom", 0.9, 3.2, swept(SweepBase).calls)
	if one, three := calls(r.sweep, SweepBase), calls(r.sweep, "3 zones"); three < 2*one {
		complain("three zones cost %v calls, and one %v", three, one)
	}
	if s := r.sweep["4 shards"][0]; s.busiest > 0.7*s.redis() {
		complain("of four shards one needs %v µs, and all %v µs", s.busiest, s.redis())
	}
	for i, d := range roundTrips {
		if got := r.pings[i+1]; got.Least < milliseconds(d) {
			complain("at %v a ping takes %v ms", d, got)
		}
	}
	if far := r.latency[beforeName(5*time.Millisecond)][0]; far.limiter < 5 {
		complain("with Redis 5 ms away half of the requests take less than %v ms", far.limiter)
	}
	goals := r.Goals()
	if len(goals) != 11 {
		complain("there are %d goals", len(goals))
	}
	for _, g := range goals {
		if g.Bound <= 0 || g.What == "" || len(g.Rounds) == 0 || slices.ContainsFunc(g.Rounds, math.IsNaN) {
			complain("odd goal: %+v", g)
		}
	}
	return err
}

// TestRunTellsWhatIsMissing: what was started until then is stopped.
func TestRunTellsWhatIsMissing(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "caddy")
	if _, err := Run(t.Context(), Options{Quick: true, Caddy: missing}, io.Discard); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("a Caddy that is not there: %v", err)
	}
}
