package limiter

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"hash/maphash"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/go-kratos/aegis/topk"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Values of the option log_refusals.
const (
	LogFirst = "first"
	LogAll   = "all"
	LogNone  = "none"
)

// reportRefusal logs that the zone refused the request, or would have, and emits the
// event of a refusal.
func (z *inZone) reportRefusal(r *http.Request) {
	l := z.of.limiter
	r = z.requestOf(r)
	z.logRefusal(r)
	event := telemetry.EventExceeded
	if z.outcome() == telemetry.WouldRefuse {
		event = telemetry.EventWouldRefuse
	}
	if l.Events.Wants(event) {
		l.Events.Emit(event, map[string]any{
			"zone": z.Name, "wait": time.Duration(wait(&z.ask.State)) * time.Microsecond, "remote_ip": clientIP(r),
		})
	}
}

// reportNear reports, once for each client and window, that the share of the limit that
// warn names is used up.
func (z *inZone) reportNear() {
	st, l := &z.ask.State, z.of.limiter
	if z.Warn == 0 || !z.hasAnswered() || st.Limit == 0 || st.Used < Share(st.Limit, z.Warn) {
		return
	}
	if z.SettleAtEnd && st.Reset <= l.Now().UnixMicro() || !z.isFirst(aboutNearness) {
		// The response has outlasted the window, or this was reported.
		return
	}
	z.Counts.Near.Inc()
	l.Logger.Warn("a client is near its rate limit",
		zap.String("zone", z.Name), zap.String("key", z.shownKey()), zap.Int64("limit", st.Limit), zap.Int64("used", st.Used))
	if l.Events.Wants(telemetry.EventNear) {
		ip := z.replOf().ReplaceAll(clientIPText, "")
		l.Events.Emit(telemetry.EventNear, map[string]any{"zone": z.Name, "limit": st.Limit, "used": st.Used, "remote_ip": ip})
	}
}

// refusalsLogger is the child of the handler's logger that refusals are logged under, so that a log
// may include them without taking the warnings out of Caddy's default log.
const refusalsLogger = "refusals"

func (z *inZone) logRefusal(r *http.Request) {
	l, st := z.of.limiter, &z.ask.State
	about := uint32(aboutRefusal)
	if z.role == blocks {
		about = aboutBlock
	}
	if l.LogRefusals == LogNone || l.LogRefusals == LogFirst && !z.isFirst(about) {
		return
	}
	text := "rate limit exceeded"
	if z.outcome() == telemetry.WouldRefuse {
		text = "rate limit would have been exceeded"
	}
	entry := l.Logger.Named(refusalsLogger).Check(zapcore.InfoLevel, text)
	if entry == nil {
		return
	}
	fields := []zap.Field{
		zap.String("zone", z.Name), zap.String("key", z.shownKey()),
		zap.Stringer("reason", z.reason()), zap.Int64("limit", st.Limit), zap.Int64("used", st.Used),
	}
	if ip := clientIP(r); l.LogKey || !z.showsAddress(r, z.replOf(), ip) {
		fields = append(fields, zap.String("remote_ip", ip))
	}
	if st.RetryAfter != store.Never {
		fields = append(fields, zap.Int64("wait", ceilSeconds(wait(st))))
	}
	entry.Write(fields...)
}

// ReportOverride logs that an operator has changed what a zone does for a client, or has
// ended that, and emits an event. The warning, if any, says which shards may lack the change.
func (l *Limiter) ReportOverride(o *store.Override, hasEnded bool, warning error) {
	what := "began"
	if hasEnded {
		what = "ended"
	}
	of, fields := " of a client ", []zap.Field{zap.String("zone", o.Zone), zap.String("by", o.By), zap.String("reason", o.Reason), zap.NamedError("warning", warning)}
	if o.Kind == store.OverrideZone {
		of = " rule "
	} else {
		fields = append(fields, zap.String("key", l.shown(o.ClientKey)))
	}
	if !hasEnded {
		fields = append(fields, zap.Int64("events", o.Events), zap.Int64("burst", o.Burst), zap.Float64p("enforce", o.Enforce), zap.Float64p("rollout", o.Rollout))
	}
	if !hasEnded && o.Until != store.NoEnd {
		fields = append(fields, zap.Time("until", time.UnixMicro(o.Until)))
	}
	l.Logger.Info("operator's "+string(o.Kind)+of+what, fields...)
	if l.Events.Wants(telemetry.EventOverride) {
		l.Events.Emit(telemetry.EventOverride, map[string]any{
			"zone": o.Zone, "kind": string(o.Kind), "key": l.shown(o.ClientKey), "ended": hasEnded, "by": o.By, "reason": o.Reason,
		})
	}
}

// What is logged of a bucket once in a window.
const (
	aboutRefusal = iota
	aboutNearness
	aboutFree
	aboutBlock
	abouts
)

// isFirst reports whether this was not logged of the bucket of the zone in this window
// before, and notes it.
func (z *inZone) isFirst(about uint32) bool {
	st := &z.ask.State
	now := z.of.limiter.Now()
	is := logged{until: now.Add(z.limit.Window)}
	if algorithm.Of(z.limit.Algorithm).Windowed() && st.Reset > st.Now && about != aboutBlock {
		is = logged{reset: st.Reset, until: now.Add(time.Duration(st.Reset-st.Now) * time.Microsecond)}
	}
	return z.recent.isFirst(z.recent.idOf(about, &z.limit, z.decidedBy()), is, now)
}

// shownKey returns the client key as it may be shown: itself with log_key, or else
// the beginning of its digest, by which entries about one client can be found.
func (z *inZone) shownKey() string { return z.of.limiter.shown(z.decidedBy()) }

func (l *Limiter) shown(key string) string {
	if l.LogKey {
		return ShownKey(key)
	}
	digest := sha256.Sum256([]byte(key))
	return hex.EncodeToString(digest[:8])
}

func clientIP(r *http.Request) string {
	ip, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	return ip
}

// refusedClients counts which clients of a zone were refused most in the last
// minutes, in bounded memory: by sketches, each for a part of that time. A client
// key belongs to one stripe, so that concurrent refusals seldom contend for a lock.
type refusedClients struct {
	began   time.Time
	seed    maphash.Seed
	stripes [refusedStripes]refusedStripe
}

const (
	refusedStripes = 4
	// refusedPeriod is the time that one sketch covers, and refusedPeriods is how
	// many are kept, with the current one: five minutes together.
	refusedPeriod  = 75 * time.Second
	refusedPeriods = 4

	// A sketch takes less than 19 kB, with its client keys and 5 kB of random
	// numbers, the times of a stripe 4 kB; a zone less than 300 kB, and next to nothing
	// before its first refusal.
	sketchClients = 32
	sketchWidth   = 128
	sketchDepth   = 3
	// sketchDecay is HeavyKeeper's: its n-th power is the probability that a client
	// with a count of n loses one to another with the same place.
	sketchDecay = 0.925

	// lastPlaces is for how many clients of a stripe the last refusal is remembered.
	lastPlaces = 1 << 9
)

type refusedStripe struct {
	mu       sync.Mutex
	sketches [refusedPeriods]refusedSketch
	// last has, at the place of a client, the upper half of the hash of the one that was
	// refused there last, and when: in seconds since the epoch. It is nil before the first
	// refusal.
	last *[lastPlaces]uint64
	// lastAt is the last refusal of any client, in microseconds since the epoch.
	lastAt int64
	// Two cache lines, so that stripes share none.
	_ [8]byte
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
	hash := maphash.String(c.seed, clientKey)
	s := &c.stripes[hash%refusedStripes]
	period := periodOf(now)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noteLast(hash, now)
	sketch := &s.sketches[period%refusedPeriods]
	if period < sketch.period {
		// The caller was delayed, or the clock was set back.
		return
	}
	if sketch.counts == nil || sketch.period != period {
		*sketch = refusedSketch{period, topk.NewHeavyKeeper(sketchClients, sketchWidth, sketchDepth, sketchDecay, 1)}
	}
	sketch.counts.Add(clientKey, 1)
}

// noteLast remembers when a client was refused, in place of another.
func (s *refusedStripe) noteLast(hash uint64, now time.Time) {
	if s.last == nil {
		s.last = new([lastPlaces]uint64)
	}
	s.last[placeOf(hash)] = hash>>32<<32 | uint64(uint32(now.Unix())) //nolint:gosec // until 2106
	s.lastAt = max(s.lastAt, now.UnixMicro())
}

func placeOf(hash uint64) uint64 { return hash / refusedStripes % lastPlaces }

// lastOf returns when the client was last refused, in seconds since the epoch; 0 if it was
// not, or another client has its place. The chance of a wrong answer is one in billions.
func (c *refusedClients) lastOf(clientKey string) int64 {
	hash := maphash.String(c.seed, clientKey)
	s := &c.stripes[hash%refusedStripes]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil || s.last[placeOf(hash)]>>32 != hash>>32 {
		return 0
	}
	return int64(uint32(s.last[placeOf(hash)])) //nolint:gosec // its lower half
}

// ForgetReports has the next refusal of a client logged as the first of its window, and
// its nearness reported again, and ends what its upstream has asked. It is called when an operator has emptied its bucket.
func (z *Zone) ForgetReports(storeName, clientKey string) {
	if state := findState(ZoneID{storeName, z.Name}); state != nil {
		for _, about := range []uint32{aboutRefusal, aboutNearness, aboutFree} {
			state.recent.forget(state.recent.idOf(about, &z.limit, clientKey))
		}
		if z.isKeyForAll(clientKey) {
			state.pause.end()
		}
	}
}

// LastRefusal returns when a client of a zone was last refused in a store, in seconds
// since the epoch; 0 if that is not known.
func LastRefusal(id ZoneID, clientKey string) float64 {
	if state := findState(id); state != nil {
		return float64(state.refused.lastOf(clientKey))
	}
	return 0
}

// LastRefusalOfAny returns when any client of a zone was last refused in a store, in
// seconds since the epoch; 0 if none was.
func LastRefusalOfAny(id ZoneID) float64 {
	last := int64(0)
	if state := findState(id); state != nil {
		for i := range state.refused.stripes {
			s := &state.refused.stripes[i]
			s.mu.Lock()
			last = max(last, s.lastAt)
			s.mu.Unlock()
		}
	}
	return EpochSeconds(last)
}

// RefusedClient is how often a client was refused: a lower bound, but for a chance of one in billions.
type RefusedClient struct {
	ClientKey string
	Store     string
	Count     int64
	// LastRefused is in seconds since the epoch; 0 if it was forgotten.
	LastRefused float64
}

// RefusedMost returns up to n clients that a zone refused most in some stores, and
// how much time the counts cover.
func RefusedMost(zone string, storeNames []string, n int, now time.Time) (clients []RefusedClient, since time.Duration) {
	for _, name := range storeNames {
		if state := findState(ZoneID{name, zone}); state != nil {
			since = max(since, state.refused.since(now))
			clients = append(clients, state.refused.top(n, name, now)...)
		}
	}
	return mostRefused(clients, n), since
}

// top returns up to n clients that were refused most, in descending order.
func (c *refusedClients) top(n int, store string, now time.Time) []RefusedClient {
	counts := map[string]int64{}
	for i := range c.stripes {
		c.stripes[i].sum(counts, periodOf(now))
	}
	clients := make([]RefusedClient, 0, len(counts))
	for key, count := range counts {
		clients = append(clients, RefusedClient{ClientKey: key, Store: store, Count: count, LastRefused: float64(c.lastOf(key))})
	}
	return mostRefused(clients, n)
}

// sum adds the counts of the stripe in the last periods.
func (s *refusedStripe) sum(counts map[string]int64, period int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.sketches {
		sketch := &s.sketches[i]
		switch {
		case sketch.counts == nil:
		case sketch.period <= period-refusedPeriods:
			// No client was refused since: the counts are too old.
			*sketch = refusedSketch{}
		default:
			for _, client := range sketch.counts.List() {
				counts[client.Key] += int64(client.Count)
			}
		}
	}
}

// since returns how much time top covers.
func (c *refusedClients) since(now time.Time) time.Duration {
	first := time.Unix(0, (periodOf(now)-refusedPeriods+1)*int64(refusedPeriod))
	if first.Before(c.began) {
		first = c.began
	}
	return now.Sub(first)
}

// mostRefused returns the n clients that were refused most, in descending order.
func mostRefused(clients []RefusedClient, n int) []RefusedClient {
	slices.SortFunc(clients, func(a, b RefusedClient) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), strings.Compare(a.ClientKey, b.ClientKey))
	})
	return clients[:min(n, len(clients))]
}
