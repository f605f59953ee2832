package main

import (
	"math"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

// duration is the histogram of what commands to servers take.
const duration = "caddy_rate_limit_store_duration_seconds_bucket"

// longestCall bounds what the commands took by which a bucket changes, since earlier
// figures were read: it is the upper end of the slowest class that grew.
func longestCall(m, earlier caddyproc.Metrics) (d time.Duration) {
	for _, operation := range []string{"charge", "take", "refund"} {
		// Classes hold what is in lower ones as well.
		total, of := 0.0, map[float64]float64{}
		for key, n := range m {
			if !caddyproc.Has(key, duration, `operation="`+operation+`"`) {
				continue
			}
			end, err := strconv.ParseFloat(caddyproc.Label(key, "le"), 64)
			if err != nil {
				continue
			}
			of[end] += n - earlier[key]
			total = max(total, of[end])
		}
		least := math.Inf(1)
		for end, n := range of {
			if n == total {
				least = min(least, end)
			}
		}
		if total == 0 {
			continue
		}
		// Longer than the last class is longer than charge_timeout's patience.
		d = max(d, time.Duration(min(least, 5)*float64(time.Second)))
	}
	return d
}
