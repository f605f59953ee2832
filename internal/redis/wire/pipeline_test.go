package wire

import (
	"testing"
	"time"
)

// charge is a charge that has to run by an instant.
type charge struct {
	script *Script
	latest int64
}

func (c charge) Latest() int64 { return c.latest }

func (c charge) CallScript(call *ScriptCall, key string, _ *Clock) {
	call.Begin(c.script, "charge", false, key)
}

// TestPlainChargeNearItsEndBecomesAScript: it may arrive when the window is over.
func TestPlainChargeNearItsEndBecomesAScript(t *testing.T) {
	c := charge{NewScript("text", ""), time.Now().Add(time.Hour).UnixMicro()}
	cmd := NewWrite(c, "key", [3]any{"hincrby", "c", 1}, [3]any{"hmget", "r", "p"}, 0, nil)
	if cmd.CheckTime(c.latest - time.Minute.Microseconds()); cmd.IsScript() {
		t.Error("a charge is not plain a minute before its window ends")
	}
	if cmd.CheckTime(c.latest - time.Second.Microseconds()); !cmd.IsScript() || cmd.script != c.script {
		t.Error("a charge is plain a second before its window ends")
	}
}
