// Package report writes the results of the laboratory: it formats tables and figures as
// Markdown, puts them into documents, describes the machine, reads figures from the
// output of programs, sums up several rounds as a Spread, and judges Goals by their
// rounds. The package is independent of the measurements.
package report

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Mark is the line before a section that a make target writes.
func Mark(target, section string) string {
	return "<!-- what follows is written by make " + target + ", " + section + " -->\n"
}

// EndMark is the line after each section that a make target writes.
func EndMark(target string) string { return "<!-- end of what make " + target + " writes -->\n" }

// The sections of most documents: the summary's result, and all tables.
const (
	Result = "result"
	Tables = "tables"
)

// Only adds the flag -only: what is tried, and then no document is written; all by default.
func Only(flags *flag.FlagSet, example string) *regexp.Regexp {
	only := new(regexp.Regexp)
	flags.TextVar(only, "only", regexp.MustCompile(""), "try the cells that match this expression, such as '"+example+"', and write no document")
	return only
}

// Out is the flag that names the folder of what a program writes.
func Out(flags *flag.FlagSet) *string {
	return flags.String("out", "../dist/evidence", "folder to write the tables and pictures to")
}

// Fill puts the sections into a template, in which {{name}} stands for the section of that
// name. Each has its place once.
func Fill(template string, sections map[string]string) (string, error) {
	if err := CheckPlaces(template, sections); err != nil {
		return "", err
	}
	text := template
	for name, section := range sections {
		text = strings.Replace(text, placeOf(name), strings.TrimSuffix(section, "\n"), 1)
	}
	if _, place, found := strings.Cut(text, "{{"); found {
		return "", fmt.Errorf("there is no section {{%.20s", place)
	}
	return text, nil
}

// CheckPlaces reports as an error that some section does not have one place in a template.
func CheckPlaces(template string, sections map[string]string) error {
	for name := range sections {
		if strings.Count(template, placeOf(name)) != 1 {
			return fmt.Errorf("a template has not one %s", placeOf(name))
		}
	}
	return nil
}

func placeOf(section string) string { return "{{" + section + "}}" }

// Write writes a document, filled in, and its pictures into a folder, which it makes.
func Write(folder, document, template string, sections map[string]string, pictures map[string]fmt.Stringer) error {
	text, err := Fill(template, sections)
	if err != nil {
		return fmt.Errorf("write %s: %w", document, err)
	}
	err = os.MkdirAll(folder, 0o755)
	write := func(name, text string) {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644))
	}
	write(document, text)
	for name, p := range pictures {
		write(name, p.String())
	}
	return err
}

// Rewrite replaces the sections of a file, each between its mark and the next end mark.
func Rewrite(file, target string, sections map[string]string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the document: %w", err)
	}
	text := string(old)
	for name, section := range sections {
		mark, end := Mark(target, name), EndMark(target)
		head, rest, started := strings.Cut(text, mark)
		_, tail, ended := strings.Cut(rest, end)
		if !started || !ended {
			return fmt.Errorf("%s lacks the line %q, or %q after it", file, mark, end)
		}
		text = head + mark + "\n" + section + "\n" + end + tail
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write the document: %w", err)
	}
	return nil
}

// Table is a table in Markdown.
type Table struct{ strings.Builder }

// NewTable begins one with the heads of its columns.
func NewTable(columns ...string) *Table {
	t := new(Table)
	t.Row(columns...)
	t.WriteString("|" + strings.Repeat("---|", len(columns)) + "\n")
	return t
}

// Row writes a row.
func (t *Table) Row(cells ...string) { t.WriteString("| " + strings.Join(cells, " | ") + " |\n") }

// Rowf writes a row whose cells are formatted one by one.
func (t *Table) Rowf(format string, args ...any) {
	fmt.Fprintf(t, "| "+format+" |\n", args...)
}

// Figure returns the number in the first group of an expression's first match.
func Figure(text []byte, expression *regexp.Regexp) (float64, error) {
	found := expression.FindSubmatch(text)
	if found == nil {
		return 0, fmt.Errorf("no match of %s in %.200q", expression, text)
	}
	return strconv.ParseFloat(string(found[1]), 64)
}

// Grouped writes a number without its fraction, with commas.
func Grouped(v float64) string {
	text := strconv.FormatFloat(math.Round(v), 'f', 0, 64)
	for at := len(text) - 3; at > 0; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

// Rounded writes a number like Grouped, rounded to three digits.
func Rounded(v float64) string {
	unit := math.Pow(10, max(math.Floor(math.Log10(max(v, 1)))-2, 0))
	return Grouped(math.Round(v/unit) * unit)
}

// Digits writes a number with two significant digits.
func Digits(v float64) string {
	rounded, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'e', 1, 64), 64)
	return strconv.FormatFloat(rounded, 'f', -1, 64)
}

// Number writes a number with two digits after the point, or two significant ones if it is
// small, or without its fraction if it is large.
func Number(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 0.995:
		return strconv.FormatFloat(v, 'f', 2, 64)
	default:
		return Digits(v)
	}
}

// Machine describes the machine, the commit, versions, and the date.
func Machine(versions ...string) string {
	parts := []string{processor(), fmt.Sprintf("%d processors", runtime.NumCPU())}
	if name := commit(context.Background(), ".."); name != "" {
		parts = append(parts, "caddy-shardlimit "+name)
	}
	parts = append(append(parts, runtime.Version(), redisVersion()), versions...)
	return strings.Join(append(parts, time.Now().UTC().Format(time.DateOnly)), ", ")
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

// processor is the name of the processor, or "unknown processor".
func processor() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.TrimSpace(strings.TrimLeft(name, "\t :"))
		}
	}
	return "unknown processor"
}

// redisVersion is the version of redis-server, such as "Redis 7.0.15".
func redisVersion() string {
	b, err := exec.Command("redis-server", "--version").Output()
	fields := strings.Fields(string(b))
	if err != nil || len(fields) < 3 {
		return "unknown Redis"
	}
	return "Redis " + strings.TrimPrefix(fields[2], "v=")
}

// Times is the time of the processors since they started, in an unknown unit.
type Times struct{ all, stolen int64 }

// ReadTimes reads them. Where the system has none, they are zero.
func ReadTimes() Times {
	b, _ := os.ReadFile("/proc/stat")
	return parseTimes(string(b))
}

// parseTimes reads the line of all processors: user, nice, system, idle, iowait, irq,
// softirq, steal. The fields after these are part of user.
func parseTimes(stat string) (t Times) {
	var name string
	var n [8]int64
	_, err := fmt.Sscan(stat, &name, &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &n[7])
	if err != nil || name != "cpu" {
		return Times{}
	}
	for _, part := range n {
		t.all += part
	}
	t.stolen = n[7]
	return t
}

// StolenSince is the share of the time since an earlier reading that the host of this
// virtual machine gave to others.
func (t Times) StolenSince(before Times) float64 {
	all := t.all - before.all
	if all <= 0 {
		return 0
	}
	return float64(t.stolen-before.stolen) / float64(all)
}

// Spread sums up the values of one figure in several rounds.
type Spread struct{ Median, Least, Most float64 }

// SpreadOf returns the spread of values, or zero if there are none.
func SpreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return Spread{Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Least: sorted[0], Most: sorted[n-1]}
}

// SpreadBy returns the spread of one figure of the rounds.
func SpreadBy[T any](rounds []T, of func(T) float64) Spread { return SpreadOf(ValuesBy(rounds, of)) }

// ValuesBy returns one figure of the rounds.
func ValuesBy[T any](rounds []T, of func(T) float64) []float64 {
	values := make([]float64, len(rounds))
	for i, r := range rounds {
		values[i] = of(r)
	}
	return values
}

// RatiosBy returns one figure of the rounds, relative to that of others in the same round,
// of the rounds that there are of both.
func RatiosBy[T any](rounds, others []T, of func(T) float64) []float64 {
	values := make([]float64, min(len(rounds), len(others)))
	for i := range values {
		values[i] = of(rounds[i]) / of(others[i])
	}
	return values
}

// confidence is the least of an Interval. It is as high as this because rounds are looked at
// repeatedly, and each look can be wrong.
const confidence = 0.99

// RoundsBetweenLooks is how many rounds AddRounds adds before it looks at them again.
const RoundsBetweenLooks = 6

// AddRounds measures more rounds, at most that many, of what undecided returns. It asks for
// that anew every few rounds, and ends when there is nothing left. What undecided returns
// must only become fewer: figures are paired by the place of their rounds.
func AddRounds[T any](most int, undecided func() []T, measure func(round int, those []T) error) error {
	var those []T
	for round := range most {
		if round%RoundsBetweenLooks == 0 {
			those = undecided()
		}
		if len(those) == 0 {
			return nil
		}
		if err := measure(round, those); err != nil {
			return err
		}
	}
	return nil
}

// Rank returns the largest k for which the k-th smallest and the k-th largest of n values
// enclose the median of their distribution with a confidence of 99 % or more; 0 if n
// values are too few for that. It assumes that the values are independent, and nothing
// about the distribution: how many of them lie below its median is as with coins.
func Rank(n int) (k int) {
	// The probabilities that k of n coins show heads, and that at most k show heads or tails.
	exactly, outside := math.Pow(0.5, float64(n)), 0.0
	for k < n/2 {
		if outside += 2 * exactly; outside > 1-confidence {
			break
		}
		exactly *= float64(n-k) / float64(k+1)
		k++
	}
	return k
}

// Interval returns the values of Rank; it is not ok if there are too few.
func Interval(values []float64) (low, high float64, ok bool) {
	n, k := len(values), Rank(len(values))
	if k == 0 {
		return 0, 0, false
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[k-1], sorted[n-k], true
}

// Text writes it with a format such as %.2f.
func (s Spread) Text(format string) string {
	return s.As(func(f float64) string { return fmt.Sprintf(format, f) })
}

// As writes it as "median (min to max)", or as the median alone if all three have the
// same text.
func (s Spread) As(write func(float64) string) string {
	median, least, most := write(s.Median), write(s.Least), write(s.Most)
	if least == most {
		return median
	}
	return median + " (" + least + " to " + most + ")"
}

// Goal is a bound for a figure, and its measured values.
type Goal struct {
	What    string
	AtLeast bool // set if Bound is a lower bound, not an upper one
	Bound   float64
	Rounds  []float64 // the measured values
}

// Verdict is what the rounds show about a goal, as the table says it.
type Verdict string

// The verdicts. A goal is undecided if it lies within the Interval of its rounds.
const (
	Reached   Verdict = "yes"
	Missed    Verdict = "**no**"
	Undecided Verdict = "not decided"
)

// Verdict judges the goal.
func (g *Goal) Verdict() Verdict {
	low, high, ok := Interval(g.Rounds)
	bound := g.Bound
	if g.AtLeast {
		low, high, bound = -high, -low, -bound
	}
	switch {
	case ok && high <= bound:
		return Reached
	case ok && low > bound:
		return Missed
	default:
		return Undecided
	}
}

// Goals is a table of goals.
func Goals(goals []Goal) string {
	t := NewTable("what", "goal", "measured: median (min to max)", "rounds", "the median is within", "reached")
	for i := range goals {
		g := &goals[i]
		sign, within := "≤", ""
		if g.AtLeast {
			sign = "≥"
		}
		if low, high, ok := Interval(g.Rounds); ok {
			within = beside(g.Bound, low) + " to " + beside(g.Bound, high)
		}
		t.Row(g.What, sign+" "+number(g.Bound), SpreadOf(g.Rounds).As(number),
			strconv.Itoa(len(g.Rounds)), within, string(g.Verdict()))
	}
	return t.String()
}

// beside writes f with as many digits as show on which side of the bound it lies.
func beside(bound, f float64) string {
	text, same := number(f), number(bound)
	for digits := 3; text == same && f != bound; digits++ {
		text, same = strconv.FormatFloat(f, 'f', digits, 64), strconv.FormatFloat(bound, 'f', digits, 64)
	}
	return text
}

func number(f float64) string {
	switch {
	case f != 0 && math.Abs(f) < 0.005:
		return fmt.Sprintf("%.5f", f)
	case math.Abs(f) < 10:
		return fmt.Sprintf("%.2f", f)
	case math.Abs(f) < 1000:
		return fmt.Sprintf("%.1f", f)
	default:
		return fmt.Sprintf("%.0f", f)
	}
}
