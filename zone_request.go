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
func (z *Zone) request(r *http.Request, repl *caddy.Replacer, h *Handler) (store.Request, error) {
	events := z.eventsFor(repl, h)
	if events == unlimited {
		return store.Request{Events: unlimited}, nil
	}
	req := store.Request{
		Limit: &z.limit, ClientKey: z.clientKey(repl, h), Events: events, Burst: z.Burst,
		Cost: z.cost, Batch: z.batch, BatchShare: z.batchShare,
	}
	if events == 0 {
		req.Burst = 0
	}
	switch {
	case z.Cost.isDynamic() && z.isLease():
		// It is not read again.
		req.Cost = z.finalCost(repl, h)
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
func (z *Zone) readCost(repl *caddy.Replacer) (cost int64, bad string) {
	text := repl.ReplaceAll(string(z.Cost), "")
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || n < 0 || n > maxEvents {
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
func (z *Zone) finalCost(repl *caddy.Replacer, h *Handler) int64 {
	if !z.Cost.isDynamic() {
		return z.cost
	}
	cost, bad := z.readCost(repl)
	if bad != "" {
		if times, log := h.report(&z.noCost); log {
			h.logger.Warn("cost is not a number from 0 to 2^52; charging 1",
				zap.String("zone", z.Name), zap.String("cost", bad), zap.Int64("times", times))
		}
	}
	return cost
}

func (z *Zone) clientKey(repl *caddy.Replacer, h *Handler) string {
	var scratch [128]byte
	for i := range z.texts {
		key, applies := z.texts[i].clientKey(scratch[:0], repl, z)
		if applies && i < len(z.Key) {
			return string(key)
		}
		if i == len(z.texts)-1 {
			z.warnNoKey(repl, h)
			return string(key)
		}
	}
	return ""
}

func (z *Zone) warnNoKey(repl *caddy.Replacer, h *Handler) {
	times, log := h.report(&z.noKey)
	if !log {
		return
	}
	hint := "see to it that clients send what key asks for, or end key with {client_ip}"
	for _, t := range z.texts {
		for _, name := range t.placeholders {
			if strings.HasPrefix(name, "http.auth.") {
				hint = "put rate_limit into a route after the authentication, for it runs before basic_auth"
			} else if _, known := repl.Get(name); !known {
				hint = "placeholder {" + name + "} is unknown"
			}
		}
	}
	h.logger.Warn("key is empty; counting by client IP",
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
func (z *Zone) eventsFor(repl *caddy.Replacer, h *Handler) int64 {
	if !z.Events.isDynamic() {
		return z.events
	}
	text := strings.TrimSpace(repl.ReplaceAll(string(z.Events), ""))
	if text == unlimitedWord {
		return unlimited
	}
	// A number that is out of range becomes the nearest one.
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange) || n < 0:
		if times, log := h.report(&z.noEvents); log {
			h.logger.Warn("events is neither a whole number nor unlimited; using the fallback",
				zap.String("zone", z.Name), zap.String("events", clipped(text)), zap.Int64("fallback", z.events), zap.Int64("times", times))
		}
		return z.events
	case n == 0:
		return 0
	}
	least := z.leastEvents()
	most, words := z.mostEvents()
	if n >= least && n <= most {
		return n
	}
	nearest := min(max(n, least), most)
	if times, log := h.report(&z.farEvents); log {
		h.logger.Warn(fmt.Sprintf("events is not a number from %d to %s; using the nearest", least, words),
			zap.String("zone", z.Name), zap.String("events", clipped(text)), zap.Int64("nearest", nearest), zap.Int64("times", times))
	}
	return nearest
}
