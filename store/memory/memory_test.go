package memory_test

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

func TestStore(t *testing.T) {
	storetest.Run(t, open)
}

func open(_ *testing.T, clock *storetest.Clock) store.Store {
	return memory.New(memory.NewBuckets(), memory.Options{Now: clock.Now})
}
