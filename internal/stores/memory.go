package stores

import (
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

// MemoryOptions are the options of a store in memory that counts what it evicts, and logs when the
// clock was set.
func MemoryOptions(name string, logger *zap.Logger, maxBuckets int) memory.Options {
	if logger == nil {
		logger = zap.NewNop()
	}
	logger = logger.With(zap.String("store", name))
	return memory.Options{
		MaxBuckets: maxBuckets,
		OnEvict: func(zone string) {
			telemetry.Default.OfZone(zone, func(c *telemetry.ZoneCounters) { c.Evicted.Inc() })
		},
		OnJump: func(by time.Duration) {
			logger.Warn("this machine's clock has jumped: let it follow a time server that adjusts it gradually (NTP)", zap.Duration("by", by))
		},
	}
}
