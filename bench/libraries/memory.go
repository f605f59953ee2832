package libraries

import (
	"context"
	"fmt"
	"sync"
	"time"

	golimiter "github.com/sethvargo/go-limiter"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2/store/memstore"
	ululememory "github.com/ulule/limiter/v3/drivers/store/memory"
	timerate "golang.org/x/time/rate"
)

// memoryPeers are set up as their documentation shows.
var memoryPeers = []*kind{
	{name: "x/time/rate", modules: []string{"golang.org/x/time"}, pools: unpooled, open: openTimeRate},
	{name: "ulule/limiter", modules: []string{ululeModule}, pools: unpooled, open: openUluleMemory},
	{name: "throttled", modules: []string{throttledModule}, pools: unpooled, open: openThrottledMemory},
	{name: "go-limiter", modules: []string{"github.com/sethvargo/go-limiter"}, pools: unpooled, open: openGoLimiter},
}

// openTimeRate keeps a limiter for each client, as its users do.
func openTimeRate(string, int) (*limiter, error) {
	return &limiter{
		limit: func(events int) (decide, error) {
			var clients sync.Map
			every := timerate.Every(time.Hour / time.Duration(events))
			return func(_ context.Context, key string) (bool, error) {
				l, ok := clients.Load(key)
				if !ok {
					l, _ = clients.LoadOrStore(key, timerate.NewLimiter(every, events))
				}
				return l.(*timerate.Limiter).Allow(), nil
			}, nil
		},
		close: func() {},
	}, nil
}

func openUluleMemory(string, int) (*limiter, error) {
	return &limiter{
		limit: func(events int) (decide, error) { return decideUlule(ululememory.NewStore(), events), nil },
		close: func() {},
	}, nil
}

// openThrottledMemory does without a bound for the number of clients, with
// which each decision would have to wait for the ones before it.
func openThrottledMemory(string, int) (*limiter, error) {
	return &limiter{
		limit: func(events int) (decide, error) {
			store, err := memstore.NewCtx(0)
			if err != nil {
				return nil, fmt.Errorf("open the store of throttled: %w", err)
			}
			return decideThrottled(store, events)
		},
		close: func() {},
	}, nil
}

// openGoLimiter makes a store for each limit, which a store has only one of.
func openGoLimiter(string, int) (*limiter, error) {
	var store golimiter.Store
	done := func() {
		if store != nil {
			_ = store.Close(context.Background())
		}
	}
	return &limiter{
		limit: func(events int) (_ decide, err error) {
			done()
			store, err = memorystore.New(&memorystore.Config{Tokens: uint64(events), Interval: time.Hour})
			if err != nil {
				return nil, fmt.Errorf("open the store of go-limiter: %w", err)
			}
			return decideGoLimiter(store), nil
		},
		close: func() { done() },
	}, nil
}
