package redistest

import (
	"maps"
	"testing"
)

func TestParseCalls(t *testing.T) {
	stats := map[string]string{
		"cmdstat_time": "calls=7,usec=9", "cmdstat_eval": "calls=5,usec=9", "cmdstat_config|get": "calls=12,usec=9", "redis_version": "7.0.15",
	}
	got, err := parseCalls(stats)
	if want := map[string]int64{"time": 7, "eval": 5, "config|get": 12}; err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, error %v, want %v", got, err, want)
	}
	stats["cmdstat_eval"] = "usec=9"
	if _, err := parseCalls(stats); err == nil {
		t.Error("statistics without calls were read")
	}
}
