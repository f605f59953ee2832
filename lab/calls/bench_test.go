package calls

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkChecks tells what checks a request costs of clients that come to one
// process, and of those that come to two.
func BenchmarkChecks(b *testing.B) {
	for name, shared := range map[string]bool{"own": false, "shared": true} {
		b.Run(name, func(b *testing.B) {
			c := singleCase{name: name, clients: 20, callers: 8, shared: shared}
			for b.Loop() {
				list, err := measureSingles(b.Context(), []singleCase{c}, time.Second)
				if err != nil {
					b.Fatal(err)
				}
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
				if err != nil {
					b.Fatal(err)
				}
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
