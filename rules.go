package shardlimit

import (
	"cmp"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/retryafter"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// The days on which weeks can start.
const (
	weekStartsMonday = "monday"
	weekStartsSunday = "sunday"
)

// notWhileRunning is why an option does not go with an algorithm.
const notWhileRunning = "does not go with %s, which counts requests while they run: remove it"

// validate returns what is wrong with the handler, and how to repair it.
func (l *Limits) validate() error { return option.Check(l.options(nil)) }

func (l *Limits) validateStore() error {
	_, _, err := rawStoreName(l.StoreRaw)
	return err
}

func (l *Limits) validateRollout() error {
	own, isName, _ := rawStoreName(l.StoreRaw) // validated
	return l.Rollout.validate(own, isName)
}

func (l *Limits) validateZones() error {
	if len(l.Zones) == 0 && !l.isService {
		return option.Errorf("rate_limit", "has no zone: add one, such as zone api { key {client_ip}; events 100; window 1m } with a line for each option").
			Field("zones").JSONf(`is empty: add one, such as {"name": "api", "key": "{http.vars.client_ip}", "events": 100, "window": "1m"}`)
	}
	names := map[string]bool{}
	for i, z := range l.Zones {
		if z != nil {
			z.isService = l.isService
		}
		if err := z.validate(l.pathOf(i)); err != nil {
			return err
		}
		if names[z.Name] {
			return option.Errorf("zone "+z.Name, "is defined twice in one %s: rename one", l.directive()).
				Field(l.pathOf(i)).JSONf("has the name of another zone, %s: rename one", z.Name)
		}
		names[z.Name] = true
	}
	return nil
}

func (l *Limits) validateJitter() error {
	switch {
	case l.Jitter > 1 && l.Jitter <= 100:
		return option.Errorf("jitter", "%v: it is a fraction, from 0 to 1: is it meant in percent? Then write %v", l.Jitter, math.Round(l.Jitter*1e6)/1e8)
	case l.Jitter < 0, l.Jitter > 1, math.IsNaN(l.Jitter):
		return option.Errorf("jitter", "%v: it must be from 0 to 1, such as 0.2", l.Jitter)
	}
	return nil
}

func (l *Limits) validateIgnore() error {
	for _, name := range l.Ignore {
		if name == "" {
			return option.Errorf("ignore", "has an empty name: remove it")
		}
		if err := option.OneOf("ignore", name, lint.Names()...); err != nil {
			return err
		}
	}
	return nil
}

// pathOf returns where JSON has a zone. Those of rate_limits are the last, in alphabetical order.
func (l *Limits) pathOf(zone int) string {
	if named := len(l.Zones) - l.named; zone >= named && l.Zones[zone] != nil {
		return "rate_limits." + l.Zones[zone].Name
	}
	return fmt.Sprintf("zones[%d]", zone)
}

// validate returns what is wrong with the zone, which JSON has at the path, and how to repair it.
func (z *Zone) validate(path string) error {
	switch {
	case z == nil:
		return option.Errorf("a zone", "is null: define or remove it").Field(path)
	case z.Name == "":
		return option.Errorf("a zone", "has no name: give it one").Field(path)
	case !option.ValidName(z.Name):
		return option.Errorf("zone", "name %q: use only letters, digits and the characters _ . -", z.Name).
			Field(path).JSONf("has the name %q: use only letters, digits and the characters _ . -", z.Name)
	}
	err := option.Check(z.options(httpcaddyfile.Helper{}))
	if err == nil && z.isService {
		err = z.validateInService()
	}
	if err != nil {
		return option.In("zone "+z.Name, path, err)
	}
	return nil
}

// validateInService returns what has no effect where a service asks the zone: it has no responses, and
// does not know when what it admits ends.
func (z *Zone) validateInService() error {
	const noResponse = "has no effect in rate_limit_service, which sees no responses: remove it"
	switch {
	case z.isLease():
		return option.Errorf("algorithm", "%s counts requests while they run, and a service does not know when they end: write another", z.algorithm())
	case z.Charge == limiter.ChargeAfter:
		return option.Errorf("charge", "after goes with responses, and rate_limit_service sees none: remove it")
	case z.Status != 0:
		return option.Errorf("status", "has no effect in rate_limit_service, whose responses are those of the protocol: remove it")
	case len(z.CountStatus) > 0:
		return option.Errorf("count_status", noResponse)
	case len(z.CountStatusNot) > 0:
		return option.Errorf("count_status", noResponse).Field("count_status_not")
	case len(z.ResetStatus) > 0:
		return option.Errorf("reset_status", noResponse)
	case z.ObeyUpstream:
		return option.Errorf("obey_upstream", noResponse)
	case z.isCostKnownAtEnd():
		return option.Errorf("cost", "%s is known when a response has ended, and rate_limit_service sees none: name an entry, as in {rate_limit_service.<key>}", z.Cost)
	case len(z.Key) > 0:
		return nil
	}
	const wholeKey = "needs a key with the address alone: add key {rate_limit_service.remote_address}"
	switch {
	case z.IPv4Prefix != 0:
		return option.Errorf("ipv4_prefix", wholeKey)
	case z.IPv6Prefix != 0:
		return option.Errorf("ipv6_prefix", wholeKey)
	}
	return nil
}

func (z *Zone) validateKey() error {
	switch {
	case len(z.Key) == 0 && z.isService:
		return nil
	case len(z.Key) == 0:
		return option.Errorf("key", "is missing: add one, such as key {client_ip}, or key static for one bucket that all clients share").
			JSONf(`is missing: add one, such as "{http.vars.client_ip}", or "static" for one bucket that all clients share`)
	case slices.Contains(z.Key, ""):
		return option.Errorf("key", "has an empty text: remove it")
	}
	if err := validateKnownInTime("key", strings.Join(z.Key, " ")); err != nil {
		return err
	}
	return limiter.CheckKey(z.Key)
}

// validateKnownInTime checks that no placeholder of an option is known only when the
// response has ended.
func validateKnownInTime(name, text string) error {
	for _, placeholder := range limiter.PlaceholdersIn(text) {
		if limiter.IsKnownAtEnd(placeholder) {
			return option.Errorf(name, "{%s} is known when the response has ended: only cost can be made of it", placeholder)
		}
	}
	return nil
}

func validatePrefix(name string, bits, most int) error {
	if bits < 0 || bits > most {
		return option.Errorf(name, "%d: it must be from 1 to %d bits", bits, most).
			JSONf("%d: it must be from 1 to %d bits, or 0 for the whole address", bits, most)
	}
	return nil
}

// algorithm returns the algorithm by which the zone counts: the default if none is named.
func (z *Zone) algorithm() store.Algorithm {
	a, _ := store.ParseAlgorithm(z.Algorithm)
	return a
}

func isWindowed(a store.Algorithm) bool { return algorithm.Of(a).Windowed() }
func isBatched(a store.Algorithm) bool  { return algorithm.Of(a).Unbatched == "" }

func (z *Zone) validateEvents() error {
	if z.Events == "" {
		return option.Errorf("events", "is missing: add it, such as events 100").JSONf("is missing: add it, such as 100")
	}
	return validateAmount("events", z.Events, z.EventsFallback, z.algorithm())
}

// validateAmount checks an option that is a number from 1 on, or a placeholder and its
// fallback.
func validateAmount(name string, a Amount, fallback int64, by store.Algorithm) error {
	if events, window, ok := rateIn(string(a)); ok {
		return option.Errorf(name, "%s: write events %s and window %s", a, events, window).
			JSONf(`"%s": write "events": %s and "window": "%s"`, a, events, window)
	}
	field := name
	n, err := a.number()
	switch {
	case a.isDynamic() && !a.hasPlaceholder():
		return option.Errorf(name, "%s: it must be a number, or a text with a placeholder in braces", a)
	case a.isDynamic() && fallback == 0:
		return option.Errorf(name, "%s: add the number that counts where the placeholder yields none, such as %s %s 100", a, name, a).
			Field(name+"_fallback").JSONf("is missing: add the number that counts where the placeholder %s yields none, such as 100", a)
	case a.isDynamic():
		n, field = fallback, name+"_fallback"
	case fallback != 0 && a == "":
		return option.Errorf(name+"_fallback", "goes with a placeholder in %s only: remove it", name)
	case fallback != 0:
		return option.Errorf(name, "%s: a second number goes with a placeholder only; remove it", a).
			Field(name+"_fallback").JSONf("goes with a placeholder in %s only: remove it", name)
	case a == limiter.UnlimitedWord:
		return option.Errorf(name, "unlimited: only a placeholder can yield that; remove the zone, because it would limit nothing")
	case err != nil:
		return option.Errorf(name, "%q: it must be a whole number from 1 to %s", string(a), algorithm.Of(by).MostWords)
	}
	if err := algorithm.CheckEvents(by, n); err != nil {
		return option.Errorf(name, "%w", err).Field(field)
	}
	return validateKnownInTime(name, string(a))
}

func (z *Zone) validateWindow() error {
	if err := z.validateCalendar(); err != nil {
		return err
	}
	if z.Window == 0 && z.Calendar == "" && !z.isLease() && (!z.Align || algorithm.Of(z.algorithm()).Windowed()) {
		return option.Errorf("window", "is missing: add one, such as window 1m").JSONf(`is missing: add one, such as "1m"`)
	}
	limit := store.Limit{Algorithm: z.algorithm(), Window: z.window(), Align: z.Align, Calendar: z.calendar()}
	if z.Calendar != "" {
		limit.Window, limit.Align = limit.Calendar.Window(), true
	}
	if invalid := algorithm.CheckLimit(&limit); invalid != nil {
		return z.invalidWindow(invalid)
	}
	return nil
}

// invalidWindow returns the error of a window in the words of the options.
func (z *Zone) invalidWindow(invalid *algorithm.Invalid) error {
	switch invalid.Field {
	case "Align":
		return option.Errorf("window", "aligned %s: remove it", invalid.Problem).Field("align").JSONf("%s: remove it", invalid.Problem)
	case "Calendar":
		return option.Errorf("window", "%s %s: write a length, such as window 24h", z.Calendar, invalid.Problem).
			Field("calendar").JSONf("%s: remove it, and add window, such as \"24h\"", invalid.Problem)
	case "Calendar.Unit":
		return option.OneOf("calendar", z.Calendar, string(store.Day), string(store.Week), string(store.Month), string(store.Year))
	case "Calendar.TimeZone":
		return option.Errorf("window", "%s in %s", z.Calendar, invalid.Problem).Field("time_zone").JSONf("%s", invalid.Problem)
	}
	err := option.Errorf("window", "%s", invalid.Problem)
	if z.Window > 0 && time.Duration(z.Window) < time.Millisecond {
		// A number without a unit.
		return err.JSONf("%s; numbers are nanoseconds, so write a text, such as \"60s\"", invalid.Problem)
	}
	return err
}

// validateCalendar checks which options of the window go together.
func (z *Zone) validateCalendar() error {
	switch w := z.WeekStarts; {
	case z.Calendar == "" && z.TimeZone != "":
		return option.Errorf("window", "in %s goes with day, week, month or year only: remove it, or write such a window", z.TimeZone).
			Field("time_zone").JSONf("goes with calendar only: remove it, or add calendar")
	case z.Calendar != string(store.Week) && w != "":
		return option.Errorf("window", "from %s goes with week only: remove it, or write window week", w).
			Field("week_starts").JSONf("goes with calendar week only: remove it, or write \"calendar\": \"week\"")
	case z.Calendar == "":
		return nil
	case z.Window != 0:
		return option.Errorf("calendar", "%s and window exclude each other: remove one", z.Calendar)
	case z.Align && isWindowed(z.algorithm()):
		return option.Errorf("window", "%s begins for all clients at once: remove aligned", z.Calendar).
			Field("align").JSONf("has no effect with calendar, whose windows begin for all clients at once: remove it")
	case w != "" && w != weekStartsMonday && w != weekStartsSunday:
		return option.Errorf("window", "%s from %q: it must be monday or sunday", z.Calendar, w).
			Field("week_starts").JSONf("%q: it must be monday or sunday", w)
	}
	return nil
}

func (z *Zone) validateBurst() error {
	switch {
	case z.Burst == "" && z.BurstFallback == 0:
		return nil
	case z.Burst != "" && !z.algorithm().HasBurst():
		return option.Errorf("burst", "goes with algorithm %[1]s only: remove it, or write algorithm %[1]s", algorithm.Names(store.Algorithm.HasBurst))
	}
	if err := validateAmount("burst", z.Burst, z.BurstFallback, z.algorithm()); err != nil {
		return err
	}
	events, burst := z.Events.quantity(z.EventsFallback).Number, z.Burst.quantity(z.BurstFallback).Number
	limit := store.Limit{Algorithm: z.algorithm(), Window: time.Duration(z.Window)}
	if err := algorithm.CheckBurst(&limit, events, burst); err != nil {
		return option.Errorf("burst", "%w", err)
	}
	return nil
}

func (z *Zone) validateCost() error {
	switch {
	case z.CostFallback != nil && !z.Cost.isDynamic():
		return option.Errorf("cost", "%s: a second number goes with a placeholder only; remove it", cmp.Or(z.Cost, "1")).
			Field("cost_fallback").JSONf("goes with a placeholder in cost only: remove it")
	case z.CostFallback != nil && (*z.CostFallback < 0 || *z.CostFallback > store.MaxEvents):
		return option.Errorf("cost", "%s %d: the fallback must be from 0 to 2^52", z.Cost, *z.CostFallback).
			Field("cost_fallback").JSONf("%d: it must be from 0 to 2^52", *z.CostFallback)
	case z.Cost == "":
		return nil
	case z.Cost.isDynamic():
		return z.validateSum()
	}
	n, err := z.Cost.number()
	if err != nil || n < 0 || n > store.MaxEvents {
		return option.Errorf("cost", "%q: it must be a whole number from 0 to 2^52, or a placeholder", string(z.Cost))
	}
	most, err := z.Events.number()
	raise := "events"
	if z.Burst != "" {
		most, err = z.Burst.number()
		raise = "burst"
	}
	if err == nil && n > most {
		return option.Errorf("cost", "%d is more than the %d that the zone ever admits, so no request would pass: lower it, or raise %s", n, most, raise)
	}
	return nil
}

// validateSum checks a cost that depends on the request.
func (z *Zone) validateSum() error {
	sum, rest, err := limiter.ParseSum(string(z.Cost))
	if err != nil {
		return option.Errorf("cost", "%s: %w", z.Cost, err)
	}
	if rest != "" {
		return option.Errorf("cost", "%s: %q is behind the sum; terms are added with +, and the fallback is cost_fallback", z.Cost, rest)
	}
	if z.isLease() && sum.IsKnownAtEnd() {
		return option.Errorf("cost", "%s is known when the response has ended, and does not go with %s, which counts requests while they run: use another", z.Cost, z.algorithm())
	}
	return nil
}

// isCostKnownAtEnd reports whether the cost is made of what is known when the response
// has ended.
func (z *Zone) isCostKnownAtEnd() bool {
	return slices.ContainsFunc(limiter.PlaceholdersIn(string(z.Cost)), limiter.IsKnownAtEnd)
}

func (z *Zone) validateCharge() error {
	if z.isLease() && z.Charge == limiter.ChargeAfter {
		return option.Errorf("charge", "after: %s always charges before; remove it", z.algorithm())
	}
	return nil
}

func (z *Zone) validateBatch() error {
	batch, err := z.Batch.parse()
	if err != nil {
		return err
	}
	a := z.algorithm()
	events, eventsErr := z.Events.number()
	switch hasBatch := batch != 0; {
	case hasBatch && !isBatched(a):
		return option.Errorf("batch", "does not go with %s, %s: remove it, or use %s", a, algorithm.Of(a).Unbatched, algorithm.Names(isBatched))
	case hasBatch && z.Charge != limiter.ChargeBefore && !z.isService:
		return option.Errorf("batch", "needs charge before: write it, or remove batch").
			JSONf(`needs "charge": "before": write it, or remove batch`)
	case hasBatch && len(z.Reserves) > 0:
		return option.Errorf("batch", "does not go with reserve, because what is reserved could not be kept apart: remove one").
			JSONf("does not go with reserves, because what is reserved could not be kept apart: remove one")
	case eventsErr == nil && batch > events:
		return option.Errorf("batch", "%d: it must be at most events, which is %d", batch, events)
	}
	return nil
}

func (z *Zone) validateCountStatus() error {
	const not = "count_status_not"
	given := len(z.CountStatus) > 0 || len(z.CountStatusNot) > 0
	switch {
	case given && z.isLease():
		bad := option.Errorf("count_status", notWhileRunning, z.algorithm())
		if len(z.CountStatus) == 0 {
			return bad.Field(not)
		}
		return bad
	case len(z.CountStatus) > 0 && len(z.CountStatusNot) > 0:
		return option.Errorf("count_status", "and count_status_not exclude each other: remove one")
	case slices.Contains(z.CountStatus, "none"):
		return option.Errorf("count_status", "none would never charge: name statuses, such as 401 403")
	case z.CountStatusNot.isAll():
		return option.Errorf("count_status", "not all would never charge: name statuses, such as 304").
			Field(not).JSONf("all would never charge: name statuses, such as 304")
	case z.CountStatus.isAll():
		return nil
	}
	if _, err := z.CountStatus.compile(); err != nil {
		return option.Errorf("count_status", "%w, or the word all alone", err)
	}
	if _, err := z.CountStatusNot.compile(); err != nil {
		return option.Errorf("count_status", "not %w", err).Field(not).JSONf("%w", err)
	}
	return nil
}

func (z *Zone) validateResetStatus() error {
	switch {
	case len(z.ResetStatus) > 0 && z.isLease():
		return option.Errorf("reset_status", notWhileRunning, z.algorithm())
	case slices.Contains(z.ResetStatus, "none"):
		return option.Errorf("reset_status", "none would never reset: remove it, or name statuses, such as 2xx")
	}
	resets, err := z.ResetStatus.compile()
	if err != nil {
		return option.Errorf("reset_status", "%w", err)
	}
	if z.CountStatus.isAll() {
		return nil
	}
	counted, _ := z.CountStatus.compile()
	for code := range limiter.StatusGRPC + 24 {
		if resets.Contains(code) && counted.Contains(code) {
			return option.Errorf("reset_status", "names %s, as does count_status: what is forgiven cannot count, so remove it from one", statusText(code))
		}
	}
	return nil
}

// statusText returns a status of a StatusSet as configs name it.
func statusText(code int) string {
	if code < limiter.StatusGRPC {
		return strconv.Itoa(code)
	}
	return grpcPrefix + strconv.Itoa(code-limiter.StatusGRPC)
}

func (z *Zone) validateWarn() error {
	switch {
	case z.Warn < 0 || z.Warn > 100:
		return option.Errorf("warn", "%d: it must be from 1 to 100 percent", z.Warn)
	case z.Warn > 0 && z.isLease():
		return option.Errorf("warn", notWhileRunning, z.algorithm())
	}
	return nil
}

func (z *Zone) validateMaxWait() error {
	switch {
	case z.MaxWait < 0 || time.Duration(z.MaxWait) > store.MaxWindow:
		return option.Errorf("max_wait", "%s: it must be above zero, and at most 100 years", time.Duration(z.MaxWait))
	case z.MaxWait > 0 && z.isLease():
		return option.Errorf("max_wait", "does not go with %s, where it is not known when a slot becomes free: remove it", z.algorithm())
	case z.MaxWaitQueue < 0:
		return option.Errorf("max_wait_queue", "%d: it must be at least 1", z.MaxWaitQueue)
	case z.MaxWaitQueue > 0 && z.MaxWait == 0:
		return option.Errorf("max_wait_queue", "needs max_wait: add it, such as \"5s\"")
	}
	return nil
}

func (z *Zone) validatePenalty() error {
	a, penalty := z.algorithm(), time.Duration(z.Penalty)
	switch {
	case penalty < 0 || penalty > store.MaxWindow:
		return option.Errorf("penalty", "%s: it must be above zero, and at most 100 years", penalty)
	case penalty%time.Microsecond != 0:
		return option.Errorf("penalty", "%s: it must be whole microseconds", penalty)
	case penalty > 0 && len(z.Reserves) > 0:
		return option.Errorf("penalty", "does not go with reserve, because it would refuse the important requests as well: remove one").
			JSONf("does not go with reserves, because it would refuse the important requests as well: remove one")
	case penalty > 0 && !algorithm.Of(a).Penalties:
		return option.Errorf("penalty", "does not go with %s: remove it, or use another algorithm", a)
	}
	return nil
}

func (z *Zone) validateObeyUpstream() error {
	switch {
	case !z.ObeyUpstream:
		return nil
	case !algorithm.Of(z.algorithm()).Penalties:
		return option.Errorf("obey_upstream", "does not go with %s, whose clients cannot be kept refused: remove it, or use another algorithm", z.algorithm())
	}
	resets, _ := z.ResetStatus.compile() // its own check reports errors
	for status := range http.StatusNetworkAuthenticationRequired + 100 {
		if retryafter.Asks(status) && resets.Contains(status) {
			return option.Errorf("obey_upstream", "does not go with reset_status %d, which would end what it begins: remove one", status)
		}
	}
	return nil
}

func (z *Zone) validateReserves() error {
	sum := 0
	for i, r := range z.Reserves {
		field := fmt.Sprintf("reserves[%d]", i)
		switch {
		case r == nil:
			return option.Errorf("reserve", "is null: define or remove it").Field(field)
		case r.Percent < 1 || r.Percent > 100:
			return option.Errorf("reserve", "%d: it must be from 1 to 100 percent", r.Percent).Field(field + ".percent")
		case len(r.MatcherSetsRaw) == 0:
			return option.Errorf("reserve", "%d has no matchers: say for which requests it is kept", r.Percent).
				Field(field + ".match").JSONf("is missing: say for which requests it is kept")
		}
		if sum += r.Percent; sum > 100 {
			return option.Errorf("reserve", "%d makes it %d percent together: it must be at most 100", r.Percent, sum).Field(field + ".percent")
		}
	}
	return nil
}

// repeatedStatuses do not end a request: clients or proxies repeat it at once, or authenticate first.
var repeatedStatuses = []int{
	http.StatusUnauthorized, http.StatusProxyAuthRequired, http.StatusRequestTimeout,
	http.StatusMisdirectedRequest, http.StatusTooEarly, http.StatusUpgradeRequired,
}

// validateStatus checks a status of refusals, of which an example is one.
func validateStatus(name string, status, example int) error {
	switch {
	case status == 0:
	case status < 400 || status > 499:
		return option.Errorf(name, "%d: it must be from 400 to 499, such as %d; handle_errors can answer with others", status, example)
	case slices.Contains(repeatedStatuses, status):
		return option.Errorf(name, "%d: clients answer it by another request: write another one, such as %d", status, example)
	}
	return nil
}

// isPercent reports whether f is from 0 to 100, which NaN is not.
func isPercent(f float64) bool { return f >= 0 && f <= 100 }

func (z *Zone) validateEnforce() error {
	if z.Enforce != nil && !isPercent(*z.Enforce) {
		return option.Errorf("enforce", "%v: it must be from 0 to 100 percent, such as 12.5", *z.Enforce)
	}
	return nil
}
