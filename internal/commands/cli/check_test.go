package cli

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestClocksThatAgreeHaveNoSign(t *testing.T) {
	for skew, want := range map[float64]string{-0.0001: "+0.000s", 0.0001: "+0.000s", -0.0006: "-0.001s", 1.5: "+1.500s"} {
		if got := skewOf(&store.ServerDiagnosis{ClockSkew: &skew}); got != want {
			t.Errorf("a skew of %v is shown as %s, want %s", skew, got, want)
		}
	}
}
