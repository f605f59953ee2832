package limiter

import (
	"crypto/sha256"
	"encoding/hex"
	"hash/maphash"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/go-kratos/aegis/topk"
	"github.com/maypok86/otter/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	LogFirst = "first"
	LogAll   = "all"
	LogNone  = "none"
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
func (l *Limiter) reportRefusal(e *evaluation, i int, r *http.Request) {
	l.logRefusal(e, i, r)
	if e.outcome(i) == telemetry.Refused && l.Events.Wants(telemetry.EventExceeded) {
		l.Events.Emit(telemetry.EventExceeded, map[string]any{
			"zone": e.zones[i].Name, "wait": time.Duration(wait(&e.states[i])) * time.Microsecond, "remote_ip": clientIP(r),
		})
	}
}

func clientIP(r *http.Request) string {
	ip, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	return ip
}

func (l *Limiter) logRefusal(e *evaluation, i int, r *http.Request) {
	if l.LogRefusals == LogNone || l.LogRefusals == LogFirst && !e.isFirstRefusal(i) {
		return
	}
	text := "rate limit exceeded"
	if e.outcome(i) == telemetry.WouldRefuse {
		text = "rate limit would have been exceeded"
	}
	entry := l.Logger.Check(zapcore.InfoLevel, text)
	if entry == nil {
		return
	}
	z, st := e.zones[i], &e.states[i]
	fields := []zap.Field{
		zap.String("zone", z.Name), zap.String("key", e.shownKey(i)),
		zap.String("reason", e.reason(i)), zap.Int64("limit", st.Limit), zap.Int64("used", st.Used),
	}
	if ip := clientIP(r); l.LogKey || !z.showsAddress(e.repl, ip) {
		fields = append(fields, zap.String("remote_ip", ip))
	}
	if st.RetryAfter != store.Never {
		fields = append(fields, zap.Int64("wait", ceilSeconds(wait(st))))
	}
	entry.Write(fields...)
}

// isFirstRefusal tells whether the client was not refused before in this window.
func (e *evaluation) isFirstRefusal(i int) bool {
	z, st := e.zones[i], &e.states[i]
	window := z.limit.Window
	if z.limit.Algorithm == store.FixedWindow && st.Reset > st.Now {
		// It began before.
		window = time.Duration(st.Reset-st.Now) * time.Microsecond
	}
	id := identity.New(0, e.reqs[i].ClientKey)
	if _, ok := z.logged.GetIfPresent(id); ok {
		return false
	}
	_, isNew := z.logged.SetIfAbsent(id, window)
	return isNew
}

// shownKey is the client key as it may be shown: itself with log_key, and else
// the beginning of its digest, by which lines about one client are found.
func (e *evaluation) shownKey(i int) string {
	key := e.reqs[i].ClientKey
	if e.limiter.LogKey {
		return key
	}
	digest := sha256.Sum256([]byte(key))
	return hex.EncodeToString(digest[:8])
}

// refusedClients tells which clients of a zone were refused most in the last
// minutes, in bounded memory: it counts by sketches, each for a part of that
// time. A client key belongs to one stripe, so that refusals at the same time
// seldom meet at one lock.
type refusedClients struct {
	began   time.Time
	seed    maphash.Seed
	stripes [refusedStripes]refusedStripe
}

const (
	refusedStripes = 4
	// refusedPeriod is what one sketch covers, and refusedPeriods how many are
	// kept: the one that runs now and those before it, five minutes together.
	refusedPeriod  = 75 * time.Second
	refusedPeriods = 4

	// A sketch takes less than 19 kB, client keys included, of which 5 are its
	// random numbers; a zone less than 300 kB, and nothing before it refuses
	// somebody.
	sketchClients = 32
	sketchWidth   = 128
	sketchDepth   = 3
	// sketchDecay is HeavyKeeper's: how likely a client that has been counted n
	// times loses one to another that has the same place, is its n-th power.
	sketchDecay = 0.925
)

type refusedStripe struct {
	mu       sync.Mutex
	sketches [refusedPeriods]refusedSketch
	// Two cache lines, lest one stripe's lock slow its neighbours down.
	_ [24]byte
}

// refusedSketch is of the period of that number, since 1970.
type refusedSketch struct {
	period int64
	counts topk.Topk
}

func newRefusedClients(now time.Time) *refusedClients {
	return &refusedClients{began: now, seed: maphash.MakeSeed()}
}

func periodOf(now time.Time) int64 { return now.UnixNano() / int64(refusedPeriod) }

// note counts a refusal.
func (c *refusedClients) note(clientKey string, now time.Time) {
	s := &c.stripes[maphash.String(c.seed, clientKey)%refusedStripes]
	period := periodOf(now)
	s.mu.Lock()
	defer s.mu.Unlock()
	sketch := &s.sketches[period%refusedPeriods]
	if period < sketch.period {
		// Somebody who was held up, or a clock that was set back.
		return
	}
	if sketch.counts == nil || sketch.period != period {
		*sketch = refusedSketch{period, topk.NewHeavyKeeper(sketchClients, sketchWidth, sketchDepth, sketchDecay, 1)}
	}
	sketch.counts.Add(clientKey, 1)
}

// RefusedClient is how often a client was refused: at least so often, and with a
// likelihood of one in billions more than it was.
type RefusedClient struct {
	ClientKey string `json:"client_key"`
	Store     string `json:"store"`
	Count     int64  `json:"count"`
}

// top returns up to n clients that were refused most, those first that were most
// often.
func (c *refusedClients) top(n int, store string, now time.Time) []RefusedClient {
	counts := map[string]int64{}
	for i := range c.stripes {
		c.stripes[i].sum(counts, periodOf(now))
	}
	clients := make([]RefusedClient, 0, len(counts))
	for key, count := range counts {
		clients = append(clients, RefusedClient{ClientKey: key, Store: store, Count: count})
	}
	return mostRefused(clients, n)
}

// mostRefused returns the n clients of the list that were refused most.
func mostRefused(clients []RefusedClient, n int) []RefusedClient {
	slices.SortFunc(clients, func(a, b RefusedClient) int {
		if a.Count != b.Count {
			return int(max(min(b.Count-a.Count, math.MaxInt32), math.MinInt32))
		}
		return strings.Compare(a.ClientKey, b.ClientKey)
	})
	return clients[:min(n, len(clients))]
}

// sum adds what the stripe counted in the last periods.
func (s *refusedStripe) sum(counts map[string]int64, period int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.sketches {
		sketch := &s.sketches[i]
		switch {
		case sketch.counts == nil:
		case sketch.period <= period-refusedPeriods:
			// Nobody was refused since: what it says is over.
			*sketch = refusedSketch{}
		default:
			for _, client := range sketch.counts.List() {
				counts[client.Key] += int64(client.Count)
			}
		}
	}
}

// since is how much time top covers.
func (c *refusedClients) since(now time.Time) time.Duration {
	first := time.Unix(0, (periodOf(now)-refusedPeriods+1)*int64(refusedPeriod))
	if first.Before(c.began) {
		first = c.began
	}
	return now.Sub(first)
}

// RefusedMost returns up to n clients that a zone refused most in these stores, and
// how much time the counts cover.
func RefusedMost(zone string, storeNames []string, n int, now time.Time) (clients []RefusedClient, since time.Duration) {
	for _, name := range storeNames {
		if state, ok := zoneStates.find(ZoneID{name, zone}); ok {
			since = max(since, state.refused.since(now))
			clients = append(clients, state.refused.top(n, name, now)...)
		}
	}
	return mostRefused(clients, n), since
}
