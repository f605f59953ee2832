package calls

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/lab/report"
)

// resultText is the summary of the document.
func resultText(list []single) string {
	of := func(name string) single {
		return list[slices.IndexFunc(list, func(s single) bool { return s.name == name })]
	}
	perRequest := func(name string) string { s := of(name); return number(s.perRequest(s.sum())) }
	refused := of(afterRefused)
	return fmt.Sprintf("**Result.** With `charge after`, the first request of a client costs %s calls. Then a request costs %s of a client that comes to one Caddy 50 times a second (%s with `charge_delay 0`), %s of one that comes there every two seconds (%s with `ledger_max_trust 0`), and %s of one that comes to two Caddys. A client that sends %d requests at a time to one Caddy costs %s calls per request, and one that is over its limit %s a second. With `charge before` a request costs %s.\n",
		perRequest(afterOnce), perRequest(afterOften), perRequest(afterAtOnce), perRequest(afterSeldom), perRequest(afterChecked), perRequest(afterShared),
		of(afterBusy).callers, perRequest(afterBusy), number(refused.perSecond(refused.sum())), perRequest(beforeOften))
}

func singleTable(list []single) string {
	t := report.NewTable("traffic", "requests/s", "replica calls per request", "primary calls per request", "calls per request", "calls/s")
	for _, s := range list {
		rate := fmt.Sprintf("%.0f", s.perSecond(s.requests))
		if !s.isGenerated() {
			rate += fmt.Sprintf(", %.0f not generated", s.rate)
		}
		t.Row(s.name, rate,
			number(s.perRequest(s.replica)), number(s.perRequest(s.primary)), number(s.perRequest(s.sum())), number(s.perSecond(s.sum())))
	}
	return t.String()
}

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
			steadyCell(auto, auto.steady), number(auto.leases()), heavyCell(auto), steadyCell(auto, auto.again), strandedCell(auto),
			steadyCell(fixed, fixed.steady), heavyCell(fixed), steadyCell(fixed, fixed.again), strandedCell(fixed))
	}
	return t.String()
}

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

func number(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return report.Digits(v)
}
