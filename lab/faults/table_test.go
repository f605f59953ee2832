package faults

import (
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

// TestTablesAreWhole requires as many cells in each row as there are in the head.
func TestTablesAreWhole(t *testing.T) {
	list := []*outcome{
		observed(fault{name: restart, primary: away}, allow, after, 5, 4, fine, fine, fine, unchecked),
		observed(total, local, before, 5, 4, fine, fine, fine, alone, refused),
	}
	for _, text := range []string{responseTable(list), countTable(list)} {
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
		if rows != 2+len(list) {
			t.Errorf("%d rows, want %d:\n%s", rows, 2+len(list), text)
		}
	}
	for _, want := range []string{
		"| " + restart + " | allow, after [1] | 3 × 200 | 1 × 200 unchecked |  |",
		"| total | local, before | 3 × 200 | 1 × 200, 1 × 429 (local: 2) |  |",
		"| " + restart + " | allow, after [1] | 4 | 0 | 0 | 0 | 0 | 0 |",
		"| total | local, before | 4 | 0 | 0 | 0 | 0 | 0 |",
		"\n[1] Other than promised: ",
	} {
		if text := document(patient, list); !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestMetrics(t *testing.T) {
	all, err := caddyproc.ParseMetrics(strings.Join([]string{
		`caddy_rate_limit_undelivered_total{operation="charge",outcome="uncertain",shard="faulty",store="default"} 3`,
		`caddy_rate_limit_undelivered_total{operation="refund",outcome="uncertain",shard="faulty",store="default"} 1`,
		`caddy_rate_limit_undelivered_total{operation="charge",outcome="lost",shard="sound",store="default"} 2`,
		`caddy_rate_limit_store_errors_total{kind="timeout",store="default"} 1e+02`,
		`# HELP caddy_rate_limit_store_errors_total Checks and takes that a store could not answer.`,
		`go_goroutines 20`,
	}, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	m := metricsIn(all)
	if m.storeErrors != 100 || m.failed(faulty) != 4 || m.failed(sound) != 2 || m.undelivered[faulty]["uncertain"] != 4 {
		t.Errorf("%+v", m)
	}
}
