package shardlimit

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// The sections of docs/configuration.md that the options are in.
const (
	aboutClients   = "Requests and clients"
	aboutLimits    = "Limits"
	aboutCosts     = "Costs and charges"
	aboutRefusals  = "Refusals and errors"
	aboutResponses = "Responses and logs"
)

// options are the options of the directive's block. addZone parses a zone.
func (l *Limits) options(addZone option.Setter) []option.Row {
	rows := []option.Row{
		{
			Name: "zone", JSON: []string{"zones"}, Args: "<name>", Block: new(Zone).options(httpcaddyfile.Helper{}), Field: option.Field{Set: addZone}, Check: l.validateZones, Repeats: true,
			Section: aboutClients,
			Doc:     "The name: letters, digits, `_`, `.` and `-`. Zones of one name share their counts, in all handlers and Caddys, and need the same definition, except for their matchers, `status` and `enforce`.",
			Parts: map[string]string{
				"zones": "The zones. A request has to fit into all zones that match it; if one refuses it, none charges it. Required, unless `rate_limits` has zones.",
			},
		},
		{
			Name: "store", Args: "<name>", Field: option.Field{Set: l.parseStore}, Check: l.validateStore,
			Values:  map[string]option.Schema{"store": {"anyOf": []option.Schema{{"type": []string{"string", "null"}, "pattern": option.NamePattern()}, reference("store")}}},
			Section: aboutClients, Default: "`default`",
			Doc: "The store in which the zones of this handler count.",
			Parts: map[string]string{
				"store": "The store in which the zones count: the name of a store in the `rate_limit` app, or a store of this handler's own. The counts in memory of such a store survive a reload only if its definition does not change.",
			},
		},
		{
			Name: "rollout", Args: "<store> <percent>", Field: option.Field{Set: l.parseRollout}, Check: l.validateRollout,
			Section: aboutClients, Default: "0",
			Doc: "Another store, and the percentage of clients, 0 to 100, that are [counted there instead](#another-store-for-some-clients).",
		},
		{
			Name: "headers", Args: "github|ietf|both|none", Field: option.Choice(&l.Headers),
			Section: aboutResponses, Default: "`github`",
			Doc: "The response headers that show the limit: `github` (`X-RateLimit-*`), `ietf` (`RateLimit-Policy`, `RateLimit`), `both` or `none`. Refusals have `Retry-After` with each: [Headers](operating.md#headers).",
		},
		{
			Name: "problem", Field: option.Flag(&l.Problem),
			Section: aboutResponses, Default: "off",
			Doc: "Gives refused requests [a body](operating.md#headers) of type `application/problem+json`.",
		},
		{
			Name: "grpc", Field: option.Flag(&l.GRPC),
			Section: aboutResponses, Default: "off; on if a zone has `grpc:` statuses",
			Doc: "Gives refused calls of gRPC [its status](grpc.md), and HTTP status 200: not where proxies ask.",
		},
		{
			Name: "log_refusals", Args: "first|all|none", Field: option.Choice(&l.LogRefusals),
			Section: aboutResponses, Default: "`first`",
			Doc: "Which refusals are logged: the `first` of each client and zone in a window, `all`, or `none`.",
		},
		{
			Name: "jitter", Args: "<ratio>", Field: option.Number(&l.Jitter, ", such as 0.2"), Check: l.validateJitter,
			Values:  map[string]option.Schema{"jitter": {"minimum": 0, "maximum": 1}},
			Section: aboutResponses, Default: "0",
			Doc: "Lengthens `Retry-After`, and moves the reset with it, at random by up to this fraction, 0 to 1.",
		},
		{
			Name: "log_key", Field: option.Flag(&l.LogKey),
			Section: aboutResponses, Default: "off",
			Doc: "Shows client keys in log entries and placeholders, which otherwise show the beginning of their SHA-256.",
		},
		{
			Name: "ignore", Args: "<rule>...", Field: option.List(&l.Ignore), Check: l.validateIgnore,
			Values:  map[string]option.Schema{"ignore": {"items": option.Schema{"enum": lint.Names()}}},
			Section: aboutResponses, Default: "none",
			Doc: "The [rules](#limits-that-do-nothing) about configs that are not applied to this handler.",
		},
	}
	if l.isService {
		// Its responses are those of the protocol, and the rules are about routes.
		rows = slices.DeleteFunc(rows, func(row option.Row) bool { return slices.Contains([]string{"problem", "grpc", "ignore"}, row.Name) })
	}
	return rows
}

// options are the options of a zone. The helper knows the matchers of the site.
func (z *Zone) options(h httpcaddyfile.Helper) []option.Row {
	return []option.Row{
		{
			Name: "match", Args: "@<matcher> | { <matchers> }", Repeats: true,
			Field:   option.Field{Set: func(*option.Parser) error { return parseMatch(h, "match", &z.MatcherSetsRaw) }},
			Section: aboutClients, Default: "all",
			Doc: "The requests that the zone counts. May be repeated; a request counts if any of the matchers matches. Backends read paths otherwise than `path`: `vars_regexp {path} (?i)login` finds its spellings, and `not vars {uri} /health` leaves out one.",
		},
		{
			Name: "key", Args: "<text>...", Field: option.List(&z.Key), Check: z.validateKey,
			Values:  map[string]option.Schema{"key": {"minLength": 1, "minItems": 1, "items": option.Schema{"type": "string", "minLength": 1}}},
			Section: aboutClients, Default: "required",
			Doc: "Identifies a client: one or more texts with placeholders. Texts are tried in order; the first whose placeholder is not empty is the client. A text without a placeholder always matches: put it last, or write it alone for one bucket that all requests share. If no placeholder has a value, the client IP is the key. To combine values, put them into one text: `\"{header.X-Tenant} {client_ip}\"`. [`key_secret`](#calls) hides the values in Redis.",
		},
		{
			Name: "events", JSON: []string{"events", "events_fallback"}, Args: "<n> | <placeholder> <fallback n>",
			Field: option.Field{Set: parseAmount(&z.Events, &z.EventsFallback), Text: func() (string, bool) {
				return z.Events.line(z.EventsFallback), z.Events != ""
			}},
			Check:   z.validateEvents,
			Values:  map[string]option.Schema{"events": {"minimum": 1, "pattern": positiveAmount}},
			Section: aboutLimits, Default: "required",
			Doc: "How many events fit into a window or, with `concurrency`, how many requests run at the same time: 1 to 2^52; at most 2^32-1 with `sliding_window`, and at most 100000 with `sliding_log` and `concurrency`. It may be [a placeholder](#numbers-from-placeholders). Changing it keeps the counts.",
			Parts: map[string]string{
				"events_fallback": "The number of events if the placeholder of `events` yields neither a whole number from 0 on nor `unlimited`. Required with a placeholder, and not allowed without.",
			},
		},
		{
			Name: "window", JSON: []string{"window", "align", "calendar", "time_zone", "week_starts"}, Args: "<duration> [aligned] | day|week|month|year [from monday|sunday] [in <IANA name>]",
			Field: option.Field{Set: z.parseWindow, Text: z.windowText}, Check: z.validateWindow,
			Values:  map[string]option.Schema{"window": {"anyOf": []option.Schema{{"maximum": 0}, {"minimum": time.Millisecond}}, "maximum": store.MaxWindow}, "calendar": {"enum": calendarUnits()}, "week_starts": {"enum": []any{"", weekStartsMonday, weekStartsSunday, nil}}},
			Section: aboutLimits, Default: "required; `concurrency`: 1m",
			Doc: "The length of the window, from 1ms to 100 years. Changing it starts new counts. With `concurrency`: how long the slots of a Caddy that died stay occupied, at least 1s. With `fixed_window`, a window begins with a client's first request. `aligned` windows begin at multiples of their length since 1970, in UTC, for all clients at the same moment. `day`, `week`, `month` and `year` are calendar windows, which begin at midnight, in UTC or the time zone after `in`, such as `Europe/Berlin`; weeks begin on Monday, or on the day after `from`. Time zones have the rules of the machine or, without any there, those in the binary; all Caddys need the same.",
			Parts: map[string]string{
				"window":      "The length of the window, from 1ms to 100 years. Changing it starts new counts. With `fixed_window`, a window begins with a client's first request. With `concurrency`: how long the slots of a Caddy that died stay occupied, at least 1s. Default: 1m with `concurrency`; else it is required, unless there is a `calendar`.",
				"align":       "With `fixed_window`: whether windows begin for all clients at once, at multiples of their length since 1970 in UTC, and not with a client's first request. A change starts new counts. Default: false.",
				"calendar":    "With `fixed_window`, instead of `window`: `day`, `week`, `month` or `year`. A window begins for all clients at once, at midnight in `time_zone`. A change starts new counts. Default: none.",
				"time_zone":   "With `calendar`: the IANA name of the time zone, such as `Europe/Berlin`. Days on which its clocks are changed are longer or shorter. A change starts new counts. Default: `UTC`.",
				"week_starts": "With `calendar` `week`: `monday` or `sunday`. A change starts new counts. Default: `monday`.",
			},
		},
		{
			Name: "algorithm", Args: algorithms(), Field: option.Choice(&z.Algorithm),
			Section: aboutLimits, Default: "`fixed_window`",
			Doc: "How events are counted: [Algorithms](algorithms.md). Changing it starts new counts.",
		},
		{
			Name: "burst", JSON: []string{"burst", "burst_fallback"}, Args: "<n> | <placeholder> <fallback n>",
			Field: option.Field{Set: parseAmount(&z.Burst, &z.BurstFallback), Text: func() (string, bool) {
				burst := z.Burst.line(z.BurstFallback)
				return burst, z.Burst != "" && burst != z.Events.line(z.EventsFallback)
			}},
			Check:   z.validateBurst,
			Values:  map[string]option.Schema{"burst": {"minimum": 1, "pattern": `^$|` + positiveAmount}},
			Section: aboutLimits, Default: "`events`",
			Doc: "With `gcra`: how many events fit at once, 1 to 2^52, while `events` per `window` is the rate at which they come back. All of them must come back within 100 years. It may be [a placeholder](#numbers-from-placeholders).",
			Parts: map[string]string{
				"burst_fallback": "The number if the placeholder of `burst` yields neither a whole number from 0 on nor `unlimited`. Required with a placeholder, and not allowed without.",
			},
		},
		{
			Name: "cost", JSON: []string{"cost", "cost_fallback"}, Args: "<n> | <sum> [<fallback n>]",
			Field:   option.Field{Set: z.parseCost, Text: z.costText},
			Check:   z.validateCost,
			Values:  map[string]option.Schema{"cost_fallback": {"maximum": store.MaxEvents}},
			Section: aboutCosts, Default: "1",
			Doc: "What a request costs: 0 to 2^52, or [a placeholder, or a sum of them](#numbers-from-placeholders), also of what is known [when the response has ended](#a-cost-that-is-known-at-the-end).",
			Parts: map[string]string{
				"cost_fallback": "What a request costs at least if a placeholder of `cost` yields no number. Not allowed without a placeholder. Default: 1.",
			},
		},
		{
			Name: "charge", Args: "after|before",
			Field: option.Choice(&z.Charge).WithText(func() (string, bool) {
				return z.Charge, z.Charge == limiter.ChargeBefore && !z.isLease()
			}),
			Check:   z.validateCharge,
			Section: aboutCosts, Default: "`after`; `concurrency`: `before`",
			Doc: "`after`: a request is charged once the status of its response is known. `before`: the check and the charge are one step when the request arrives. [Which to choose](#charge-after-or-before).",
		},
		{
			Name: "batch", Args: "off|auto|<n>",
			Field: option.Filled(&z.Batch).WithText(func() (string, bool) {
				return Amount(z.Batch).canonical(), z.Batch != ""
			}),
			Check:   z.validateBatch,
			Section: aboutCosts, Default: "`off`",
			Doc: "With `charge before`: how many events this Caddy takes from the store at once, to serve requests without another call: a number up to `events`, `auto`, which follows the traffic, or `off`. Others cannot use these, and may refuse a client meanwhile, with `auto` at most 10 percent of `events`.",
		},
		{
			Name: "count_status", JSON: []string{"count_status", "count_status_not"}, Args: "[not] <code|class|grpc:code>... | all",
			Field: option.Field{Set: z.parseCountStatus, Text: func() (string, bool) {
				if len(z.CountStatusNot) > 0 {
					return "not " + z.CountStatusNot.sorted(), true
				}
				return z.CountStatus.sorted(), len(z.CountStatus) > 0
			}},
			Check:   z.validateCountStatus,
			Values:  map[string]option.Schema{"count_status": {"anyOf": []option.Schema{{"const": []string{"all"}}, {"type": "null"}, StatusList{}.JSONSchema()}, "items": option.Schema{}}},
			Section: aboutCosts, Default: "`not 304`",
			Doc: "The statuses that cost something, such as `401 403`; with `not`, those that do not, such as `not 304 5xx grpc:5`; or `all`. Free 304 beyond ten times the limit in a window are charged, unless 200 is free.",
			Parts: map[string]string{
				"count_status":     "The response statuses that cost something: codes like `401` and classes like `4xx`, or statuses of gRPC like `grpc:16`. `[\"all\"]` charges every status. Default: all but 304.",
				"count_status_not": "The response statuses that cost nothing. Not with `count_status`. Default: `[\"304\"]`, or none with `count_status`.",
			},
		},
		{
			Name: "reset_status", Args: "<code|class|grpc:code>...",
			Field: option.List(&z.ResetStatus).WithText(func() (string, bool) {
				return z.ResetStatus.sorted(), len(z.ResetStatus) > 0
			}),
			Check:   z.validateResetStatus,
			Section: aboutCosts, Default: "none",
			Doc: "Statuses that empty the client's bucket, such as `2xx` of a login: [Forgiving](#forgiving).",
		},
		{
			Name: "warn", Args: "<percent>", Field: option.Percent(&z.Warn), Check: z.validateWarn,
			Values:  map[string]option.Schema{"warn": {"maximum": 100}},
			Section: aboutRefusals, Default: "none",
			Doc: "The percentage of the limit from which a client is near it, 1 to 100. The first request of a window that reaches it is logged, counted in a [metric](operating.md#zones), and emits [an event](operating.md#events).",
		},
		{
			Name: "max_wait", JSON: []string{"max_wait", "max_wait_queue"}, Args: "<duration> [<n>]",
			Field: option.Field{Set: z.parseMaxWait, Text: z.maxWaitText}, Check: z.validateMaxWait,
			Values:  map[string]option.Schema{"max_wait": {"maximum": store.MaxWindow}},
			Section: aboutRefusals, Default: "0, none is held",
			Doc: "How long a request that does not fit is held until it does, in order of arrival at this Caddy, and how many requests of the zone this Caddy holds in each store, by default 1000. Requests that would wait longer are refused immediately. If too many wait, the newest request of the address or key with most is refused. A client that leaves is noticed, unless its request (HTTP/1) has an unread body over 4 KiB.",
			Parts: map[string]string{
				"max_wait_queue": "How many requests of the zone this Caddy holds at the same time, in each store. Requests beyond it are refused. Default: 1000.",
			},
		},
		{
			Name: "penalty", Args: "<duration>", Field: option.Duration(&z.Penalty), Check: z.validatePenalty,
			Values:  map[string]option.Schema{"penalty": {"maximum": store.MaxWindow}},
			Section: aboutLimits, Default: "0",
			Doc: "How long a client stays refused after a refusal, even if there is room again. Refusals do not prolong it.",
		},
		{
			Name: "obey_upstream", Field: option.Flag(&z.ObeyUpstream), Check: z.validateObeyUpstream,
			Section: aboutLimits, Default: "off",
			Doc: "A response of the handlers behind [that says when to come again](go.md#calls-to-providers) is a penalty for its client until then, at most an hour. A constant `key`, for a provider's limit, closes for a minute, or for as long as clients of two networks (/24, /48) were told. Then one request a minute is a probe.",
		},
		{
			Name: "reserve", JSON: []string{"reserves"}, Args: "<percent> @<matcher> | <percent> { <matchers> }", Repeats: true,
			Field: option.Field{Set: func(p *option.Parser) error { return z.parseReserve(h, p) }, Text: func() (string, bool) {
				var percents []string
				for _, reserve := range z.Reserves {
					percents = append(percents, strconv.Itoa(reserve.Percent))
				}
				return strings.Join(percents, ", reserve "), len(percents) > 0
			}},
			Check:   z.validateReserves,
			Section: aboutLimits, Default: "none",
			Doc: "A percentage of `events`, or of `burst`, that is kept for matching requests, rounded up: 1 to 100 each, and at most 100 together. Repeat it with the most important first: each may also use what is kept for those after it. Requests that match none get the rest, which is nothing where `events` are few.",
		},
		{
			Name: "ipv4_prefix", Args: "<bits>", Field: option.Positive(&z.IPv4Prefix), Check: func() error { return validatePrefix("ipv4_prefix", z.IPv4Prefix, 32) },
			Values:  map[string]option.Schema{"ipv4_prefix": {"maximum": 32}},
			Section: aboutClients, Default: "whole address",
			Doc: "Counts addresses by their network of that many bits. One client commonly owns an IPv6 /64. IPv4 in IPv6 (such as `::ffff:`) counts as IPv4. What Caddy includes (`httpInclude`) passes such zones.",
		},
		{
			Name: "ipv6_prefix", Args: "<bits>", Field: option.Positive(&z.IPv6Prefix), Check: func() error { return validatePrefix("ipv6_prefix", z.IPv6Prefix, 128) },
			Values:  map[string]option.Schema{"ipv6_prefix": {"maximum": 128}},
			Section: aboutClients,
			Parts:   map[string]string{"ipv6_prefix": "Counts IPv6 addresses by their network of that many bits. One client commonly owns a /64."},
		},
		{
			// Without a text, it is no part of the definition: handlers may answer differently about a zone, and
			// services have no status. A block is the zone's in all of them, so block_status has a text.
			Name: "status", Args: "<code>", Field: option.Field{Set: option.Positive(&z.Status).Set}, Check: func() error { return validateStatus("status", z.Status, 402) },
			Values:  map[string]option.Schema{"status": statusSchema()},
			Section: aboutRefusals, Default: "429",
			Doc: "The status of refusals: 400 to 499, without 401, 407, 408, 421, 425 and 426. `402` is for budgets; `handle_errors 429` does not match it.",
		},
		{
			Name: "block_status", Args: "<code>", Field: option.Positive(&z.BlockStatus), Check: func() error { return validateStatus("block_status", z.BlockStatus, 403) },
			Values:  map[string]option.Schema{"block_status": statusSchema()},
			Section: aboutRefusals, Default: "429",
			Doc: "The status for clients that an operator has [blocked](operating.md#block-or-grant), such as `403`.",
		},
		{
			Name: "on_error", Args: stores.OnErrorWords, Field: option.Choice(&z.OnError),
			Section: aboutRefusals, Default: "the store's, `local`",
			Doc: "What happens while the store cannot answer: `local` counts on in this process alone, `deny` answers 503, `allow` admits without a limit.",
		},
		{
			// The text is missing because handlers may enforce a zone differently.
			Name: "enforce", Args: "<percent>", Field: option.Field{Set: z.parseEnforce}, Check: z.validateEnforce,
			Values:  map[string]option.Schema{"enforce": {"minimum": 0, "maximum": 100}},
			Section: aboutRefusals, Default: "100",
			Doc: "The percentage of clients, 0 to 100, for which the limit is enforced. The others are only [observed](operating.md#trying-a-limit-out).",
		},
	}
}

// definition returns what zones of one name must agree on: the options, apart from
// matchers, status and enforce, that differ from their defaults.
func (z *Zone) definition() string {
	return option.Definition(z.options(httpcaddyfile.Helper{}))
}

func (z *Zone) windowText() (text string, given bool) {
	switch {
	case z.Calendar == "":
		text = z.window().String()
		if z.Align {
			text += " aligned"
		}
		return text, z.Window != 0 && (!z.isLease() || z.window() != defaultLease)
	case z.WeekStarts == weekStartsSunday:
		text = " from sunday"
	}
	if c := z.calendar(); c.TimeZone != "" {
		text += " in " + c.TimeZone
	}
	return z.Calendar + text, true
}

// statusSchema returns the schema of the options status and block_status.
func statusSchema() option.Schema {
	return option.Schema{"anyOf": []option.Schema{{"maximum": 0}, {"minimum": 400}}, "maximum": 499, "not": option.Schema{"enum": repeatedStatuses}}
}

func (z *Zone) costText() (text string, given bool) {
	text = z.Cost.canonical()
	if z.Cost.isDynamic() {
		if sum, _, err := limiter.ParseSum(text); err == nil {
			text = sum.String()
		}
	}
	if z.costFallback() == 1 {
		return text, z.Cost != ""
	}
	return text + " " + strconv.FormatInt(z.costFallback(), 10), true
}

func (z *Zone) maxWaitText() (text string, given bool) {
	text = time.Duration(z.MaxWait).String()
	if z.MaxWaitQueue != 0 && z.MaxWaitQueue != limiter.DefaultMaxWaitQueue {
		text += " " + strconv.Itoa(z.MaxWaitQueue)
	}
	return text, z.MaxWait != 0
}

// UnmarshalJSON implements [json.Unmarshaler].
func (h *Handler) UnmarshalJSON(text []byte) error {
	type plain Handler
	h.document = bytes.Clone(text)
	return option.Decode(text, (*plain)(h))
}

// Interface guard.
var _ json.Unmarshaler = (*Handler)(nil)

// algorithms returns the names of all algorithms.
func algorithms() string {
	var names []string
	for a := range store.Algorithms {
		names = append(names, a.String())
	}
	return strings.Join(names, "|")
}
