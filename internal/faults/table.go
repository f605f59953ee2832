package main

import (
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/machine"
)

// report is what the document says of outcomes.
func report(set settings, list []*outcome) string {
	return head(set) + responseTable(list) + "\n" + countTable(list) + notes(list)
}

// head says on what it was measured, and how.
func head(set settings) string {
	return fmt.Sprintf("%s, %d processors, %s, %s, %s. `check_timeout %v`; faults that do not end by themselves last %v.\n\n",
		machine.Processor(), runtime.NumCPU(), runtime.Version(), machine.Redis(), time.Now().UTC().Format(time.DateOnly),
		set.checkTimeout, set.during)
}

// responseTable is what clients saw.
func responseTable(list []*outcome) string {
	var b strings.Builder
	b.WriteString("| fault | on_error, charge | before | during | after | added to the median | to the 99.9th percentile | normal after |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|\n")
	for _, o := range list {
		fmt.Fprintf(&b, "| %s | %s%s | %s | %s | %s | %s | %s | %s |\n", o.fault.name, o.policy(), o.marks(),
			o.statuses(earlier), o.statuses(meanwhile), o.statuses(afterwards),
			milliseconds(o.added(0.5)), milliseconds(o.added(0.999)), seconds(o.normalAfter))
	}
	return b.String()
}

// countTable is what Redis held.
func countTable(list []*outcome) string {
	var b strings.Builder
	b.WriteString("| fault | on_error, charge | served | counted beyond that | of one client | uncertain | lost | expired | equal after |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for _, o := range list {
		least, most := o.extremes()
		of := o.metrics.undelivered[faulty]
		fmt.Fprintf(&b, "| %s | %s%s | %d | %d | %s | %d | %d | %d | %s |\n", o.fault.name, o.policy(), o.marks(),
			served(o.concerned()), -o.missing(), span(least, most), of["uncertain"], of["lost"], of["expired"], seconds(o.equalAfter))
	}
	return b.String()
}

// marks refer to the known deviations that were seen.
func (o *outcome) marks() string {
	var numbers []string
	for _, n := range o.known() {
		numbers = append(numbers, strconv.Itoa(n))
	}
	if len(numbers) == 0 {
		return ""
	}
	return " [" + strings.Join(numbers, ", ") + "]"
}

// notes are the known deviations that were seen.
func notes(list []*outcome) string {
	var text string
	for i, d := range deviations {
		if slices.ContainsFunc(list, func(o *outcome) bool { return slices.Contains(o.known(), i+1) }) {
			text += fmt.Sprintf("\n[%d] Other than promised: %s\n", i+1, d.text)
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

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%+.1f ms", float64(d.Microseconds())/1000)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }
