package calls

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// batchTable has a row for each limit and number of processes.
func batchTable(list []*batched) string {
	t := report.NewTable("limit", "processes", "`auto`: calls per request", "of them leases", "over the limit", "afterwards", "stranded %",
		fmt.Sprintf("`limit/%d`: calls per request", fixedPart), "over the limit", "afterwards", "stranded %")
	for _, auto := range list {
		if !auto.auto {
			continue
		}
		fixed := list[slices.IndexFunc(list, func(b *batched) bool {
			return !b.auto && b.limit == auto.limit && b.processes == auto.processes
		})]
		t.Row(fmt.Sprint(auto.limit), fmt.Sprint(auto.processes),
			steadyCell(auto, auto.steady), report.Number(auto.leases()), heavyCell(auto), steadyCell(auto, auto.again), strandedCell(auto),
			steadyCell(fixed, fixed.steady), heavyCell(fixed), steadyCell(fixed, fixed.again), strandedCell(fixed))
	}
	return t.String()
}

func notGenerated(p phase) string { return fmt.Sprintf("load not generated: %d requests", p.requests) }

func steadyCell(b *batched, p phase) string {
	if !b.isSteady(p) {
		return notGenerated(p)
	}
	return report.Number(p.perRequest())
}

func heavyCell(b *batched) string {
	if !b.isHeavy(b.heavy) {
		return notGenerated(b.heavy)
	}
	return report.Number(b.heavy.perRequest())
}

func strandedCell(b *batched) string {
	if !b.isHeavy(b.heavy) {
		return notGenerated(b.heavy)
	}
	return strconv.FormatFloat(100*b.stranded(), 'f', 2, 64)
}
