package stores

import (
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// MemoryOptions are the options of a store in memory that counts, and logs from time to
// time, what it evicts, and logs when the clock was set.
func MemoryOptions(name string, logger *zap.Logger, maxBuckets int) memory.Options {
	if logger == nil {
		logger = zap.NewNop()
	}
	logger = logger.With(zap.String("store", name))
	reports := new(telemetry.LogThrottle)
	return memory.Options{
		MaxBuckets: maxBuckets,
		OnEvict: func(zone string) {
			telemetry.Default.Evicted.WithLabelValues(zone).Inc()
			if times, log := reports.Report(time.Now()); log {
				logger.Warn("buckets in memory are evicted although they count, those that have spent least of their limit first: raise max_buckets, or set max_new_buckets",
					zap.String("zone", zone), zap.Int64("times", times))
			}
		},
		OnJump: func(by time.Duration) {
			logger.Warn("this machine's clock has jumped: let it follow a time server that adjusts it gradually (NTP)", zap.Duration("by", by))
		},
	}
}
