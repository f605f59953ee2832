package ask

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestReplicasAreTriedAgain now and then where they have lacked the windows of most clients.
func TestReplicasAreTriedAgain(t *testing.T) {
	var a absences
	asks := []*store.Ask{{Request: store.Request{Limit: hourly, ClientKey: "k"}}}
	for range 4 * absenceDecay {
		a.note(asks)
	}
	skipped := 0
	for range 2 * absenceSample {
		if a.expects(asks) {
			skipped++
		}
	}
	if skipped != 2*absenceSample-2 {
		t.Errorf("%d of %d checks skip the replica", skipped, 2*absenceSample)
	}
}
