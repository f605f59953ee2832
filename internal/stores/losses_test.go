package stores

import (
	"fmt"
	"slices"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestLossesAreTold by store, zone and kind, each once.
func TestLossesAreTold(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	var all losses
	limit, slots := &store.Limit{Zone: "api"}, &store.Limit{Zone: "slots", Algorithm: store.Concurrency}
	for _, l := range []struct {
		limit    *store.Limit
		op       algorithm.Operation
		requests int64
		isKnown  bool
		err      error
	}{
		{limit, algorithm.Charge, 5, true, nil},
		{limit, algorithm.Take, 2, false, nil},
		{limit, algorithm.Refund, 1, true, nil},
		{limit, algorithm.Refund, 3, true, fmt.Errorf("%w: away", ledger.ErrHeld)},
		{limit, algorithm.Penalize, 1, true, nil},
		{slots, algorithm.Charge, 1, true, nil},
		{slots, algorithm.Refund, 3, false, nil},
		{slots, algorithm.Refund, 1, true, nil},
	} {
		all.note(loss{"default", l.limit.Zone, lossOf(l.limit, l.op, l.err)}, l.requests, !l.isKnown)
	}
	all.log(zap.New(core))
	var told []string
	for _, entry := range logs.All() {
		fields := entry.ContextMap()
		kind := entry.Context[0].Key
		told = append(told, fmt.Sprint(entry.Message, ": ", fields["store"], " ", fields["zone"], " ", fields[kind], ", ", fields["uncertain"]))
	}
	if want := []string{
		"charges were lost at exit: default api 7, 2",
		"holds were lost at exit: default api 3, 0",
		"penalties were lost at exit: default api 1, 0",
		"refunds were lost at exit: default api 1, 0",
		"charges were lost at exit: default slots 1, 0",
		"slots were lost at exit: default slots 4, 3",
	}; !slices.Equal(told, want) {
		t.Errorf("told are %q, want %q", told, want)
	}
}
