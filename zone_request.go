package shardlimit

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// request is what r asks of the zone. Where Events is unlimited the zone does not
// count r; where it is 0 no store is asked.
func (z *compiledZone) request(r *http.Request, repl *caddy.Replacer, l *Limiter) (store.Request, error) {
	events := z.eventsFor(repl, l)
	if events == unlimited {
		return store.Request{Events: unlimited}, nil
	}
	req := store.Request{
		Limit: &z.limit, ClientKey: z.clientKey(repl, l), Events: events, Burst: z.Burst,
		Cost: z.Cost.Number, Batch: z.Batch, BatchShare: z.BatchShare,
	}
	if events == 0 {
		req.Burst = 0
	}
	switch {
	case z.Cost.isDynamic() && z.isLease():
		// It is not read again.
		req.Cost = z.finalCost(repl, l)
	case z.Cost.isDynamic():
		req.Cost, _ = z.readCost(repl)
	}
	if z.needsID {
		req.ID = newID()
	}
	if len(z.Reserves) == 0 {
		return req, nil
	}
	percent, err := z.reservedFrom(r)
	req.Reserved = share(req.Capacity(), percent)
	return req, err
}

// newID returns a text that no other request has.
func newID() string {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, 8), rand.Uint64())
	return base64.RawURLEncoding.EncodeToString(b)
}

// readCost returns what the zone's placeholder yields, or 1 and the text that
// is no cost.
func (z *compiledZone) readCost(repl *caddy.Replacer) (cost int64, bad string) {
	text := repl.ReplaceAll(z.Cost.Text, "")
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || n < 0 || n > store.MaxEvents {
		return 1, strconv.Quote(clipped(text))
	}
	return n, ""
}

// clipped returns the beginning of a text that clients choose, for the log.
func clipped(text string) string {
	const most = 128
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}

// finalCost is what a request costs whose response is about to begin.
func (z *compiledZone) finalCost(repl *caddy.Replacer, l *Limiter) int64 {
	if !z.Cost.isDynamic() {
		return z.Cost.Number
	}
	cost, bad := z.readCost(repl)
	if bad != "" {
		if times, log := l.mayLog(&z.noCost); log {
			l.Logger.Warn("cost is not a number from 0 to 2^52; charging 1",
				zap.String("zone", z.Name), zap.String("cost", bad), zap.Int64("times", times))
		}
	}
	return cost
}

func (z *compiledZone) clientKey(repl *caddy.Replacer, l *Limiter) string {
	var scratch [128]byte
	for i := range z.templates {
		key, applies := z.templates[i].clientKey(scratch[:0], repl, z)
		if applies && i < len(z.Key) {
			return string(key)
		}
		if i == len(z.templates)-1 {
			z.warnNoKey(repl, l)
			return string(key)
		}
	}
	return ""
}

func (z *compiledZone) warnNoKey(repl *caddy.Replacer, l *Limiter) {
	times, log := l.mayLog(&z.noKey)
	if !log {
		return
	}
	hint := "see to it that clients send what key asks for, or end key with {client_ip}"
	for _, t := range z.templates {
		for _, name := range t.placeholders {
			if strings.HasPrefix(name, "http.auth.") {
				hint = "put rate_limit into a route after the authentication, for it runs before basic_auth"
			} else if _, known := repl.Get(name); !known {
				hint = "placeholder {" + name + "} is unknown"
			}
		}
	}
	l.Logger.Warn("key is empty; counting by client IP",
		zap.String("zone", z.Name), zap.Strings("key", z.Key), zap.Int64("times", times), zap.String("hint", hint))
}

// unlimited is the number of events of a request that the zone does not limit;
// unlimitedWord is what the placeholder yields then.
const (
	unlimited     = -1
	unlimitedWord = "unlimited"
)

// eventsFor returns how many events the zone admits for the request: 0 for none,
// or unlimited.
func (z *compiledZone) eventsFor(repl *caddy.Replacer, l *Limiter) int64 {
	if !z.Events.isDynamic() {
		return z.Events.Number
	}
	text := strings.TrimSpace(repl.ReplaceAll(z.Events.Text, ""))
	if text == unlimitedWord {
		return unlimited
	}
	// A number that is out of range becomes the nearest one.
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange) || n < 0:
		if times, log := l.mayLog(&z.noEvents); log {
			l.Logger.Warn("events is neither a whole number nor unlimited; using the fallback",
				zap.String("zone", z.Name), zap.String("events", clipped(text)), zap.Int64("fallback", z.Events.Number), zap.Int64("times", times))
		}
		return z.Events.Number
	case n == 0:
		return 0
	}
	least := leastEvents(z.Burst, z.Window)
	most, words := mostEvents(z.Algorithm)
	if n >= least && n <= most {
		return n
	}
	nearest := min(max(n, least), most)
	if times, log := l.mayLog(&z.farEvents); log {
		l.Logger.Warn(fmt.Sprintf("events is not a number from %d to %s; using the nearest", least, words),
			zap.String("zone", z.Name), zap.String("events", clipped(text)), zap.Int64("nearest", nearest), zap.Int64("times", times))
	}
	return nearest
}

// reservedFrom is how many percent r must not use: what is kept for requests
// that are more important.
func (z *compiledZone) reservedFrom(r *http.Request) (percent int64, err error) {
	for _, s := range z.Reserves {
		matches, err := s.Matchers.AnyMatchWithError(r)
		if err != nil {
			return percent, err
		}
		if matches {
			break
		}
		percent += s.Percent
	}
	return percent, nil
}

// share returns that many percent of n, rounded up.
func share(n, percent int64) int64 {
	return n/100*percent + (n%100*percent+99)/100
}
