package faults

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/shards"
)

// epoch is when the requests of the tests begin.
var epoch = time.Now()

// answers are the responses to requests a tenth of a second apart: the fault lasts
// from the fourth to the sixth.
func answers(some ...response) (seen []response) {
	for i, r := range some {
		r.begun = epoch.Add(time.Duration(i) * 100 * time.Millisecond)
		r.ended = r.begun.Add(time.Millisecond)
		seen = append(seen, r)
	}
	return seen
}

var (
	fine      = response{status: 200, limited: true, remaining: "1", reset: "7"}
	full      = response{status: 429, limited: true, remaining: "0", reset: "7"}
	unchecked = response{status: 200}
	denied    = response{status: 503}
	alone     = response{status: 200, limited: true, remaining: "1", reset: "8"}
	refused   = response{status: 429, limited: true, remaining: "0", reset: "8"}
)

// observed is an outcome with one client of each shard, of whom the former is
// counted for so much.
func observed(f fault, onError, charge string, events, counted int64, some ...response) *outcome {
	mine := &client{name: "mine", role: regular, events: events, seen: answers(some...)}
	other := &client{name: "other", role: bystander, events: plenty, seen: answers(fine, fine)}
	return &outcome{
		cell: cell{&f, onError, charge}, clients: []*client{mine, other},
		start: epoch, begin: epoch.Add(250 * time.Millisecond), end: epoch.Add(550 * time.Millisecond),
		buckets: map[string]shards.Bucket{"mine": {Count: counted, Reset: "7"}, "other": {Count: 2, Reset: "7"}},
		metrics: metrics{storeErrors: 3, undelivered: map[string]map[string]int64{faulty: {}, sound: {}}},
	}
}

var (
	unnoticed = fault{name: "unnoticed"}
	total     = fault{name: "total", checks: away, primary: away}
	forgetful = fault{name: "forgetful", checks: away, primary: away, loses: everything}
)

// TestPromisesThatAreKept requires that what should be is not complained about.
func TestPromisesThatAreKept(t *testing.T) {
	quiet := observed(unnoticed, allow, after, 5, 5, fine, fine, fine, fine, fine, full, full)
	quiet.metrics.storeErrors = 0
	refunds := observed(total, local, before, 4, 4, fine, fine, fine, alone, refused, refused, full)
	refunds.metrics.undelivered[faulty]["lost"], refunds.metrics.lostRefunds = 1, 1
	forgotten := observed(forgetful, allow, after, 5, 2, fine, fine, fine, unchecked, fine, fine, fine)
	forgotten.buckets["mine"] = shards.Bucket{Count: 2, Reset: "9"}
	for name, o := range map[string]*outcome{
		"unnoticed":     quiet,
		"allow, after":  observed(total, allow, after, 5, 7, fine, fine, fine, unchecked, unchecked, unchecked, fine),
		"allow, before": observed(total, allow, before, 5, 5, fine, fine, fine, unchecked, unchecked, unchecked, fine),
		"deny, after":   observed(total, deny, after, 5, 4, fine, fine, fine, denied, denied, denied, fine),
		"deny, before":  observed(total, deny, before, 4, 4, fine, fine, fine, denied, denied, denied, full),
		"local, after":  observed(total, local, after, 4, 4, fine, fine, fine, alone, refused, refused, full),
		"forgotten":     forgotten,
		"lost refund":   refunds,
	} {
		if all := o.breaches(); len(all) > 0 {
			t.Errorf("%s: %v", name, all)
		}
	}
}

// TestRefusalForASecondIsNormal: the store refuses so, though the bucket has a later reset.
func TestRefusalForASecondIsNormal(t *testing.T) {
	second, reset := full, epoch.Add(time.Second).Unix()
	second.begun, second.ended, second.reset = epoch, epoch, strconv.FormatInt(reset, 10)
	o := observed(total, local, before, 4, 4, fine, fine, fine, fine)
	mine := o.clients[0]
	o.buckets["mine"] = shards.Bucket{Count: 4, Reset: strconv.FormatInt(reset+3600, 10)}
	if !o.isNormal(mine, &second) {
		t.Error("a refusal that names a second is taken for one of Caddy alone")
	}
	second.reset = strconv.FormatInt(reset+3599, 10)
	if o.isNormal(mine, &second) {
		t.Error("a refusal of another window is taken for one of the store")
	}
}

// TestPromisesThatAreNot requires that each of them is noticed.
func TestPromisesThatAreNot(t *testing.T) {
	doubled := observed(total, allow, after, 5, 4, fine, fine, fine)
	lost := observed(total, allow, after, 5, 3, fine, fine, fine)
	lost.metrics.undelivered[faulty]["lost"] = 1
	atExit := observed(total, allow, after, 5, 3, fine, fine, fine)
	atExit.log = `"msg":"charges were lost at exit"`
	race := observed(total, allow, after, 5, 3, fine, fine, fine)
	race.log = "WARNING: DATA RACE"
	harmless := observed(total, allow, after, 5, 3, fine, fine, fine)
	harmless.metrics.storeErrors = 0
	others1 := observed(total, allow, after, 5, 3, fine, fine, fine)
	others1.buckets["other"] = shards.Bucket{Count: 1, Reset: "7"}
	others2 := observed(total, allow, after, 5, 3, fine, fine, fine)
	others2.metrics.undelivered[sound]["uncertain"] = 1
	for name, c := range map[string]struct {
		o    *outcome
		want promise
	}{
		"unchecked before the fault": {observed(total, allow, after, 5, 3, fine, unchecked, fine), responses},
		"no response":                {observed(total, allow, after, 5, 5, fine, fine, fine, response{}, fine, fine), responses},
		"503 though allowed":         {observed(total, allow, after, 5, 3, fine, fine, fine, denied), responses},
		"passing though denied":      {observed(total, deny, after, 5, 4, fine, fine, fine, unchecked), responses},
		"503 though counted alone":   {observed(total, local, after, 5, 3, fine, fine, fine, denied), responses},
		"noticed":                    {observed(unnoticed, allow, after, 5, 4, fine, fine, fine, unchecked), responses},
		"alone though unnoticed":     {observed(unnoticed, local, after, 5, 4, fine, fine, fine, alone), responses},
		"refused too early":          {observed(total, allow, after, 5, 3, fine, fine, fine, full), refusals},
		"refused, and something left": {
			observed(total, allow, after, 2, 2, fine, fine, response{status: 429, limited: true, remaining: "1", reset: "7"}), refusals,
		},
		"two resets":            {observed(total, allow, after, 5, 3, fine, fine, alone), resets},
		"too many":              {observed(total, deny, after, 2, 3, fine, fine, fine), admissions},
		"too many alone":        {observed(total, local, after, 1, 3, fine, fine, fine), admissions},
		"too many checked":      {observed(total, allow, after, 1, 3, fine, fine, fine, unchecked), admissions},
		"counted twice":         {doubled, doubles},
		"counted though denied": {observed(total, deny, after, 5, 4, fine, fine, fine, denied), doubles},
		"taken beyond":          {observed(total, deny, before, 3, 4, fine, fine, fine, denied), doubles},
		"not counted":           {observed(total, deny, after, 5, 2, fine, fine, fine), omissions},
		"not taken":             {observed(total, deny, before, 9, 3, fine, fine, fine, fine, fine, fine, fine), omissions},
		"not counted afterwards": {
			observed(forgetful, allow, after, 20, 0, append(slices.Repeat([]response{fine}, 13), fine, fine)...), omissions,
		},
		"lost":                 {lost, losses},
		"lost at exit":         {atExit, losses},
		"failed and unnoticed": {observed(unnoticed, allow, after, 5, 3, fine, fine, fine), losses},
		"another not counted":  {others1, others},
		"another uncertain":    {others2, others},
		"race":                 {race, soundness},
		"no fault":             {harmless, soundness},
	} {
		all := c.o.breaches()
		if !slices.ContainsFunc(all, func(b breach) bool { return b.promise == c.want }) {
			t.Errorf("%s: %v, want a breach of %d", name, all, c.want)
		}
	}
}

// TestKnownDeviationsAreBounded requires that a deviation excuses nothing but what
// it is about.
func TestKnownDeviationsAreBounded(t *testing.T) {
	restarted := fault{name: restart, primary: away}
	late := observed(restarted, allow, after, 9, 4, fine, fine, fine, unchecked)
	if len(late.unknown()) > 0 || !slices.Equal(late.known(), []int{1}) {
		t.Errorf("unknown are %v, known are %v", late.unknown(), late.known())
	}
	for name, o := range map[string]*outcome{
		"another fault":   observed(unnoticed, allow, after, 9, 4, fine, fine, fine, unchecked),
		"another promise": observed(restarted, allow, after, 9, 2, fine, fine, fine),
		"too long":        observed(restarted, allow, after, 99, 81, slices.Repeat([]response{unchecked}, 81)...),
	} {
		if len(o.unknown()) == 0 || len(o.known()) > 0 {
			t.Errorf("%s: unknown are %v, known are %v", name, o.unknown(), o.known())
		}
	}
}

// TestTablesAreWhole requires a row of each fault and charge, as many cells in each as there
// are in the head, and emphasis on what should not be.
func TestTablesAreWhole(t *testing.T) {
	restarted := fault{name: restart, primary: away}
	broken := observed(total, deny, before, 5, 3, fine, fine, fine, denied, response{})
	broken.metrics.undelivered[faulty]["lost"] = 1
	list := []*outcome{
		observed(restarted, allow, after, 5, 4, fine, fine, fine, unchecked),
		observed(unnoticed, allow, after, 5, 4, fine, fine, fine, fine),
		observed(unnoticed, deny, after, 5, 5, fine, fine, fine, fine, fine),
		observed(unnoticed, allow, before, 5, 6, fine, fine, fine, fine, fine, fine),
		observed(total, allow, before, 5, 3, fine, fine, fine, unchecked),
		broken,
		observed(total, local, before, 5, 5, fine, fine, fine, alone, refused, fine, alone),
	}
	sections := document(patient, list)
	if _, err := report.Fill(template, sections); err != nil {
		t.Error(err)
	}
	for _, text := range []string{responseTable(allFigures(list)), countTable(allFigures(list))} {
		rows, cells := 0, 0
		for line := range strings.Lines(text) {
			n := strings.Count(line, "|")
			if rows++; rows == 1 {
				cells = n
			}
			if n != cells {
				t.Errorf("%d cells, want %d: %s", n-1, cells-1, line)
			}
		}
		if rows != 2+4 {
			t.Errorf("%d rows, want 6:\n%s", rows, text)
		}
	}
	for _, want := range []string{
		"| " + restart + " | after | 1 of 1 [1] |  |  |",
		"| unnoticed | after | 0 of 1 | 0 of 2 |  |",
		"| total | before | 1 of 1 | 1 of 2, **1 × no response** | 2 of 3, then 1 |",
		"| total | before | 4 / 3 / 6 | -1 / 0 / -1 | -1 / 0 / -1 | 0 | 0 / 1 / 0 |",
		"| unnoticed | after | 4 / 5 | 0 | 0 | 0 | 0 |",
		"\n[1] Known deviation: ",
	} {
		if !strings.Contains(sections[report.Tables], want) {
			t.Errorf("no %q in\n%s", want, sections[report.Tables])
		}
	}
	if text := sections[report.Result]; !strings.Contains(text, "7 experiments with 3 faults promises were broken 7 times, not counting the known deviation below the tables. ") ||
		!strings.Contains(text, "During 1 of the faults the store went on to decide every request.") {
		t.Error(text)
	}
	if text := draw(allFigures(list)).String(); !strings.Contains(text, ">total<") || strings.Contains(text, ">unnoticed<") {
		t.Error(text)
	}
}

func TestMetrics(t *testing.T) {
	all, err := caddyproc.ParseMetrics(strings.Join([]string{
		`caddy_rate_limit_undelivered_total{operation="charge",outcome="uncertain",shard="faulty",store="default"} 3`,
		`caddy_rate_limit_undelivered_total{operation="refund",outcome="uncertain",shard="faulty",store="default"} 1`,
		`caddy_rate_limit_undelivered_total{operation="charge",outcome="lost",shard="sound",store="default"} 2`,
		`caddy_rate_limit_undelivered_total{operation="refund",outcome="lost",shard="faulty",store="default"} 5`,
		`caddy_rate_limit_store_errors_total{kind="timeout",store="default"} 1e+02`,
		`# HELP caddy_rate_limit_store_errors_total Checks and takes that a store could not answer.`,
		`go_goroutines 20`,
	}, "\n"))
	redistest.Must(t, err)
	m := metricsIn(all)
	if m.storeErrors != 100 || m.failed(faulty) != 9 || m.failed(sound) != 2 || m.lostRefunds != 5 || m.undelivered[faulty]["uncertain"] != 4 {
		t.Errorf("%+v", m)
	}
}

// TestWrongBefore requires that only on_error before the fault counts as the machine's.
func TestWrongBefore(t *testing.T) {
	for name, c := range map[string]struct {
		want bool
		seen []response
	}{
		"in time":          {false, []response{fine, fine, full, unchecked, unchecked, fine}},
		"a late answer":    {true, []response{fine, unchecked, fine, unchecked, unchecked, fine}},
		"after the fault":  {false, []response{fine, fine, fine, unchecked, fine, fine, unchecked}},
		"refused, as ever": {false, []response{full, full, full, unchecked}},
	} {
		if o := observed(total, allow, after, 5, 5, c.seen...); o.isWrongBefore() != c.want {
			t.Errorf("%s: wrong before the fault is %v", name, !c.want)
		}
	}
}
