package main

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/machine"
)

// head says on what it was measured.
func head() string {
	return fmt.Sprintf("%s, %d processors, %s, %s, %s. %v for each row of the first table; windows of %v in the second.\n\n",
		machine.Processor(), runtime.NumCPU(), runtime.Version(), machine.Redis(), time.Now().UTC().Format(time.DateOnly), *span, *window)
}

// singleTable is what single cases needed, as Markdown.
func singleTable(list []single) string {
	var b strings.Builder
	b.WriteString("| traffic | requests/s | replica calls per request | primary calls per request | calls per request | calls/s |\n")
	b.WriteString("|---|---|---|---|---|---|\n")
	for _, s := range list {
		rate := fmt.Sprintf("%.0f", s.perSecond(s.requests))
		if !s.isGenerated() {
			rate += fmt.Sprintf(", %d not generated", attackRate)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", s.name, rate,
			number(s.perRequest(s.replica)), number(s.perRequest(s.primary)), number(s.perRequest(s.sum())), number(s.perSecond(s.sum())))
	}
	return b.String()
}

// batchTable is what cases with batches needed, as Markdown: for a limit and a
// number of processes in one row.
func batchTable(list []*batched) string {
	var b strings.Builder
	b.WriteString("| limit | processes | `auto`: calls per request | of them leases | over the limit | afterwards | stranded % |")
	fmt.Fprintf(&b, " `limit/%d`: calls per request | over the limit | afterwards | stranded %% |\n", fixedPart)
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, auto := range list {
		if !auto.auto {
			continue
		}
		fixed := sameButFixed(list, auto)
		fmt.Fprintf(&b, "| %d | %d | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", auto.limit, auto.processes,
			steadyCell(auto, auto.steady), number(auto.leases()), heavyCell(auto), steadyCell(auto, auto.again), strandedCell(auto),
			steadyCell(fixed, fixed.steady), heavyCell(fixed), steadyCell(fixed, fixed.again), strandedCell(fixed))
	}
	return b.String()
}

func sameButFixed(list []*batched, auto *batched) *batched {
	for _, b := range list {
		if !b.auto && b.limit == auto.limit && b.processes == auto.processes {
			return b
		}
	}
	return nil
}

// notGenerated stands where there is no figure.
func notGenerated(p phase) string { return fmt.Sprintf("load not generated: %d requests", p.requests) }

func steadyCell(b *batched, p phase) string {
	if !b.isSteady(p) {
		return notGenerated(p)
	}
	return number(p.perRequest())
}

func heavyCell(b *batched) string {
	if !b.isHeavy(b.heavy) {
		return notGenerated(b.heavy)
	}
	return number(b.heavy.perRequest())
}

func strandedCell(b *batched) string {
	if !b.isHeavy(b.heavy) {
		return notGenerated(b.heavy)
	}
	return strconv.FormatFloat(100*b.stranded(), 'f', 2, 64)
}

// number writes a figure with about as many digits as mean something.
func number(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	rounded, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'e', 1, 64), 64)
	return strconv.FormatFloat(rounded, 'f', -1, 64)
}
