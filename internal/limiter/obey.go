package limiter

import (
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/retryafter"
)

// obey keeps the client of the request refused for as long as the response asks to send no more, in
// the zones that obey that and enforce their limits. The limiter has not made the response. Nobody is
// refused for the clients of a shared bucket, and where the store did not answer it is not asked.
func (t *tracker) obey(e *evaluation, status int) {
	var wait time.Duration
	for _, z := range e.zones {
		if !z.ObeyUpstream || z.role != enforces || z.answer != hasRoom || e.open == nil || z.bucket != ownBucket && !z.isLocal() {
			continue
		}
		if wait == 0 {
			if wait = retryafter.Read(status, t.Header(), e.limiter.Now()); wait == 0 {
				return
			}
		}
		believed := wait
		if z.isForAll() {
			believed = z.pause.believe(networkOf(t.request), wait, e.limiter.Now())
			z.keepProbe()
		}
		// The state is from when the request was admitted.
		z.showPenaltyFor(t.took(e.limiter) + believed)
		z.penalize()
		if times, log := e.limiter.mayLog(&z.obeyed); log {
			e.limiter.Logger.Warn("upstream asks for fewer requests; the client is refused until then",
				zap.String("zone", z.Name), zap.Int("status", status), zap.Duration("for", believed), zap.Duration("asked_for", wait), zap.Int64("times", times))
		}
	}
}
