package faults

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// figures are what the tables show of an outcome.
type figures struct {
	cell
	during, after           share
	added, addedMost        time.Duration // to the median, and to the 99.9th percentile
	normalAfter, equalAfter time.Duration
	served, beyond          int64 // beyond is what is counted beyond that
	least, most             int64 // the same of one client
	uncertain, lost         int64 // charges; lost includes those that expired
	deviations              []int
}

// share is the responses of a phase, and those that the store did not decide.
type share struct {
	all       int
	undecided int            // according to on_error
	wrong     map[string]int // by kind
}

func (o *outcome) figures() figures {
	f := figures{
		cell: o.cell, during: o.share(meanwhile), after: o.share(afterwards), added: o.added(0.5), addedMost: o.added(0.999),
		normalAfter: o.normalAfter, equalAfter: o.equalAfter, served: served(o.concerned()), beyond: -o.missing(), deviations: o.known(),
	}
	f.least, f.most = o.extremes()
	of := o.metrics.undelivered[faulty]
	f.uncertain, f.lost = of["uncertain"], of["lost"]+of["expired"]
	return f
}

func allFigures(list []*outcome) (all []figures) {
	for _, o := range list {
		all = append(all, o.figures())
	}
	return all
}

// kinds are those of responses according to on_error, as describe names them.
var kinds = map[string]string{allow: "200 unchecked", deny: "503"}

func (o *outcome) share(p phase) share {
	s := share{wrong: map[string]int{}}
	for _, c := range o.concerned() {
		for _, r := range o.seen(c, p) {
			s.all++
			switch {
			case o.isNormal(c, &r):
			case o.isLocal(c, &r) || kindOf(&r) == kinds[o.onError]:
				s.undecided++
			default:
				s.wrong[kindOf(&r)]++
			}
		}
	}
	return s
}

func (s share) add(o share) share {
	sum := share{s.all + o.all, s.undecided + o.undecided, maps.Clone(s.wrong)}
	for kind, n := range o.wrong {
		sum.wrong[kind] += n
	}
	return sum
}

func (s share) isDecided() bool { return s.undecided == 0 && len(s.wrong) == 0 }

// outliers are emphasized.
func (s share) outliers() (text string) {
	for _, kind := range slices.Sorted(maps.Keys(s.wrong)) {
		text += fmt.Sprintf(", **%d × %s**", s.wrong[kind], kind)
	}
	return text
}

func document(set settings, list []*outcome) map[string]string {
	all, broken := allFigures(list), 0
	for _, o := range list {
		broken += len(o.unknown())
	}
	head := fmt.Sprintf("%s. `check_timeout %v`; faults that do not end by themselves last %v.\n\n", report.Machine(), set.checkTimeout, set.during)
	return map[string]string{
		report.Result: resultText(all, broken),
		report.Tables: head + responseTable(all) + "\n" + countTable(all) + notes(all),
	}
}

// resultText is the summary of the document.
func resultText(all []figures, broken int) string {
	unnoticed, noticed := 0, byFault(all, func(f figures) bool { return !f.during.add(f.after).isDecided() })
	longest, owed := time.Duration(0), time.Duration(0)
	for _, name := range names(all) {
		if !noticed[name] {
			unnoticed++
		}
	}
	for _, f := range all {
		longest, owed = max(longest, f.normalAfter), max(owed, f.equalAfter)
	}
	text := "no promise was broken"
	if broken > 0 {
		text = fmt.Sprintf("promises were broken %d times", broken)
	}
	if notes(all) != "" {
		text += ", not counting the known deviation below the tables"
	}
	return fmt.Sprintf("**Result.** In %d experiments with %d faults %s. During %d of the faults the store went on to decide every request. After the others it decided all requests again within %s, and all charges that waited were counted within %s.\n",
		len(all), len(names(all)), text, unnoticed, seconds(longest), seconds(owed))
}

// names are the names of the faults, in order.
func names(all []figures) (list []string) {
	for _, f := range all {
		if !slices.Contains(list, f.fault.name) {
			list = append(list, f.fault.name)
		}
	}
	return list
}

// byFault reports of which faults some figures are so.
func byFault(all []figures, is func(figures) bool) map[string]bool {
	found := map[string]bool{}
	for _, f := range all {
		found[f.fault.name] = found[f.fault.name] || is(f)
	}
	return found
}

// rows returns the figures of each fault and charge.
func rows(all []figures) (list [][]figures) {
	for _, f := range all {
		last := len(list) - 1
		if last >= 0 && list[last][0].fault.name == f.fault.name && list[last][0].charge == f.charge {
			list[last] = append(list[last], f)
		} else {
			list = append(list, []figures{f})
		}
	}
	return list
}

// responseTable has a row for each fault and charge.
func responseTable(all []figures) string {
	t := report.NewTable("fault", "charge", "unchecked (`allow`)", "503 (`deny`)", "counted locally (`local`)", "normal after", "added to the median", "to the 99.9th percentile")
	for _, row := range rows(all) {
		line := []string{row[0].fault.name, row[0].charge}
		for _, onError := range []string{allow, deny, local} {
			text := ""
			for _, f := range row {
				if f.onError == onError {
					text = f.responses()
				}
			}
			line = append(line, text)
		}
		t.Row(append(line, spanOf(row, func(f figures) time.Duration { return f.normalAfter }, seconds),
			spanOf(row, func(f figures) time.Duration { return f.added }, milliseconds),
			spanOf(row, func(f figures) time.Duration { return f.addedMost }, milliseconds))...)
	}
	return t.String()
}

// responses describes the responses during and after the fault.
func (f figures) responses() string {
	text := fmt.Sprintf("%d of %d", f.during.undecided, f.during.all)
	if f.onError == local && f.fault.loses != nothing {
		text = fmt.Sprintf("? of %d", f.during.all)
	}
	if f.after.undecided > 0 {
		text += fmt.Sprintf(", then %d", f.after.undecided)
	}
	text += f.during.outliers() + f.after.outliers()
	for _, n := range f.deviations {
		text += fmt.Sprintf(" [%d]", n)
	}
	return text
}

// countTable has a row for each fault and charge. Where the policies differ, they are in
// the order of the other table.
func countTable(all []figures) string {
	t := report.NewTable("fault", "charge", "served", "counted beyond that", "of one client", "uncertain", "lost or expired", "equal after")
	for _, row := range rows(all) {
		each := func(of func(figures) string) string {
			texts := make([]string, len(row))
			for i, f := range row {
				texts[i] = of(f)
			}
			if len(slices.Compact(slices.Clone(texts))) == 1 {
				return texts[0]
			}
			return strings.Join(texts, " / ")
		}
		t.Row(row[0].fault.name, row[0].charge,
			each(func(f figures) string { return fmt.Sprint(f.served) }), each(func(f figures) string { return fmt.Sprint(f.beyond) }),
			each(func(f figures) string { return span(f.least, f.most) }), each(func(f figures) string { return fmt.Sprint(f.uncertain) }),
			each(func(f figures) string { return fmt.Sprint(f.lost) }),
			spanOf(row, func(f figures) time.Duration { return f.equalAfter }, seconds))
	}
	return t.String()
}

func notes(all []figures) string {
	var text string
	for i, d := range deviations {
		if slices.ContainsFunc(all, func(f figures) bool { return slices.Contains(f.deviations, i+1) }) {
			text += fmt.Sprintf("\n[%d] Known deviation: %s\n", i+1, d.text)
		}
	}
	return text
}

// span writes two numbers, or one if they are the same.
func span(least, most int64) string {
	if least == most {
		return strconv.FormatInt(least, 10)
	}
	return fmt.Sprintf("%d to %d", least, most)
}

// spanOf writes the least and the most of a duration, or one text if they are the same. The
// unit comes last.
func spanOf(row []figures, of func(figures) time.Duration, write func(time.Duration) string) string {
	values := make([]time.Duration, len(row))
	for i, f := range row {
		values[i] = of(f)
	}
	least, most := write(slices.Min(values)), write(slices.Max(values))
	if least == most {
		return most
	}
	number, _, _ := strings.Cut(least, " ")
	return number + " to " + most
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%+.1f ms", float64(d.Microseconds())/1000)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// draw shows, of the faults that requests noticed, which part of the responses the store
// did not decide. It leaves out local counts, which are not always known as such.
func draw(all []figures) *picture.Picture {
	noticed := byFault(all, func(f figures) bool { return !f.during.isDecided() })
	sets := []picture.Set{{Name: after}, {Name: before}}
	for i := range sets {
		for _, name := range names(all) {
			if !noticed[name] {
				continue
			}
			var sum share
			sum.wrong = map[string]int{}
			for _, f := range all {
				if f.fault.name == name && f.charge == sets[i].Name && f.onError != local {
					sum = sum.add(f.during)
				}
			}
			v := 100 * float64(sum.undecided) / float64(max(sum.all, 1))
			sets[i].Bars = append(sets[i].Bars, picture.Exactly(name, v))
		}
	}
	return picture.Sets("Responses during a fault that the store did not decide", "%, by charge", sets...)
}
