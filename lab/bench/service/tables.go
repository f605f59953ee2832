package service

import (
	"fmt"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// Result holds the measurements.
type Result struct {
	opts    Options
	samples map[string][]sample // of all rounds, by the name of the trial
}

// goal is a goal, and the trials that it compares.
type goal struct {
	report.Goal
	trials []string
}

func (r *Result) goals() []goal {
	compare := func(what, ours, peers string, atLeast bool, bound float64, of func(sample) float64) goal {
		return goal{
			report.Goal{What: what, AtLeast: atLeast, Bound: bound, Rounds: report.RatiosBy(r.samples[ours], r.samples[peers], of)},
			[]string{ours, peers},
		}
	}
	const decisions = "decisions per CPU second of rate_limit_service ÷ envoyproxy/ratelimit: "
	const latency = "median latency of rate_limit_service ÷ envoyproxy/ratelimit: "
	return []goal{
		compare(decisions+"admitted", Admitted, peerAdmitted, true, 2, sample.perCPUSecond),
		compare(decisions+"refused", Refused, peerRefused, true, 4, sample.perCPUSecond),
		compare(latency+"admitted", Admitted, peerAdmitted, false, 1, sample.p50),
		compare(latency+"refused", Refused, peerRefused, false, 1, sample.p50),
	}
}

// Goals are the goals, with the measurements.
func (r *Result) Goals() (all []report.Goal) {
	for _, g := range r.goals() {
		all = append(all, g.Goal)
	}
	return all
}

// undecided are the names of the trials of the goals that the rounds do not decide.
func (r *Result) undecided() (those []string) {
	for _, g := range r.goals() {
		if g.Verdict() == report.Undecided {
			those = append(those, g.trials...)
		}
	}
	slices.Sort(those)
	return slices.Compact(those)
}

// Sections are the tables of the measurements, by their places in the document.
func (r *Result) Sections() map[string]string {
	setup := fmt.Sprintf("%d calls at a time over %d connections, %s clients, %d rounds of %v a trial, all in turn; where these do not decide a goal, up to %d more. Latency is at %s calls a second.\n",
		callers, connections, report.Grouped(clients), r.opts.Rounds, r.opts.Length, r.opts.More, report.Grouped(steady))
	t := report.NewTable("server", "decisions/s", "server µs", "Redis µs", "decisions per CPU second ÷ envoyproxy/ratelimit", "the same, with Redis's CPU", "calls per decision", "median ms", "99 % ms", "median ms without pauses")
	for _, name := range names {
		samples, peer := r.samples[name], r.samples[peerOf(name)]
		cell := func(format string, of func(sample) float64) string { return report.SpreadBy(samples, of).Text(format) }
		// Less time per decision is more decisions per time.
		ratio := func(of func(sample) float64) string {
			return report.SpreadOf(report.RatiosBy(peer, samples, of)).Text("%.2f")
		}
		t.Row(name, cell("%.0f", sample.perSecond), cell("%.1f", sample.ofServer), cell("%.1f", sample.ofRedis),
			ratio(sample.ofServer), ratio(sample.ofBoth), report.SpreadBy(samples, sample.ofCalls).As(report.Number),
			cell("%.2f", sample.p50), cell("%.2f", sample.p99), cell("%.2f", sample.p50AtFull))
	}
	return map[string]string{"services": setup + "\n" + t.String()}
}

// peerOf is the trial with which one is compared: that of envoyproxy/ratelimit as it is by default.
func peerOf(name string) string {
	switch name {
	case Refused, peerRefused, peerRefusedHere:
		return peerRefused
	}
	return peerAdmitted
}
