package wire

import (
	"testing"
	"time"
)

// TestCountdownSaysWhatIsLeft whenever a command is sent.
func TestCountdownSaysWhatIsLeft(t *testing.T) {
	s := NewScript("return ARGV[2]", "")
	var c ScriptCall
	c.Begin(s, "charge", false, "key")
	c.Add(0, 7)
	began := time.Now()
	c.AddCountdown((5 * time.Second).Microseconds())
	c.Add(8)
	c.Ready()
	for _, try := range []struct {
		waited time.Duration
		least  int64
	}{{0, -5_000_000}, {2 * time.Second, -3_000_000}, {time.Hour, 1}} {
		c.countDown(began.Add(try.waited))
		numbers, err := Unpack(nil, string(c.packed))
		if err != nil || len(numbers) != 4 || numbers[1] != 7 || numbers[3] != 8 {
			t.Fatalf("the numbers are %v: %v", numbers, err)
		}
		// The countdown began a moment later.
		if slow := try.least - numbers[2]; slow < 0 || slow > time.Since(began).Microseconds() {
			t.Errorf("after %v the countdown is %d, want %d", try.waited, numbers[2], try.least)
		}
		c.sent = true
		c.Ready()
	}
}
