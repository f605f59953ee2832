package libraries

import (
	"context"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestAllCount(t *testing.T) {
	server := redistest.Start(t)
	for _, k := range redisKinds {
		requireCounts(t, k, server, 4)
	}
	for _, k := range memoryKinds {
		requireCounts(t, k, nil, 0)
	}
}

func requireCounts(t *testing.T, k *kind, server *redistest.Server, pool int) {
	t.Helper()
	addr := ""
	if server != nil {
		addr = server.Addr()
	}
	l, err := openLimiter(k, addr, pool)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	// Each begins anew.
	for range 2 {
		if err := checkCount(l, server); err != nil {
			t.Errorf("%s: %v", k.name, err)
		}
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

// TestFailuresAreErrors asks peers whose server is gone.
func TestFailuresAreErrors(t *testing.T) {
	server := redistest.Start(t)
	asked := map[string]decide{}
	for _, k := range peers {
		l, err := openLimiter(k, server.Addr(), 1)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.close)
		if asked[k.name], err = l.limit(plenty); err != nil {
			t.Fatal(err)
		}
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	for name, d := range asked {
		if _, err := d(t.Context(), "a"); err == nil {
			t.Errorf("%s: no error without a server", name)
		}
	}
}
