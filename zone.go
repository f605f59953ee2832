package shardlimit

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Zone is a named limit: the requests that it counts, what identifies their
// clients, and how many it admits.
//
// The name is the zone's identity in a store. Zones of one name share their
// counters, across handlers and Caddy instances; within one config their
// definitions must be equal, apart from the matchers.
type Zone struct {
	// The name: letters, digits, `_`, `.` and `-`. It appears in response headers,
	// logs, metrics and the keys of the store. Required.
	Name string `json:"name,omitempty"`

	// The requests that the zone counts. May be repeated; a request counts if any
	// of the matchers matches. Backends read paths otherwise than `path`:
	// `vars_regexp {path} (?i)login` finds its spellings, and `not vars {uri}
	// /health` leaves out one. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Identifies a client: one or more texts with placeholders. Texts are tried in
	// order; the first whose placeholder is not empty is the client. A text
	// without a placeholder always matches: put it last, or write it alone for one
	// bucket that all requests share. If no placeholder has a value, the client IP
	// is the key. To combine values, put them into one text:
	// `"{http.request.header.X-Tenant} {http.vars.client_ip}"`.
	// [`key_secret`](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#calls)
	// hides the values in Redis. Required.
	Key Texts `json:"key,omitempty"`

	// How many events fit into a window or, with `concurrency`, how many requests
	// run at the same time: 1 to 2^52; at most 2^32-1 with `sliding_window`, and
	// at most 100000 with `sliding_log` and `concurrency`. It may be [a
	// placeholder](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#numbers-from-placeholders).
	// Changing it keeps the counts. In a Caddyfile: `events <n> | <placeholder>
	// <fallback n>`. Required.
	Events Amount `json:"events,omitempty"`

	// The number of events if the placeholder of `events` yields neither a whole
	// number from 0 on nor `unlimited`. Required with a placeholder, and not
	// allowed without. In a Caddyfile: `events <n> | <placeholder> <fallback n>`.
	EventsFallback int64 `json:"events_fallback,omitempty"`

	// The length of the window, from 1ms to 100 years. Changing it starts new
	// counts. With `fixed_window`, a window begins with a client's first request.
	// With `concurrency`: how long the slots of a Caddy that died stay occupied,
	// at least 1s. Default: 1m with `concurrency`; else it is required, unless
	// there is a `calendar`. In a Caddyfile: `window <duration> [aligned] |
	// day|week|month|year [from monday|sunday] [in <IANA name>]`.
	Window caddy.Duration `json:"window,omitempty"`

	// With `fixed_window`, instead of `window`: `day`, `week`, `month` or `year`.
	// A window begins for all clients at once, at midnight in `time_zone`. A
	// change starts new counts. Default: none. In a Caddyfile: `window <duration>
	// [aligned] | day|week|month|year [from monday|sunday] [in <IANA name>]`.
	Calendar string `json:"calendar,omitempty"`

	// With `calendar`: the IANA name of the time zone, such as `Europe/Berlin`.
	// Days on which its clocks are changed are longer or shorter. A change starts
	// new counts. Default: `UTC`. In a Caddyfile: `window <duration> [aligned] |
	// day|week|month|year [from monday|sunday] [in <IANA name>]`.
	TimeZone string `json:"time_zone,omitempty"`

	// With `calendar` `week`: `monday` or `sunday`. A change starts new counts.
	// Default: `monday`. In a Caddyfile: `window <duration> [aligned] |
	// day|week|month|year [from monday|sunday] [in <IANA name>]`.
	WeekStarts string `json:"week_starts,omitempty"`

	// How events are counted:
	// [Algorithms](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/algorithms.md).
	// Changing it starts new counts. Default: `fixed_window`.
	Algorithm string `json:"algorithm,omitempty"`

	// With `fixed_window`: whether windows begin for all clients at once, at
	// multiples of their length since 1970 in UTC, and not with a client's first
	// request. A change starts new counts. Default: false. In a Caddyfile: `window
	// <duration> [aligned] | day|week|month|year [from monday|sunday] [in <IANA
	// name>]`.
	Align bool `json:"align,omitempty"`

	// With `gcra`: how many events fit at once, 1 to 2^52, while `events` per
	// `window` is the rate at which they come back. All of them must come back
	// within 100 years. It may be [a
	// placeholder](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#numbers-from-placeholders).
	// Default: `events`. In a Caddyfile: `burst <n> | <placeholder> <fallback n>`.
	Burst Amount `json:"burst,omitempty"`

	// The number if the placeholder of `burst` yields neither a whole number from
	// 0 on nor `unlimited`. Required with a placeholder, and not allowed without.
	// In a Caddyfile: `burst <n> | <placeholder> <fallback n>`.
	BurstFallback int64 `json:"burst_fallback,omitempty"`

	// What a request costs: 0 to 2^52, or [a placeholder, or a sum of
	// them](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#numbers-from-placeholders),
	// also of what is known [when the response has
	// ended](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#a-cost-that-is-known-at-the-end).
	// Default: 1. In a Caddyfile: `cost <n> | <sum> [<fallback n>]`.
	Cost Amount `json:"cost,omitempty"`

	// What a request costs at least if a placeholder of `cost` yields no number.
	// Not allowed without a placeholder. Default: 1. In a Caddyfile: `cost <n> |
	// <sum> [<fallback n>]`.
	CostFallback *int64 `json:"cost_fallback,omitempty"`

	// `after`: a request is charged once the status of its response is known.
	// `before`: the check and the charge are one step when the request arrives.
	// [Which to
	// choose](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#charge-after-or-before).
	// Default: `after`; `concurrency`: `before`.
	Charge string `json:"charge,omitempty"`

	// With `charge before`: how many events this Caddy takes from the store at
	// once, to serve requests without another call: a number up to `events`,
	// `auto`, which follows the traffic, or `off`. Others cannot use these, and
	// may refuse a client meanwhile, with `auto` at most 10 percent of `events`.
	// Default: `off`.
	Batch Batch `json:"batch,omitempty"`

	// The response statuses that cost something: codes like `401` and classes like
	// `4xx`, or statuses of gRPC like `grpc:16`. `["all"]` charges every status.
	// Default: all but 304. In a Caddyfile: `count_status [not]
	// <code|class|grpc:code>... | all`.
	CountStatus StatusList `json:"count_status,omitempty"`

	// The response statuses that cost nothing. Not with `count_status`. Default:
	// `["304"]`, or none with `count_status`. In a Caddyfile: `count_status [not]
	// <code|class|grpc:code>... | all`.
	CountStatusNot StatusList `json:"count_status_not,omitempty"`

	// Statuses that empty the client's bucket, such as `2xx` of a login:
	// [Forgiving](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/configuration.md#forgiving).
	// Default: none.
	ResetStatus StatusList `json:"reset_status,omitempty"`

	// The percentage of the limit from which a client is near it, 1 to 100. The
	// first request of a window that reaches it is logged, counted in a
	// [metric](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/operating.md#zones),
	// and emits [an
	// event](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/operating.md#events).
	// Default: none.
	Warn int `json:"warn,omitempty"`

	// How long a request that does not fit is held until it does, in order of
	// arrival at this Caddy, and how many requests of the zone this Caddy holds in
	// each store, by default 1000. Requests that would wait longer are refused
	// immediately. If too many wait, the newest request of the address or key with
	// most is refused. A client that leaves is noticed, unless its request
	// (HTTP/1) has an unread body over 4 KiB.
	// Default: 0, none is held. In a Caddyfile: `max_wait <duration> [<n>]`.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`

	// How many requests of the zone this Caddy holds at the same time, in each
	// store. Requests beyond it are refused. Default: 1000. In a Caddyfile:
	// `max_wait <duration> [<n>]`.
	MaxWaitQueue int `json:"max_wait_queue,omitempty"`

	// How long a client stays refused after a refusal, even if there is room
	// again. Refusals do not prolong it. Default: 0.
	Penalty caddy.Duration `json:"penalty,omitempty"`

	// A response of the handlers behind [that says when to come
	// again](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/go.md#calls-to-providers)
	// is a penalty for its client until then, at most an hour. A constant `key`,
	// for a provider's limit, closes for a minute, or for as long as clients of
	// two networks (/24, /48) were told. Then one request a minute is a probe.
	// Default: off.
	ObeyUpstream bool `json:"obey_upstream,omitempty"`

	// A percentage of `events`, or of `burst`, that is kept for matching requests,
	// rounded up: 1 to 100 each, and at most 100 together. Repeat it with the most
	// important first: each may also use what is kept for those after it. Requests
	// that match none get the rest, which is nothing where `events` are few.
	// Default: none. In a Caddyfile: `reserve <percent> @<matcher> | <percent> {
	// <matchers> }`.
	Reserves []*Reserve `json:"reserves,omitempty"`

	// Counts addresses by their network of that many bits. One client commonly
	// owns an IPv6 /64. IPv4 in IPv6 (such as `::ffff:`) counts as IPv4. What Caddy
	// includes (`httpInclude`) passes such zones. Default: whole address.
	IPv4Prefix int `json:"ipv4_prefix,omitempty"`

	// Counts IPv6 addresses by their network of that many bits. One client
	// commonly owns a /64. Default: whole address.
	IPv6Prefix int `json:"ipv6_prefix,omitempty"`

	// What happens while the store cannot answer: `local` counts on in this
	// process alone, `deny` answers 503, `allow` admits without a limit. Default:
	// the store's, `local`.
	OnError string `json:"on_error,omitempty"`

	// The status of refusals: 400 to 499, without 401, 407, 408, 421, 425 and 426.
	// `402` is for budgets; `handle_errors 429` does not match it. Default: 429.
	Status int `json:"status,omitempty"`

	// The status for clients that an operator has
	// [blocked](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/operating.md#block-or-grant),
	// such as `403`. Default: 429.
	BlockStatus int `json:"block_status,omitempty"`

	// The percentage of clients, 0 to 100, for which the limit is enforced. The
	// others are only
	// [observed](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/operating.md#trying-a-limit-out).
	// Default: 100.
	Enforce *float64 `json:"enforce,omitempty"`

	// isService is set if a service asks the zone.
	isService bool
}

// provision compiles a valid zone, and loads its matchers.
func (z *Zone) provision(ctx caddy.Context) (*limiter.Zone, error) {
	c := z.compile()
	if err := loadMatchers(ctx, z, z.MatcherSetsRaw, &c.Matchers); err != nil {
		return nil, err
	}
	for i, reserve := range z.Reserves {
		if err := loadMatchers(ctx, reserve, reserve.MatcherSetsRaw, &c.Reserves[i].Matchers); err != nil {
			return nil, option.In(fmt.Sprintf("reserve %d", reserve.Percent), fmt.Sprintf("reserves[%d]", i), err)
		}
	}
	return c, nil
}

func loadMatchers(ctx caddy.Context, of any, raw caddyhttp.RawMatcherSets, sets *caddyhttp.MatcherSets) error {
	if raw == nil {
		return nil
	}
	loaded, err := ctx.LoadModule(of, "MatcherSetsRaw")
	if err == nil {
		err = sets.FromInterface(loaded)
	}
	if err != nil {
		return option.Errorf("match", "cannot be loaded: %w", err)
	}
	return nil
}

// compile returns the zone as the limiter needs it, without matchers.
func (z *Zone) compile() *limiter.Zone {
	c := &limiter.Zone{
		Name: z.Name, Definition: z.definition(), Key: z.Key, IPv4Prefix: z.IPv4Prefix, IPv6Prefix: z.IPv6Prefix,
		Algorithm: z.algorithm(), Window: z.window(), Align: z.Align, Calendar: z.calendar(),
		Burst:  z.Burst.quantity(z.BurstFallback),
		Events: z.Events.quantity(z.EventsFallback), Cost: cmp.Or(z.Cost, "1").quantity(z.costFallback()),
		SettleAtEnd:  z.isCostKnownAtEnd() || z.knowsGRPC(),
		KnowsGRPC:    z.knowsGRPC(),
		ChargeBefore: z.Charge == limiter.ChargeBefore,
		MaxWait:      time.Duration(z.MaxWait), MaxWaitQueue: cmp.Or(z.MaxWaitQueue, limiter.DefaultMaxWaitQueue),
		Warn:   int64(z.Warn),
		Status: z.Status, BlockStatus: z.BlockStatus,
		Penalty: time.Duration(z.Penalty), ObeyUpstream: z.ObeyUpstream, OnError: z.OnError, Enforce: z.Enforce,
	}
	if z.isService {
		c.ChargeBefore = true
		if len(z.Key) == 0 {
			c.Key = []string{limiter.DescriptorText}
		}
	}
	c.Batch, _ = z.Batch.parse()
	switch {
	case z.CountStatus.isAll():
	case len(z.CountStatus) > 0:
		counted, _ := z.CountStatus.compile()
		c.Free = counted.Complement()
	case len(z.CountStatusNot) > 0:
		c.Free, _ = z.CountStatusNot.compile()
	default:
		c.Free = limiter.UsuallyFree
	}
	c.Forgives, _ = z.ResetStatus.compile()
	for _, reserve := range z.Reserves {
		c.Reserves = append(c.Reserves, limiter.Reserve{Percent: int64(reserve.Percent)})
	}
	return c
}

// defaultLease is how long the slot of a process that died stays taken.
const defaultLease = time.Minute

// window returns the length of the window, or of a lease.
func (z *Zone) window() time.Duration {
	if z.isLease() && z.Window == 0 {
		return defaultLease
	}
	return time.Duration(z.Window)
}

// utc is the default time zone of calendars.
const utc = "UTC"

// calendar returns the calendar of the windows, which has no unit if there is none.
func (z *Zone) calendar() store.Calendar {
	c := store.Calendar{Unit: store.CalendarUnit(z.Calendar), SundayFirst: z.WeekStarts == weekStartsSunday}
	if z.TimeZone != utc {
		c.TimeZone = z.TimeZone
	}
	return c
}

// costFallback returns the cost of a request whose placeholder yields none.
func (z *Zone) costFallback() int64 {
	if z.CostFallback == nil {
		return 1
	}
	return *z.CostFallback
}

// knowsGRPC reports whether a status of gRPC decides about the cost, which is known when
// the response has ended.
func (z *Zone) knowsGRPC() bool {
	return slices.ContainsFunc(slices.Concat(z.CountStatus, z.CountStatusNot, z.ResetStatus), isGRPCStatus)
}

// isLease reports whether the zone counts requests while they run.
func (z *Zone) isLease() bool { return algorithm.Of(z.algorithm()).Lease }

// Reserve is a part of a zone's capacity that is kept for important requests.
type Reserve struct {
	// The percentage of the zone's `events`, or `burst`, that is kept, from 1 to
	// 100, rounded up to whole events. Required.
	Percent int `json:"percent,omitempty"`

	// The requests for which it is kept: those that match any of the sets. They may
	// also use what is kept for less important ones. Required.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`
}
