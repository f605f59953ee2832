package calls

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestCallsAreThoseThatWereMade requires of the count, with a known number of
// calls, that it is neither more nor less: what scripts do inside, replication
// and the asking do not count.
func TestCallsAreThoseThatWereMade(t *testing.T) {
	servers := redistest.StartShard(t, 1)
	// Until this time has passed, a sole writer checks every request.
	opts := usual
	opts.Trust = time.Minute
	p := newProcess(servers, opts)
	defer func() {
		if err := p.close(); err != nil {
			t.Error(err)
		}
	}()
	after := singleCase{name: "after", clients: 1}
	before := singleCase{name: "before", before: true}
	for _, c := range []struct {
		singleCase
		times int64
		want  calls
	}{
		{before, 10, calls{primary: 10}},
		// The replica knows no window, so that the primary is asked to open it.
		{after, 1, calls{primary: 2, replica: 1}},
		// The replica, and the charge.
		{after, 10, calls{primary: 10, replica: 10}},
	} {
		was, err := countCalls(servers)
		redistest.Must(t, err)
		for n := range c.times {
			if st := c.send(t.Context(), p, n); st.Err != nil || !st.Allowed {
				t.Fatalf("%+v", st)
			}
			p.settle()
			redistest.Must(t, servers.WaitReplicated(t.Context()))
		}
		is, err := countCalls(servers)
		redistest.Must(t, err)
		if got := is.since(was); got != c.want {
			t.Errorf("%s, %d times: %+v, want %+v", c.name, c.times, got, c.want)
		}
	}
}

// TestRefusedTrafficMakesOneCallASecond is the small form of the measurement.
func TestRefusedTrafficMakesOneCallASecond(t *testing.T) {
	servers := redistest.StartShard(t, 1)
	for _, c := range singleCases {
		if !c.refused {
			continue
		}
		s, err := c.measure(t.Context(), servers, 2*time.Second)
		redistest.Must(t, err)
		// One at the beginning, and one of the store for the primary's clock.
		if most := int64(s.seconds) + 2; s.sum() > most {
			t.Errorf("%s: %d calls in %.1f s, want at most %d", s.name, s.sum(), s.seconds, most)
		}
	}
}

// TestNamesSayTheOptions requires that a case has the usual options, but for those that its
// name says.
func TestNamesSayTheOptions(t *testing.T) {
	for _, c := range singleCases {
		want := usual
		if strings.Contains(c.name, "`charge_delay 0`") {
			want.ChargeDelay = 0
		}
		if strings.Contains(c.name, "`ledger_max_trust 0`") {
			want.MaxTrust = 0
		}
		if got := c.options(); got.ChargeDelay != want.ChargeDelay || got.MaxTrust != want.MaxTrust {
			t.Errorf("%s: charge_delay %v, ledger_max_trust %v", c.name, got.ChargeDelay, got.MaxTrust)
		}
	}
}

func TestMeasuringEndsWhenItIsTold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := measureSingles(ctx, singleCases[:1], time.Hour); !errors.Is(err, errEnded) {
		t.Errorf("%v", err)
	}
}

func samples() (list []*batched) {
	for _, auto := range []bool{true, false} {
		for _, processes := range batchProcesses {
			for _, limit := range batchLimits {
				b := &batched{batchCase: batchCase{limit, processes, auto}, window: time.Second, admitted: limit}
				b.steady = phase{limit * 8 / 10, calls{primary: 100}}
				b.again = b.steady
				b.heavy = phase{limit * 12 / 10, calls{primary: 100}}
				list = append(list, b)
			}
		}
	}
	return list
}

// TestLoadThatWasNotGeneratedIsSaid requires words where there is no figure.
func TestLoadThatWasNotGeneratedIsSaid(t *testing.T) {
	list := samples()
	list[0].steady.requests, list[0].heavy.requests = 700, 1099
	// Of heavy traffic, two figures are missing.
	if text := batchTable(list); strings.Count(text, "load not generated") != 3 {
		t.Error(text)
	}
}

// TestTablesAreWhole requires as many cells in each row as there are in the
// head.
func TestTablesAreWhole(t *testing.T) {
	var list []single
	for _, c := range singleCases {
		list = append(list, single{c, 10, 1, calls{1, 2}})
	}
	for text, want := range map[string]int{singleTable(list): 2 + len(singleCases), batchTable(samples()): 2 + 12} {
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
		if rows != want {
			t.Errorf("%d rows, want %d:\n%s", rows, want, text)
		}
	}
}

// TestResultIsOfItsCases requires that the summary has the figures of the cases that it names.
func TestResultIsOfItsCases(t *testing.T) {
	var list []single
	for i, c := range singleCases {
		list = append(list, single{c, 100, 10, calls{primary: int64(100 * (i + 2))}})
	}
	want := "**Result.** With `charge after`, the first request of a client costs 2.00 calls. Then a request costs 3.00 of a client that comes to one Caddy 50 times a second (4.00 with `charge_delay 0`), " +
		"6.00 of one that comes there every two seconds (7.00 with `ledger_max_trust 0`), and 5.00 of one that comes to two Caddys. " +
		"A client that sends 64 requests at a time to one Caddy costs 10.00 calls per request, and one that is over its limit 120 a second. With `charge before` a request costs 13.00.\n"
	if got := resultText(list); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 1234.5: "1234", 2: "2.00", 0.5: "0.5", 0.0123: "0.012", 0.000998: "0.001", 0.00012: "0.00012"} {
		if got := number(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}

// BenchmarkChecks tells what checks a request costs of clients that come to one
// process, and of those that come to two.
func BenchmarkChecks(b *testing.B) {
	for name, shared := range map[string]bool{"own": false, "shared": true} {
		b.Run(name, func(b *testing.B) {
			c := singleCase{name: name, clients: 20, callers: 8, shared: shared}
			for b.Loop() {
				list, err := measureSingles(b.Context(), []singleCase{c}, time.Second)
				redistest.Must(b, err)
				b.ReportMetric(list[0].perRequest(list[0].replica), "checks/request")
			}
		})
	}
}

// BenchmarkBatches tells what calls a request costs with batches, and which part of
// the limit nobody got, through four processes.
func BenchmarkBatches(b *testing.B) {
	for _, limit := range []int64{1_000, 10_000} {
		b.Run(fmt.Sprint("limit=", limit), func(b *testing.B) {
			for b.Loop() {
				list, err := measureBatches(b.Context(), []int64{limit}, []int{4}, time.Second)
				redistest.Must(b, err)
				for _, m := range list {
					kind := "fixed"
					if m.auto {
						kind = "auto"
					}
					b.ReportMetric(m.steady.perRequest(), kind+"-calls/request")
					b.ReportMetric(m.stranded(), kind+"-stranded")
				}
			}
		})
	}
}
