// Package bench measures the limiter: in Caddy against Caddy without it (package
// endtoend), its stores against other limiters for Go (package libraries), and
// rate_limit_service against envoyproxy/ratelimit (package service). It writes all
// to benchmarks.md, with a picture.
package bench

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/endtoend"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/libraries"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/service"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

var (
	flags  = flag.NewFlagSet("bench", flag.ExitOnError)
	out    = report.Out(flags)
	rounds = flags.Int("rounds", 9, "rounds, of which the median counts")
	more   = flags.Int("more", 24, "most rounds to add where these do not decide a goal")
	only   = flags.Bool("services", false, "measure rate_limit_service and envoyproxy/ratelimit alone, and write no document")
)

//go:embed benchmarks.md
var template string

// Run measures.
func Run(ctx context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	if *rounds < 1 || *more < 0 {
		return errors.New("rounds must be positive, and more of them must not be negative")
	}
	began, times := time.Now(), report.ReadTimes()
	library, caddy := libraries.Options{Rounds: *rounds, More: *more}, endtoend.Options{Rounds: *rounds, More: *more}
	services := service.Options{Rounds: *rounds, More: *more}
	if *only {
		r, err := service.Run(ctx, services, os.Stderr)
		if err == nil {
			fmt.Println(report.Goals(r.Goals()) + "\n" + r.Sections()["services"])
		}
		return err
	}
	m := &measured{rounds: library.Rounds, more: library.More}
	var err error
	if m.versions, err = versions(); err != nil {
		return err
	}
	if m.own, err = ownAllocations(ctx, library.Rounds); err != nil {
		return err
	}
	if m.endToEnd, err = endtoend.Run(ctx, caddy, os.Stderr); err != nil {
		return fmt.Errorf("measure the limiter in Caddy: %w", err)
	}
	if m.libraries, err = libraries.Run(ctx, library, os.Stderr); err != nil {
		return fmt.Errorf("measure the stores: %w", err)
	}
	if m.services, err = service.Run(ctx, services, os.Stderr); err != nil {
		return fmt.Errorf("measure the rate limit services: %w", err)
	}
	m.took, m.stolen = time.Since(began), report.ReadTimes().StolenSince(times)
	sections := m.sections()
	text, err := report.Fill(template, sections)
	if fmt.Print(text); err != nil {
		return err
	}
	return report.Write(*out, "benchmarks.md", template, sections, map[string]fmt.Stringer{"bench-caddy.svg": m.endToEnd.Picture()})
}

// versions are those of Caddy and of the other limiters.
func versions() ([]string, error) {
	caddy, err := caddyproc.Version()
	if err != nil {
		return nil, err
	}
	return append([]string{"Caddy " + caddy}, libraries.Versions()...), nil
}

var ownFigures = regexp.MustCompile(`(?m)^BenchmarkHandler/own_allocations\S*\s.*?\s([0-9.]+) own-B/op\s+([0-9.]+) own-allocs/op`)

// own is what the limiter's own code allocates for an allowed request on the memory store,
// by round of BenchmarkHandler.
type own struct{ allocations, bytes []float64 }

func ownAllocations(ctx context.Context, rounds int) (o own, err error) {
	root, err := caddyproc.Root()
	if err != nil {
		return o, err
	}
	test := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "BenchmarkHandler/own", "-benchtime", "1x", "-count", strconv.Itoa(rounds), ".")
	test.Dir, test.Stderr = root, os.Stderr
	out, err := test.Output()
	if err != nil {
		return o, fmt.Errorf("run BenchmarkHandler: %w: %s", err, out)
	}
	if o, err = readOwnAllocations(out); err == nil && len(o.allocations) != rounds {
		err = fmt.Errorf("BenchmarkHandler reports %d rounds, want %d: %s", len(o.allocations), rounds, out)
	}
	return o, err
}

func readOwnAllocations(out []byte) (o own, err error) {
	for _, match := range ownFigures.FindAllSubmatch(out, -1) {
		for i, into := range []*[]float64{&o.bytes, &o.allocations} {
			each, err := strconv.ParseFloat(string(match[1+i]), 64)
			if err != nil {
				return o, fmt.Errorf("read the output of BenchmarkHandler: %w", err)
			}
			*into = append(*into, each)
		}
	}
	return o, nil
}

type measured struct {
	rounds    int // of all figures
	more      int // most rounds that are added where these do not decide a goal
	own       own
	endToEnd  *endtoend.Result
	libraries *libraries.Result
	services  *service.Result
	took      time.Duration
	versions  []string
	stolen    float64 // the part of the processors' time that others had
}

// sections are the parts of the document.
func (m *measured) sections() map[string]string {
	all := m.endToEnd.Sections()
	maps.Copy(all, m.libraries.Sections())
	maps.Copy(all, m.services.Sections())
	all["machine"] = fmt.Sprintf("%s. The whole took %v, during which the host gave %.0f %% of the processors' time to others",
		report.Machine(m.versions...), m.took.Round(time.Second), 100*m.stolen)
	all["result"], all["goals"], all["decided"] = m.result(), report.Goals(m.goals()), m.howDecided()
	return all
}

// howDecided explains the verdicts about the goals.
func (m *measured) howDecided() string {
	outside := func(rounds int) int { return max(report.Rank(rounds)-1, 0) }
	looks := 1 + (m.more+report.RoundsBetweenLooks-1)/report.RoundsBetweenLooks
	return fmt.Sprintf("Of %d rounds that range leaves out %d at either end, of %d rounds %d; seven or fewer have none. A goal that %d rounds do not decide gets %d more, of its case and of what that is compared with, and is judged anew by all of them, until it is decided or has %d. Each look can be wrong, with a chance of 0.5 %% at most that the verdict should be the other one, %.1f %% for all %d looks.\n",
		m.rounds, outside(m.rounds), m.rounds+m.more, outside(m.rounds+m.more), m.rounds, min(report.RoundsBetweenLooks, m.more), m.rounds+m.more, 0.5*float64(looks), looks)
}

// result is the summary of the document.
func (m *measured) result() string {
	goals := m.goals()
	verdicts := map[report.Verdict]int{}
	for i := range goals {
		verdicts[goals[i].Verdict()]++
	}
	known := m.endToEnd.Cost(endtoend.ChargeAfter)
	return fmt.Sprintf("**Result.** %d of %d goals were reached, and %d missed; the rounds do not decide %d. With the Redis store and `charge after`, a request of a client that Caddy knows takes %.1f µs of CPU time in Caddy, %.2f times as much as one without a limiter in the same rounds, %.1f µs in the primary and %.1f µs in the replica.\n",
		verdicts[report.Reached], len(goals), verdicts[report.Missed], verdicts[report.Undecided], known.Caddy, known.OverFloor, known.Primary, known.Replica)
}

func (m *measured) goals() []report.Goal {
	const what = " of the limiter's own code per request: memory store"
	goals := append(m.endToEnd.Goals(),
		report.Goal{What: "allocations" + what, Bound: 3, Rounds: m.own.allocations},
		report.Goal{What: "allocated bytes" + what, Bound: 700, Rounds: m.own.bytes})
	return slices.Concat(goals, m.libraries.Goals(), m.services.Goals())
}
