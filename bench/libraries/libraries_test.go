package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// small has of every implementation one of few connections.
func small() (all []*kind) {
	for _, k := range kinds {
		one := *k
		one.pools = []int{4}
		all = append(all, &one)
	}
	return all
}

func TestAllCount(t *testing.T) {
	server := redistest.Start(t)
	for _, k := range small() {
		l, err := openLimiter(k, server.Addr(), 4)
		if err != nil {
			t.Fatal(err)
		}
		if err := checkCount(l, server); err != nil {
			t.Errorf("%s: %v", k.name, err)
		}
		l.close()
	}
}

func TestCheckCountFindsThoseThatDoNot(t *testing.T) {
	server := redistest.Start(t)
	for name, d := range map[string]decide{
		"admits all":    func(context.Context, string) (bool, error) { return true, nil },
		"refuses all":   func(context.Context, string) (bool, error) { return false, nil },
		"has one count": onlyFive(),
	} {
		l := &limiter{limit: func(int) (decide, error) { return d, nil }}
		if checkCount(l, server) == nil {
			t.Errorf("a limiter that %s is said to count", name)
		}
	}
}

func onlyFive() decide {
	n := 0
	return func(context.Context, string) (bool, error) {
		n++
		return n <= 5, nil
	}
}

// TestReport runs one short round of everything.
func TestReport(t *testing.T) {
	server := redistest.Start(t)
	const length = 30 * time.Millisecond
	comparisons, err := compare(small(), 8, 1, length, server)
	if err != nil {
		t.Fatal(err)
	}
	text, err := report(comparisons, 1, length, server)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| 8, admitted |", "| 8, refused |"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, k := range kinds {
		if n := strings.Count(text, "| "+k.name+" |"); n != 2 {
			t.Errorf("%d lines about %s in\n%s", n, k.name, text)
		}
	}
}

func TestRatiosAreToTheFastestPeerOfTheRound(t *testing.T) {
	peer, us := &limiter{kind: &kind{}}, &limiter{kind: &kind{ours: true}}
	c := comparison{
		limiters: []*limiter{peer, peer, us},
		samples:  [][]sample{{{rate: 10}, {rate: 40}}, {{rate: 20}, {rate: 30}}, {{rate: 30}, {rate: 50}}},
	}
	if got := c.ratios(2); got[0] != 1.25 || got[1] != 1.5 {
		t.Errorf("ratios %v, want 1.25 and 1.5", got)
	}
}

func TestRewriteKeepsTheRest(t *testing.T) {
	file := filepath.Join(t.TempDir(), "report.md")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("before\n" + startMark + "old\n" + endMark + "after\n")
	for range 2 {
		if err := rewrite(file, "new\n"); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if want := "before\n" + startMark + "\nnew\n\n" + endMark + "after\n"; string(got) != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	write("before\n" + startMark)
	if rewrite(file, "new\n") == nil {
		t.Error("a file without the second mark was rewritten")
	}
}
