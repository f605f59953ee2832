package shardlimit

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Zone is a named limit: which requests it counts, by what, and how many it
// admits.
//
// The name is the zone's identity in a store. Zones of one name, in whatever
// handlers and Caddy instances, share their counters; within one config their
// definitions must be equal, apart from the matchers.
type Zone struct {
	// The name: letters, digits, `_`, `.` and `-`. It appears in response
	// headers, logs, metrics and in the keys of the store. Required.
	Name string `json:"name,omitempty"`

	// The requests that the zone counts; those that match any of the sets.
	// Default: all requests.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// By what clients are told apart: texts with placeholders, of which the
	// first that is not empty counts, such as
	// `["{http.request.header.X-Api-Key}", "{http.vars.client_ip}"]`.
	// A text without placeholders puts all requests into one bucket. Requests
	// to which no text applies are counted by their client IP, so that leaving
	// out a header does not lift the limit. Required.
	Key Texts `json:"key,omitempty"`

	// How many events are admitted per window and client: a number from 1 to
	// 2^52, or a text with a placeholder that yields one for the request, in
	// which case `events_fallback` is needed as well. Changing it keeps what
	// is counted. Required.
	Events Amount `json:"events,omitempty"`

	// What counts where the placeholder of `events` does not yield a number
	// from 1 to 2^52.
	EventsFallback int64 `json:"events_fallback,omitempty"`

	// The length of the window, from 1 millisecond to 100 years. A client's
	// first request opens its window; when it is over, the next request opens
	// another. Changing it starts new counters. Required.
	Window caddy.Duration `json:"window,omitempty"`

	// When requests are charged. `after`: once the response's status is known;
	// requests that run at the same time can therefore all be admitted while
	// one fits. Default: `after`.
	Charge string `json:"charge,omitempty"`

	// The response statuses that cost nothing: codes like `304` and classes
	// like `5xx`. `["none"]` charges every status. Default: `["304"]`.
	FreeStatus StatusList `json:"free_status,omitempty"`

	// If not zero, key values that are IPv4 addresses are counted by their
	// network of that many bits. Default: 0, the address itself.
	IPv4Prefix int `json:"ipv4_prefix,omitempty"`

	// If not zero, key values that are IPv6 addresses are counted by their
	// network of that many bits. One client commonly owns 64 bits worth of
	// addresses. Default: 0, the address itself.
	IPv6Prefix int `json:"ipv6_prefix,omitempty"`

	// What happens to requests while the store cannot answer. `allow`: they
	// pass. `deny`: they are answered with status 503. `local`: this process
	// counts alone, in memory. Default: what the store says, which is `allow`
	// unless configured otherwise.
	OnError string `json:"on_error,omitempty"`

	matchers caddyhttp.MatcherSets
	texts    []keyText
	events   int64
	free     statusSet
	limit    store.Limit
	onError  string
	refusal  error
	counts   zoneCounters

	noKey, noEvents throttle
}

const (
	chargeAfter = "after"

	onErrorAllow = "allow"
	onErrorDeny  = "deny"
	onErrorLocal = "local"

	maxEvents = 1 << 52
	minWindow = time.Millisecond
	maxWindow = 100 * 365 * 24 * time.Hour
)

var zoneName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// validate tells what is wrong with the zone, and how to mend it.
func (z *Zone) validate() error {
	switch {
	case z == nil:
		return errors.New("a zone is null: define or remove it")
	case z.Name == "":
		return errors.New("a zone has no name: give it one")
	case !zoneName.MatchString(z.Name):
		return fmt.Errorf("zone name %q: use only letters, digits and the characters _ . -", z.Name)
	}
	if err := z.validateOptions(); err != nil {
		return fmt.Errorf("zone %s: %w", z.Name, err)
	}
	return nil
}

func (z *Zone) validateOptions() error {
	if len(z.Key) == 0 {
		return errors.New("key is missing: add one, such as key {client_ip}, or key static for one bucket that all clients share")
	}
	if slices.Contains(z.Key, "") {
		return badOption("key", "has an empty text: remove it")
	}
	if err := z.validateEvents(); err != nil {
		return err
	}
	window := time.Duration(z.Window)
	switch {
	case window == 0:
		return errors.New("window is missing: add one, such as window 1m")
	case window < minWindow || window > maxWindow:
		return badOption("window", "%s: it must be from 1ms to 100 years", window)
	case window%time.Microsecond != 0:
		return badOption("window", "%s: it must be whole microseconds", window)
	case z.Charge != "" && z.Charge != chargeAfter:
		return badOption("charge", "%q: the only way is after", z.Charge)
	case z.IPv4Prefix < 0 || z.IPv4Prefix > 32:
		return badOption("ipv4_prefix", "%d: it must be from 0 to 32 bits", z.IPv4Prefix)
	case z.IPv6Prefix < 0 || z.IPv6Prefix > 128:
		return badOption("ipv6_prefix", "%d: it must be from 0 to 128 bits", z.IPv6Prefix)
	}
	if _, err := z.FreeStatus.compile(); err != nil {
		return badOption("free_status", "%w", err)
	}
	return validateOnError(z.OnError)
}

func (z *Zone) validateEvents() error {
	switch {
	case z.Events == "":
		return errors.New("events is missing: add it, such as events 100")
	case z.Events.isDynamic() && len(placeholdersIn(string(z.Events))) == 0:
		return badOption("events", "%s: it must be a number, or a text with a placeholder in braces", z.Events)
	case z.Events.isDynamic() && z.EventsFallback == 0:
		return badOption("events", "%s: add the number that counts where the placeholder yields none, such as events %s 100", z.Events, z.Events)
	case z.Events.isDynamic():
		return validateEventsNumber(z.EventsFallback)
	case z.EventsFallback != 0:
		return badOption("events", "%s: a second number goes with a placeholder only; remove it", z.Events)
	}
	n, err := z.Events.number()
	if err != nil {
		return badOption("events", "%q: it must be a whole number from 1 to 2^52", string(z.Events))
	}
	return validateEventsNumber(n)
}

func validateEventsNumber(n int64) error {
	if n < 1 || n > maxEvents {
		return badOption("events", "%d: it must be from 1 to 2^52", n)
	}
	return nil
}

func validateOnError(s string) error {
	switch s {
	case "", onErrorAllow, onErrorDeny, onErrorLocal:
		return nil
	default:
		return badOption("on_error", "%q: it must be allow, deny or local", s)
	}
}

// provision prepares a valid zone. onError is the store's.
func (z *Zone) provision(ctx caddy.Context, onError string) error {
	if z.MatcherSetsRaw != nil {
		sets, err := ctx.LoadModule(z, "MatcherSetsRaw")
		if err != nil {
			return fmt.Errorf("zone %s: load matchers: %w", z.Name, err)
		}
		if err := z.matchers.FromInterface(sets); err != nil {
			return fmt.Errorf("zone %s: load matchers: %w", z.Name, err)
		}
	}
	z.texts = compileKey(z.Key)
	if z.events = z.EventsFallback; !z.Events.isDynamic() {
		z.events, _ = z.Events.number()
	}
	if z.free.add(http.StatusNotModified); len(z.FreeStatus) > 0 {
		z.free, _ = z.FreeStatus.compile()
	}
	z.limit = store.Limit{Zone: z.Name, Algorithm: store.FixedWindow, Window: time.Duration(z.Window)}
	if z.onError = z.OnError; z.onError == "" {
		z.onError = onError
	}
	z.refusal = fmt.Errorf("rate limit %s exceeded", z.Name)
	z.counts = metrics.zone(z.Name)
	return nil
}

// definition is what zones of one name must agree on, as options that differ
// from the default.
func (z *Zone) definition() string {
	var b strings.Builder
	b.WriteString("key")
	for _, text := range z.Key {
		if strings.ContainsAny(text, " \t\n\"`") {
			text = strconv.Quote(text)
		}
		b.WriteString(" " + text)
	}
	events := string(z.Events)
	if n, err := z.Events.number(); err == nil {
		events = strconv.FormatInt(n, 10)
	}
	fmt.Fprintf(&b, ", events %s", events)
	if z.EventsFallback != 0 {
		fmt.Fprintf(&b, " %d", z.EventsFallback)
	}
	fmt.Fprintf(&b, ", window %s", time.Duration(z.Window))
	if free := slices.Compact(slices.Sorted(slices.Values(z.FreeStatus))); len(free) > 0 && !slices.Equal(free, []string{"304"}) {
		fmt.Fprintf(&b, ", free_status %s", strings.Join(free, " "))
	}
	if z.IPv4Prefix != 0 {
		fmt.Fprintf(&b, ", ipv4_prefix %d", z.IPv4Prefix)
	}
	if z.IPv6Prefix != 0 {
		fmt.Fprintf(&b, ", ipv6_prefix %d", z.IPv6Prefix)
	}
	if z.OnError != "" {
		fmt.Fprintf(&b, ", on_error %s", z.OnError)
	}
	return b.String()
}

// request is what r asks of the zone.
func (z *Zone) request(repl *caddy.Replacer, h *Handler) store.Request {
	return store.Request{Limit: &z.limit, ClientKey: z.clientKey(repl, h), Events: z.eventsFor(repl, h), Cost: 1}
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
	times, log := z.noKey.report(h.now())
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

// eventsFor returns how many events the zone admits for the request.
func (z *Zone) eventsFor(repl *caddy.Replacer, h *Handler) int64 {
	if !z.Events.isDynamic() {
		return z.events
	}
	text := repl.ReplaceAll(string(z.Events), "")
	n, err := strconv.ParseInt(text, 10, 64)
	if err == nil && n >= 1 && n <= maxEvents {
		return n
	}
	if times, log := z.noEvents.report(h.now()); log {
		h.logger.Warn("events is not a number from 1 to 2^52; using the fallback",
			zap.String("zone", z.Name), zap.String("events", text), zap.Int64("fallback", z.events), zap.Int64("times", times))
	}
	return z.events
}

// isFree tells whether responses with the status cost nothing.
func (z *Zone) isFree(status int) bool { return z.free.contains(status) }
