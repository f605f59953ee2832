package main

import (
	"go/ast"
	"slices"
	"strings"
	"unicode"
)

// mechanisms are the parts of the product that can meet in a function. A function names one if a name
// in it has one of its words, which are in the singular.
var mechanisms = []struct {
	name  string
	words string
}{
	{"absences", "absence, absent"},
	{"audit of changes", "audit, audited"},
	{"batches", "batch, batches"},
	{"bodies read for costs", "body, bodies"},
	{"breakers", "breaker"},
	{"bundles", "bundle"},
	{"calendar and aligned windows", "calendar, align, aligned"},
	{"capabilities of servers", "capability, capabilities"},
	{"charges held back", "held, hold"},
	{"charges without scripts", "plain, orphan"},
	{"clocks of servers", "clock"},
	{"clusters", "cluster, moved"},
	{"costs by the response", "firm, dynamic, quantity"},
	{"diagnosis of servers", "diagnosis, finding"},
	{"enforce for a share of clients", "enforce, enforced, observe, observed"},
	{"fleet", "fleet"},
	{"forgiving", "forgive, forgiven, forgiving"},
	{"free statuses", "free, freed"},
	{"guest stores", "guest"},
	{"handlers around handlers", "outer, inner"},
	{"history", "history"},
	{"in flight", "in flight"},
	{"jitter", "jitter"},
	{"lag of replicas", "lag, lagging"},
	{"late outcomes", "late"},
	{"leases", "lease, concurrency"},
	{"local counts", "local"},
	{"logs of requests", "sliding log"},
	{"new clients bounded", "newcomer, overflow, new bucket"},
	{"obeying upstreams", "obey, upstream"},
	{"on_error", "on error"},
	{"overrides", "override, block, blocked, grant, granted"},
	{"passwords from commands", "password, credential"},
	{"penalties", "penalty, penalties, penalized"},
	{"pipelines", "pipeline, lane"},
	{"placeholders", "placeholder, replacer, repl"},
	{"priorities", "priority, priorities, reserve"},
	{"problems", "problem"},
	{"records", "record"},
	{"redirects", "redirect, redirected"},
	{"refunds", "refund, refunded"},
	{"replay", "replay"},
	{"replicas", "replica"},
	{"reservations", "reservation"},
	{"resets", "reset"},
	{"resharding", "previous, owners, handover"},
	{"rollout", "rollout"},
	{"scripts", "script"},
	{"secrets in keys", "secret, seal, sealed"},
	{"sentinels", "sentinel"},
	{"shards", "shard"},
	{"simulate", "simulate, simulated, foresee, predict"},
	{"TLS", "tls, certificate"},
	{"uncertain outcomes", "uncertain"},
	{"waiting requests", "waiting, max wait, waiter"},
	{"waits for refunds", "await return, returning, reclaim"},
	{"warnings near the limit", "warn, near"},
	{"writers alone", "writer"},
}

// mechanismsOf returns the names of the mechanisms that a function names, in the order of the table.
func mechanismsOf(f *ast.FuncDecl) (found []string) {
	names := map[string]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		if name, ok := n.(*ast.Ident); ok {
			names[wordsOf(name.Name)] = true
		}
		return true
	})
	for _, m := range mechanisms {
		if slices.ContainsFunc(strings.Split(m.words, ", "), func(word string) bool { return isNamed(names, word) }) {
			found = append(found, m.name)
		}
	}
	return found
}

func isNamed(names map[string]bool, word string) bool {
	for name := range names {
		if strings.Contains(name, " "+word+" ") {
			return true
		}
	}
	return false
}

// wordsOf returns the words of a name such as maxNewBuckets, in lower case and the singular, with
// spaces around them: " max new bucket ".
func wordsOf(name string) string {
	words, start := " ", 0
	runes := []rune(name)
	for i := 1; i <= len(runes); i++ {
		if i == len(runes) || unicode.IsUpper(runes[i]) && (!unicode.IsUpper(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1])) {
			word := strings.ToLower(string(runes[start:i]))
			if len(word) > len("tls") {
				word = strings.TrimSuffix(word, "s")
			}
			words += word + " "
			start = i
		}
	}
	return words
}
