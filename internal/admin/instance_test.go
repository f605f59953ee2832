package admin

import (
	"os"
	"testing"
	"time"
)

// TestInstance names the machine, and counts the process's time.
func TestInstance(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	got := instance()
	if got.Name != name || got.Address != "" || got.Uptime <= 0 || got.Uptime > time.Since(started).Seconds() {
		t.Errorf("the instance is %+v", got)
	}
}
