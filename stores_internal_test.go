package shardlimit

import (
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// countingModule notes how often its store is opened and closed.
type countingModule struct{ opened, closed atomic.Int64 }

func (m *countingModule) OpenStore(string) (store.Store, error) {
	m.opened.Add(1)
	return memory.New(memory.NewBuckets(), memory.Options{}), nil
}
func (m *countingModule) CloseStore()            { m.closed.Add(1) }
func (m *countingModule) OnErrorDefault() string { return onErrorAllow }

func newUse(t *testing.T) (*storeUse, *countingModule) {
	t.Helper()
	m := new(countingModule)
	u := &storeUse{name: t.Name(), module: m, logger: zap.NewNop()}
	if _, err := u.enter(); err != nil {
		t.Fatal(err)
	}
	return u, m
}

func TestStoreIsClosedByTheLastToLeave(t *testing.T) {
	u, m := newUse(t)
	if _, err := u.enter(); err != nil {
		t.Fatal(err)
	}
	u.unload()
	if m.closed.Load() != 0 {
		t.Fatal("the store is closed under a request")
	}
	u.leave()
	if m.closed.Load() != 1 {
		t.Fatalf("the store is closed %d times", m.closed.Load())
	}
}

func TestOvertakenRequestOpensTheStoreAgain(t *testing.T) {
	u, m := newUse(t)
	u.unload()
	open, err := u.enter()
	if err != nil || open == nil || open.store == nil {
		t.Fatalf("no store: %v", err)
	}
	u.leave()
	if m.opened.Load() != 2 || m.closed.Load() != 2 {
		t.Fatalf("opened %d times, closed %d times", m.opened.Load(), m.closed.Load())
	}
}

func TestStoreIsNeverUsedClosed(t *testing.T) {
	u, m := newUse(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5000 {
				open, err := u.enter()
				if err != nil || open == nil {
					t.Errorf("entered nothing: %v", err)
					return
				}
				if m.opened.Load() <= m.closed.Load() {
					t.Error("entered a closed store")
				}
				u.leave()
			}
		})
	}
	u.unload()
	wg.Wait()
	if o, c := m.opened.Load(), m.closed.Load(); o != c || o < 1 {
		t.Errorf("opened %d times, closed %d times", o, c)
	}
}
