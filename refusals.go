package shardlimit

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/maypok86/otter/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	logFirst = "first"
	logAll   = "all"
	logNone  = "none"
)

// maxLoggedRefusals bounds the memory for refusals that were logged: to forget
// one costs a line.
const maxLoggedRefusals = 100_000

// loggedRefusals are the clients whose refusal was logged in this window.
type loggedRefusals = otter.Cache[identity.ID, time.Duration]

func newLoggedRefusals() *loggedRefusals {
	return otter.Must(&otter.Options[identity.ID, time.Duration]{
		MaximumSize:      maxLoggedRefusals,
		ExpiryCalculator: otter.ExpiryCreatingFunc(func(e otter.Entry[identity.ID, time.Duration]) time.Duration { return e.Value }),
	})
}

// reportRefusal logs that zone i refused, or would have refused, the request, and
// emits the event of a refusal.
func (l *Limiter) reportRefusal(p *part, i int, r *http.Request) {
	l.logRefusal(p, i, r)
	if p.outcome(i) == refused && l.Events.wants(eventExceeded) {
		l.Events.emit(eventExceeded, map[string]any{
			"zone": p.zones[i].Name, "wait": time.Duration(wait(&p.states[i])) * time.Microsecond, "remote_ip": clientIP(r),
		})
	}
}

func clientIP(r *http.Request) string {
	ip, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	return ip
}

func (l *Limiter) logRefusal(p *part, i int, r *http.Request) {
	if l.LogRefusals == logNone || l.LogRefusals == logFirst && !p.isFirstRefusal(i) {
		return
	}
	text := "rate limit exceeded"
	if p.outcome(i) == wouldRefuse {
		text = "rate limit would have been exceeded"
	}
	entry := l.Logger.Check(zapcore.InfoLevel, text)
	if entry == nil {
		return
	}
	z, st := p.zones[i], &p.states[i]
	fields := []zap.Field{
		zap.String("zone", z.Name), zap.String("key", p.shownKey(i)),
		zap.String("reason", p.reason(i)), zap.Int64("limit", st.Limit), zap.Int64("used", st.Used),
	}
	if ip := clientIP(r); l.LogKey || !z.showsAddress(p.repl, ip) {
		fields = append(fields, zap.String("remote_ip", ip))
	}
	if st.RetryAfter != store.Never {
		fields = append(fields, zap.Int64("wait", ceilSeconds(wait(st))))
	}
	entry.Write(fields...)
}

// isFirstRefusal tells whether the client was not refused before in this window.
func (p *part) isFirstRefusal(i int) bool {
	z, st := p.zones[i], &p.states[i]
	window := z.limit.Window
	if z.limit.Algorithm == store.FixedWindow && st.Reset > st.Now {
		// It began before.
		window = time.Duration(st.Reset-st.Now) * time.Microsecond
	}
	id := identity.New(0, p.reqs[i].ClientKey)
	if _, ok := z.logged.GetIfPresent(id); ok {
		return false
	}
	_, isNew := z.logged.SetIfAbsent(id, window)
	return isNew
}

// shownKey is the client key as it may be shown: itself with log_key, and else
// the beginning of its digest, by which lines about one client are found.
func (p *part) shownKey(i int) string {
	key := p.reqs[i].ClientKey
	if p.limiter.LogKey {
		return key
	}
	digest := sha256.Sum256([]byte(key))
	return hex.EncodeToString(digest[:8])
}
