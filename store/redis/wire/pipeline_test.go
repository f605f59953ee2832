package wire

import (
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestPlainChargeNearItsEndBecomesAScript: it may arrive when the window is over.
func TestPlainChargeNearItsEndBecomesAScript(t *testing.T) {
	script := NewScript("text", "")
	r := store.Request{Cost: 1, Until: time.Now().Add(time.Hour).UnixMicro()}
	cmd := NewPlainCharge("key", &r, 0, nil, func(call *ScriptCall, key string, _ *store.Request, _ *Clock) {
		call.Begin(script, "charge", false, key)
	})
	if cmd.CheckWindow(r.Until - time.Minute.Microseconds()); cmd.IsScript() {
		t.Error("a charge is not plain a minute before its window ends")
	}
	if cmd.CheckWindow(r.Until - time.Second.Microseconds()); !cmd.IsScript() || cmd.Source() != "text" {
		t.Error("a charge is plain a second before its window ends")
	}
}
