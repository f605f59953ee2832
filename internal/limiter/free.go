package limiter

import (
	"net/http"

	"go.uber.org/zap"
)

// freeTimes bounds the responses of 304 that are free: in a window they may cost a client ten times its limit.
// Clients that revalidate pages stay far below; with If-None-Match: * all requests of a client would be free.
const freeTimes = 10

// staysFree reports whether a response of a free status is not charged. Clients choose 304 by a header, so
// that is bounded where the zone counts other responses. A zone that counts failures alone, such as
// 401, would refuse their clients for having asked often.
func (z *inZone) staysFree(status int) bool {
	if status != http.StatusNotModified || z.Free.Contains(http.StatusOK) {
		return true
	}
	l := z.of.limiter
	cost := max(z.ask.Cost, 1) // What is known at the end is not known of a response without a body.
	free := z.recent.addFree(z.recent.idOf(aboutFree, &z.limit, z.decidedBy()), cost, z.limit.Window, l.Now())
	if free <= freeTimes*z.ask.Events {
		return true
	}
	if times, log := l.mayLog(&z.overFree); log {
		l.Logger.Warn("a client has had ten times its limit in free responses; they are charged now",
			zap.String("zone", z.Name), zap.Int("status", status), zap.Int64("times", times))
	}
	return false
}
