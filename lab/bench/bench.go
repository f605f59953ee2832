// Package bench measures the limiter: in Caddy against Caddy without it (package
// endtoend), and its stores against other limiters for Go (package libraries). It
// writes both into docs/evidence/benchmarks.md, with pictures.
package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/endtoend"
	"github.com/shardlimit/caddy-shardlimit/lab/bench/libraries"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

var (
	flags  = flag.NewFlagSet("bench", flag.ExitOnError)
	docs   = flags.String("docs", "", "folder of the documents to write to; none if empty")
	quick  = flags.Bool("quick", false, "measure everything once, for a moment: it shows that it runs, and no speed")
	rounds = flags.Int("rounds", 9, "rounds, of which the median counts")
	more   = flags.Int("more", 24, "most rounds to add where these do not decide a goal")
)

// Run measures.
func Run(ctx context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	if *rounds < 1 || *more < 0 {
		return errors.New("rounds must be positive, and more of them must not be negative")
	}
	if *quick && *docs != "" {
		return errors.New("-quick shows no speed: leave out -docs")
	}
	began, times := time.Now(), report.ReadTimes()
	library, caddy := libraries.Options{Rounds: *rounds, More: *more}, endtoend.Options{Rounds: *rounds, More: *more}
	if *quick {
		library = libraries.Options{Rounds: 1, More: 1, Length: 50 * time.Millisecond, Goroutines: []int{1, 64}}
		caddy = endtoend.Options{Rounds: 1, More: 1, Length: 100 * time.Millisecond, Quick: true}
	}
	m := &measured{rounds: library.Rounds, more: library.More}
	var err error
	if m.versions, err = versions(ctx); err != nil {
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
	m.took, m.stolen = time.Since(began), report.ReadTimes().StolenSince(times)
	text := m.markdown()
	fmt.Print(m.result(), "\n", text)
	pictures := m.endToEnd.Pictures()
	maps.Copy(pictures, m.libraries.Pictures())
	if *docs == "" {
		return nil
	}
	var errs []error
	for name, p := range pictures {
		errs = append(errs, p.Write(filepath.Join(*docs, "img", name)))
	}
	return errors.Join(append(errs, report.Rewrite(filepath.Join(*docs, "evidence", "benchmarks.md"), "bench", map[string]string{
		report.Result: m.result(), report.Tables: text,
	}))...)
}

// versions are the versions of the limiter, if that is known, of its environment, and of
// the other limiters.
func versions(ctx context.Context) (texts []string, err error) {
	root, err := caddyproc.Root()
	if err != nil {
		return nil, err
	}
	caddy, err := caddyproc.Version()
	if err != nil {
		return nil, err
	}
	if name := commit(ctx, root); name != "" {
		texts = append(texts, "caddy-shardlimit "+name)
	}
	texts = append(texts, runtime.Version(), "Caddy "+caddy, report.Redis(), report.Wrk())
	return append(texts, libraries.Versions()...), nil
}

// commit is the name of the commit of the repository in a folder, and whether the files
// differ from it; empty if the folder is not the root of a repository.
func commit(ctx context.Context, folder string) string {
	git := func(args ...string) (string, error) {
		// Locks would disturb other processes.
		out, err := exec.CommandContext(ctx, "git", append([]string{"--no-optional-locks", "-C", folder}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	if prefix, err := git("rev-parse", "--show-prefix"); err != nil || prefix != "" {
		return ""
	}
	name, err := git("describe", "--tags", "--always")
	changes, failed := git("status", "--porcelain")
	switch {
	case err != nil || failed != nil:
		return ""
	case changes != "":
		name += " and changes"
	}
	return name
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
	took      time.Duration
	versions  []string
	stolen    float64 // the part of the processors' time that others had
}

func (m *measured) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d processors, %s; %s. The whole took %v, during which the host gave %.0f %% of the processors' time to others. A figure in a table is the median of its rounds (with their least and most, where these differ in the digits that are written).\n",
		report.Processor(), runtime.NumCPU(), strings.Join(m.versions, ", "),
		report.Today(), m.took.Round(time.Second), 100*m.stolen)
	b.WriteString("\n## Goals\n\n" + m.howDecided() + "\n" + report.Goals(m.goals()))
	b.WriteString("\n## What the figures mean\n\n" + m.meaning())
	b.WriteString("\n## The limiter in Caddy\n\n" + m.endToEnd.Markdown())
	b.WriteString("\n## Take and other limiters\n\n" + m.libraries.Markdown())
	return b.String()
}

// howDecided explains the verdicts about the goals.
func (m *measured) howDecided() string {
	outside := func(rounds int) int { return max(report.Rank(rounds)-1, 0) }
	looks := 1 + (m.more+report.RoundsBetweenLooks-1)/report.RoundsBetweenLooks
	return fmt.Sprintf(`A goal is about the median, which a few rounds show only roughly. The table has the range of rounds that encloses the median of endless rounds of this run with a confidence of 99 %% or more at each look, whatever their distribution, as long as they do not depend on each other: of %d rounds it leaves out %d at either end, of %d rounds %d; seven or fewer have no such range. The goal is reached or missed if that range lies on one side of it. If the goal lies within, its rounds are further apart than what they are to show, and it is *%s*. Verdicts are of figures that are not rounded.

A goal that %d rounds do not decide gets %d more, of its case and of what that is compared with, and is judged anew by all of them, until it is decided or has %d. Each look can be wrong, with a chance of 0.5 %% at most that the verdict should be the other one, %.1f %% for all %d looks; so of thirty goals close to their bounds about one may have a wrong verdict. The added rounds have fewer cases beside them. Two kinds keep their first rounds: resident memory, of which each round takes a million clients, and allocations, which are nearly the same in all.
`, m.rounds, outside(m.rounds), m.rounds+m.more, outside(m.rounds+m.more), report.Undecided,
		m.rounds, min(report.RoundsBetweenLooks, m.more), m.rounds+m.more, 0.5*float64(looks), looks)
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
		verdicts[report.Reached], len(goals), verdicts[report.Missed], verdicts[report.Undecided], known.Caddy, m.endToEnd.OverFloor(endtoend.ChargeAfter), known.Primary, known.Replica)
}

func (m *measured) goals() []report.Goal {
	const what = " of the limiter's own code per request: memory store"
	goals := append(m.endToEnd.Goals(),
		report.Goal{What: "allocations" + what, Bound: 3, Rounds: m.own.allocations},
		report.Goal{What: "allocated bytes" + what, Bound: 700, Rounds: m.own.bytes})
	return append(goals, m.libraries.Goals()...)
}

const (
	busy    = 0.5 // the part of a processor's time to plan with: beyond it requests wait
	million = 1e6 // the requests a second for which the hardware is computed
)

// traffics are kinds of requests, with the names of their cases.
var traffics = []struct{ what, name string }{
	{"each client comes many times a second, to one Caddy", endtoend.ChargeAfter},
	{"each client comes every few seconds, to one Caddy", endtoend.ManyClients},
	{"each client comes for the first time", endtoend.NewClients},
	{"`charge before`, each request a take", endtoend.ChargeBefore},
	{"`batch auto`, one hot key", endtoend.BatchAuto},
	{"all are refused, to 500 clients", endtoend.Refused},
}

func (m *measured) meaning() string {
	var b strings.Builder
	l, known, seldom := m.libraries.Figures(), m.endToEnd.Cost(endtoend.ChargeAfter), m.endToEnd.SweepCost(endtoend.SweepBase)
	two, four := m.endToEnd.SweepCost(endtoend.TwoShards), m.endToEnd.SweepCost(endtoend.FourShards)
	fmt.Fprintf(&b, "**Where the limit is.** A redis-server runs scripts on one processor. `redis-benchmark`, which does nothing but send the script of a take, 30 in a pipeline, gets %s calls a second out of one here, each for %.1f µs of its time. A Take of %d callers, of which those that leave together are one call, gets %s decisions a second for %.1f µs each, which is %.0f %% of what `redis-benchmark` reached in the same rounds, though the program that asks, and the kernel, share %d processors with Redis.\n\n",
		report.Rounded(l.CeilingRate), l.CeilingServerMicros, l.Goroutines, report.Rounded(l.TakeRate), l.TakeServerMicros, 100*l.CeilingPart, runtime.NumCPU())
	fmt.Fprintf(&b, "**What a request costs.** With the Redis store and `charge after`, Caddy needs %.1f µs of CPU time for a request of a client that it knows, %.2f times as much as for one without a limiter that sends the same headers. The primary needs %.1f µs for it and the replica %.1f µs. Such a request makes %.2f calls to Redis, one of a client that comes seldom %.2f.\n\n",
		known.Caddy, m.endToEnd.OverFloor(endtoend.ChargeAfter), known.Primary, known.Replica, known.Calls, seldom.Calls)
	fmt.Fprintf(&b, "**What a shard costs, and gives.** A request of a client that comes seldom costs the servers of a single shard %.1f µs; those of two shards %.1f µs together, of which the busier shard has %.1f, and those of four %.1f µs, of which the busiest has %.1f. More shards do more work, for each of them gets shorter pipelines, and each call costs more in those; but they do it on processors of their own, and the busiest one has less. On one machine more shards serve nothing faster, which is why this page compares time and not throughput.\n\n",
		seldom.Redis, two.Redis, two.Busiest, four.Redis, four.Busiest)
	fmt.Fprintf(&b, "**A million requests a second**, computed from the table of cases, with every processor busy for half of its time. Caddy's part is all of Caddy, without TLS and with nothing behind it.\n\n")
	table := report.NewTable("requests", "processors for Caddy", "shards (a primary each)", "replicas, one a shard at least")
	for _, t := range traffics {
		c := m.endToEnd.Cost(t.name)
		shards := processors(c.Primary)
		table.Rowf("%s | %d | %d | %d", t.what, processors(c.Caddy), shards, max(shards, processors(c.Replica)))
	}
	b.WriteString(table.String())
	fmt.Fprintf(&b, "\nWhat is refused, and batches, cost Redis calls by the client and by the second, not by the request: with more clients, more Caddys or smaller limits they need more than this. How many requests a second one primary serves is in [capacity](../capacity.md#an-example); how hot keys, more Caddys and batches change that is in [scaling](scaling.md).\n")
	return b.String()
}

// processors is the number of processors for a million requests a second that cost so many
// microseconds each.
func processors(micros float64) int { return int(math.Ceil(micros / busy)) }
