package shardlimit

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	minWindow = time.Millisecond
	minLease  = time.Second
)

// The days on which weeks can start.
const (
	weekStartsMonday = "monday"
	weekStartsSunday = "sunday"
)

// validate returns an error that says what is wrong with the zone and how to mend it.
func (z *Zone) validate() error {
	switch {
	case z == nil:
		return errors.New("a zone is null: define or remove it")
	case z.Name == "":
		return errors.New("a zone has no name: give it one")
	case !option.ValidName(z.Name):
		return fmt.Errorf("zone name %q: use only letters, digits and the characters _ . -", z.Name)
	}
	for _, rule := range []func() error{
		z.validateKey, z.validateAlgorithm, z.validateEvents, z.validateCalendar, z.validateWindow, z.validateDrain,
		z.validateCost, z.validateSettle, z.validateStatus, z.validateWaiting, z.validateReserves,
		z.validateBatchAndEnforce,
	} {
		if err := rule(); err != nil {
			return fmt.Errorf("zone %s: %w", z.Name, err)
		}
	}
	return nil
}

func (z *Zone) validateKey() error {
	switch {
	case len(z.Key) == 0:
		return errors.New("key is missing: add one, such as key {client_ip}, or key static for one bucket that all clients share")
	case slices.Contains(z.Key, ""):
		return option.Errorf("key", "has an empty text: remove it")
	case z.IPv4Prefix < 0 || z.IPv4Prefix > 32:
		return option.Errorf("ipv4_prefix", "%d: it must be from 0 to 32 bits", z.IPv4Prefix)
	case z.IPv6Prefix < 0 || z.IPv6Prefix > 128:
		return option.Errorf("ipv6_prefix", "%d: it must be from 0 to 128 bits", z.IPv6Prefix)
	}
	return stores.ValidateOnError(z.OnError)
}

func (z *Zone) validateAlgorithm() error {
	switch store.Algorithm(z.Algorithm) {
	case "", store.FixedWindow, store.SlidingWindow, store.SlidingLog, store.GCRA, store.Concurrency:
	default:
		return option.Errorf("algorithm", "%q: it must be fixed_window, sliding_window, sliding_log, gcra or concurrency", z.Algorithm)
	}
	a := z.algorithm()
	switch {
	case z.Align && a != store.FixedWindow:
		return option.Errorf("align", "goes with algorithm fixed_window only: remove it")
	case z.Burst != "" && a != store.GCRA:
		return option.Errorf("burst", "goes with algorithm gcra only: remove it, or write algorithm gcra")
	case z.Burst != "" || z.BurstFallback != 0:
		if err := validateAmount("burst", z.Burst, z.BurstFallback, store.MaxEvents, "2^52"); err != nil {
			return err
		}
	}
	if a == store.Concurrency && z.Charge == limiter.ChargeAfter {
		return option.Errorf("charge", "after: concurrency always charges before; remove it")
	}
	return option.OneOf("charge", z.Charge, limiter.ChargeAfter, limiter.ChargeBefore)
}

// algorithm returns the algorithm by which the zone counts.
func (z *Zone) algorithm() store.Algorithm {
	if z.Algorithm == "" {
		return store.FixedWindow
	}
	return store.Algorithm(z.Algorithm)
}

func (z *Zone) validateDrain() error {
	events, burst := z.Events.quantity(z.EventsFallback).Number, z.Burst.quantity(z.BurstFallback).Number
	if least := limiter.LeastEvents(burst, time.Duration(z.Window)); events < least {
		return option.Errorf("burst", "%d would take more than 100 years to come back, at %d in %s: lower it, or raise events to %d",
			burst, events, time.Duration(z.Window), least)
	}
	return nil
}

func (z *Zone) validateEvents() error {
	if z.Events == "" {
		return errors.New("events is missing: add it, such as events 100")
	}
	most, words := limiter.MostEvents(z.algorithm())
	return validateAmount("events", z.Events, z.EventsFallback, most, words)
}

// validateAmount checks an option that is a number from 1 on, or a placeholder and its
// fallback.
func validateAmount(name string, a Amount, fallback, most int64, words string) error {
	n, err := a.number()
	switch {
	case a.isDynamic() && !a.hasPlaceholder():
		return option.Errorf(name, "%s: it must be a number, or a text with a placeholder in braces", a)
	case a.isDynamic() && fallback == 0:
		return option.Errorf(name, "%s: add the number that counts where the placeholder yields none, such as %s %s 100", a, name, a)
	case a.isDynamic():
		n = fallback
	case fallback != 0 && a == "":
		return option.Errorf(name+"_fallback", "goes with a placeholder in %s only: remove it", name)
	case fallback != 0:
		return option.Errorf(name, "%s: a second number goes with a placeholder only; remove it", a)
	case a == limiter.UnlimitedWord:
		return option.Errorf(name, "unlimited: only a placeholder can yield that; remove the zone, for it would limit nothing")
	case err != nil:
		return option.Errorf(name, "%q: it must be a whole number from 1 to %s", string(a), words)
	}
	if n < 1 || n > most {
		return option.Errorf(name, "%d: it must be from 1 to %s", n, words)
	}
	return nil
}

func (z *Zone) validateWindow() error {
	window := time.Duration(z.Window)
	switch {
	case z.Calendar != "" || window == 0 && z.isLease():
		return nil
	case window == 0:
		return errors.New("window is missing: add one, such as window 1m")
	case z.isLease() && (window < minLease || window > store.MaxWindow):
		return option.Errorf("window", "%s: with concurrency it must be from 1s to 100 years", window)
	case window < minWindow || window > store.MaxWindow:
		return option.Errorf("window", "%s: it must be from 1ms to 100 years", window)
	case window%time.Microsecond != 0:
		return option.Errorf("window", "%s: it must be whole microseconds", window)
	}
	return nil
}

func (z *Zone) validateCalendar() error {
	switch {
	case z.Calendar == "" && z.TimeZone != "":
		return option.Errorf("time_zone", "goes with window day, week, month or year only: remove it, or write such a window")
	case z.Calendar != string(store.Week) && z.WeekStarts != "":
		return option.Errorf("week_starts", "goes with window week only: remove it, or write window week")
	case z.Calendar == "":
		return nil
	case z.Window != 0:
		return option.Errorf("calendar", "%s and window exclude each other: remove one", z.Calendar)
	case z.algorithm() != store.FixedWindow:
		return option.Errorf("window", "%s, or calendar in JSON, goes with algorithm fixed_window only: write a length, such as window 24h", z.Calendar)
	case z.Align:
		return option.Errorf("align", "goes with a length only, for window %s begins for all clients at once: remove it", z.Calendar)
	}
	if err := cmp.Or(
		option.OneOf("calendar", z.Calendar, string(store.Day), string(store.Week), string(store.Month), string(store.Year)),
		option.OneOf("week_starts", z.WeekStarts, weekStartsMonday, weekStartsSunday),
	); err != nil {
		return err
	}
	if err := z.calendar().Validate(); err != nil {
		return option.Errorf("time_zone", "%q: it must be an IANA name, such as Europe/Berlin: %w", z.TimeZone, err)
	}
	return nil
}

const (
	settleHeader    = "header"
	settleEnd       = "end"
	minSettleBuffer = 1 << 10
	maxSettleBuffer = 16 << 20
)

// validateSettle checks when the cost is known against what it is made of.
func (z *Zone) validateSettle() error {
	if err := option.OneOf("settle", z.Settle, settleHeader, settleEnd); err != nil {
		return err
	}
	switch {
	case z.Settle == settleEnd && z.isLease():
		return option.Errorf("settle", "end does not go with concurrency, which counts requests while they run: remove it")
	case z.SettleBuffer != 0 && z.Settle != settleEnd:
		return option.Errorf("settle_buffer", "needs settle end: write it, or remove settle_buffer")
	case z.SettleBuffer != 0 && (z.SettleBuffer < minSettleBuffer || z.SettleBuffer > maxSettleBuffer):
		return option.Errorf("settle_buffer", "%d: it must be from 1KiB to 16MiB", z.SettleBuffer)
	}
	for _, name := range limiter.PlaceholdersIn(string(z.Cost)) {
		switch {
		case limiter.IsUnknown(name):
			return option.Errorf("cost", "{%s} is unknown: there is {http.rate_limit.response.size}, .duration_ms and .json.<path>", name)
		case z.Settle != settleEnd && limiter.IsKnownAtEnd(name):
			return option.Errorf("cost", "{%s} is known when the response has ended: write settle end", name)
		}
	}
	for where, text := range map[string]string{"key": strings.Join(z.Key, " "), "events": string(z.Events), "burst": string(z.Burst)} {
		for _, name := range limiter.PlaceholdersIn(text) {
			if limiter.IsKnownAtEnd(name) {
				return option.Errorf(where, "{%s} is known when the response has ended: only cost can be made of it", name)
			}
		}
	}
	if name := z.optionOfGRPC(); name != "" && z.Settle != settleEnd {
		return option.Errorf(name, "names statuses of gRPC, which are known when the response has ended: write settle end")
	}
	return nil
}

func (z *Zone) validateCost() error {
	switch {
	case z.CostFallback != nil && !z.Cost.isDynamic():
		return option.Errorf("cost", "%s: a second number goes with a placeholder only; remove it", cmp.Or(z.Cost, "1"))
	case z.CostFallback != nil && (*z.CostFallback < 0 || *z.CostFallback > store.MaxEvents):
		return option.Errorf("cost", "%s %d: the fallback must be from 0 to 2^52", z.Cost, *z.CostFallback)
	case z.Cost == "":
		return nil
	case z.Cost.isDynamic() && !z.Cost.hasPlaceholder():
		return option.Errorf("cost", "%s: it must be a number, or a text with a placeholder in braces", z.Cost)
	case z.Cost.isDynamic():
		return nil
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

func (z *Zone) validateStatus() error {
	const running = "does not go with concurrency, which counts requests while they run: remove it"
	switch {
	case len(z.FreeStatus) > 0 && z.isLease():
		return option.Errorf("free_status", running)
	case len(z.CountStatus) > 0 && z.isLease():
		return option.Errorf("count_status", running)
	case len(z.ResetStatus) > 0 && z.isLease():
		return option.Errorf("reset_status", running)
	case z.BlockStatus != 0 && (z.BlockStatus < 400 || z.BlockStatus > 499):
		return option.Errorf("block_status", "%d: it must be from 400 to 499, such as 403", z.BlockStatus)
	case z.Warn < 0 || z.Warn > 100:
		return option.Errorf("warn", "%d: it must be from 1 to 100 percent", z.Warn)
	case z.Warn > 0 && z.isLease():
		return option.Errorf("warn", running)
	case slices.Contains(z.ResetStatus, statusNone):
		return option.Errorf("reset_status", "none would never reset: remove it, or name statuses, such as 2xx")
	case len(z.FreeStatus) > 0 && len(z.CountStatus) > 0:
		return option.Errorf("count_status", "and free_status exclude each other: remove one")
	case slices.Contains(z.CountStatus, statusNone):
		return option.Errorf("count_status", "none would never charge: name statuses, such as 401 403")
	}
	if _, err := z.FreeStatus.compile(); err != nil {
		return option.Errorf("free_status", "%w, or the word none alone", err)
	}
	if _, err := z.CountStatus.compile(); err != nil {
		return option.Errorf("count_status", "%w", err)
	}
	resets, err := z.ResetStatus.compile()
	if err != nil {
		return option.Errorf("reset_status", "%w", err)
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

func (z *Zone) validateWaiting() error {
	a := z.algorithm()
	switch {
	case z.MaxWait < 0 || time.Duration(z.MaxWait) > store.MaxWindow:
		return option.Errorf("max_wait", "%s: it must be above zero, and at most 100 years", time.Duration(z.MaxWait))
	case z.MaxWait > 0 && a == store.Concurrency:
		return option.Errorf("max_wait", "does not go with concurrency, where it is not known when a slot becomes free: remove it")
	case z.MaxWaitQueue < 0:
		return option.Errorf("max_wait_queue", "%d: it must be at least 1", z.MaxWaitQueue)
	case z.MaxWaitQueue > 0 && z.MaxWait == 0:
		return option.Errorf("max_wait_queue", "needs max_wait: add it, such as max_wait 5s")
	case z.Penalty < 0 || time.Duration(z.Penalty) > store.MaxWindow:
		return option.Errorf("penalty", "%s: it must be above zero, and at most 100 years", time.Duration(z.Penalty))
	case z.Penalty > 0 && time.Duration(z.Penalty)%time.Microsecond != 0:
		return option.Errorf("penalty", "%s: it must be whole microseconds", time.Duration(z.Penalty))
	case z.Penalty > 0 && len(z.Reserves) > 0:
		return option.Errorf("penalty", "does not go with reserve, for it would refuse the important requests as well: remove one")
	case z.Penalty > 0 && (a == store.SlidingLog || a == store.Concurrency):
		return option.Errorf("penalty", "does not go with %s: remove it, or use another algorithm", a)
	}
	return nil
}

// isPercent reports whether f is from 0 to 100, which NaN is not.
func isPercent(f float64) bool { return f >= 0 && f <= 100 }

func (z *Zone) validateBatchAndEnforce() error {
	batch, err := z.Batch.parse()
	if err != nil {
		return err
	}
	a := z.algorithm()
	events, eventsErr := z.Events.number()
	switch isBatched := batch != 0; {
	case isBatched && a == store.GCRA:
		return option.Errorf("batch", "does not go with gcra, for it would defeat its smoothness: remove it, or use fixed_window or sliding_window")
	case isBatched && a != store.FixedWindow && a != store.SlidingWindow:
		return option.Errorf("batch", "does not go with %s, which keeps events one by one: remove it, or use fixed_window or sliding_window", a)
	case isBatched && z.Charge != limiter.ChargeBefore:
		return option.Errorf("batch", "needs charge before: write it, or remove batch")
	case isBatched && len(z.Reserves) > 0:
		return option.Errorf("batch", "does not go with reserve, for what is reserved could not be kept apart: remove one")
	case eventsErr == nil && batch > events:
		return option.Errorf("batch", "%d: it must be at most events, which is %d", batch, events)
	case z.BatchShare < 0 || z.BatchShare > 100:
		return option.Errorf("batch_share", "%d: it must be from 1 to 100 percent", z.BatchShare)
	case z.BatchShare > 0 && batch != store.BatchAuto:
		return option.Errorf("batch_share", "needs batch auto: write it, or remove batch_share")
	case z.Enforce != nil && !isPercent(*z.Enforce):
		return option.Errorf("enforce", "%v: it must be from 0 to 100 percent, such as 12.5", *z.Enforce)
	}
	return nil
}
