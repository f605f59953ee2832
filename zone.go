package shardlimit

import (
	"cmp"
	"fmt"
	"net/http"
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

	// The requests that the zone counts; those that match any of the sets.
	// Default: all requests.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Identifies a client: the first template with a non-empty value, such as
	// `["{http.request.header.X-Api-Key}", "{http.vars.client_ip}"]`. A template
	// without placeholders puts all requests into one bucket. The client IP
	// identifies a client without any value, so that a missing header does not
	// lift the limit. Required.
	Key Texts `json:"key,omitempty"`

	// How many events a client may have per window, or with `concurrency` at the
	// same time: a number from 1 to 2^52, or a text with a placeholder that yields
	// one for the request; that needs `events_fallback` as well. The placeholder
	// may also yield `0`, which refuses the request, or `unlimited`, with which the
	// zone does not count it. Some algorithms have a lower maximum; a number out of
	// range becomes the nearest one. A change keeps the counts. Required.
	Events Amount `json:"events,omitempty"`

	// The number of events if the placeholder of `events` yields neither a whole
	// number from 0 on nor `unlimited`. Required with a placeholder, and not
	// allowed without.
	EventsFallback int64 `json:"events_fallback,omitempty"`

	// The length of the window, from 1 millisecond to 100 years. With
	// `concurrency`: how long the slot of a process that died stays taken, at least
	// 1 second. A change starts new counters. Required, unless there is `calendar`;
	// with `concurrency` the default is 1 minute.
	Window caddy.Duration `json:"window,omitempty"`

	// With `fixed_window`, instead of `window`: `day`, `week`, `month` or `year`. A
	// window begins for all clients at once, at midnight in `time_zone`, and ends at
	// the midnight after that day, week, month or year. A change starts new counters.
	// Default: none.
	Calendar string `json:"calendar,omitempty"`

	// With `calendar`: the IANA name of the time zone, such as `Europe/Berlin`. Days on
	// which its clocks are changed are longer or shorter. A change starts new counters.
	// Default: `UTC`.
	TimeZone string `json:"time_zone,omitempty"`

	// With `calendar` `week`: `monday` or `sunday`. A change starts new counters.
	// Default: `monday`.
	WeekStarts string `json:"week_starts,omitempty"`

	// How to count events. `fixed_window`: in windows that begin with a client's
	// first request; at the border of two a client can get twice as much.
	// `sliding_window`: over the last window of time, estimated from two counters;
	// up to 2^32-1 events. `sliding_log`: over the last window of time, exactly, at
	// the price of storing each event; up to 100000 events. `gcra`: evenly spread,
	// with bursts. `concurrency`: requests at the same time; up to 100000 events. A
	// change starts new counters. Default: `fixed_window`.
	Algorithm string `json:"algorithm,omitempty"`

	// With `fixed_window`: whether windows begin for all clients at once, at
	// multiples of their length since 1970 in UTC, and not with a client's first
	// request. A change starts new counters. Default: false.
	Align bool `json:"align,omitempty"`

	// With `gcra`: how many events a client may have at once, from 1 to 2^52, or a
	// text with a placeholder, as in `events`. `events` per `window` is the rate at
	// which they come back, all of them within 100 years. A change keeps the counts.
	// Default: `events`.
	Burst Amount `json:"burst,omitempty"`

	// The number if the placeholder of `burst` yields neither a whole number from 0 on
	// nor `unlimited`. Required with a placeholder, and not allowed without.
	BurstFallback int64 `json:"burst_fallback,omitempty"`

	// What a request costs: a number from 0 to 2^52, or a sum of terms, each a number, a
	// placeholder, or a placeholder times a number, such as
	// `{header.A} + 0.25*{header.B}`. Fractions are rounded up once they are added up.
	// Placeholders are read when the request arrives and again when its response begins;
	// the second value counts, so `{http.response.header.X-Cost}` charges what the backend
	// says. Where a placeholder yields no number, the cost is the fallback, or the sum of
	// the others if that is more. A request of cost 0 is free and learns where the client
	// stands, so do not read the cost from what clients send.
	//
	// A cost may also be made of what is known when the response has ended:
	// `{http.rate_limit.response.size}` (the bytes of the body),
	// `{http.rate_limit.response.duration_ms}`,
	// `{http.rate_limit.response.json.<path>}` (the last number at that path, such as
	// `usage.total_tokens`, in a body of JSON, lines of JSON or server-sent events) and
	// `{http.response.trailer.<name>}`. Until then the request counts with the cost that
	// it had when it arrived, which the response headers do not show. Not with
	// `concurrency`. Default: 1.
	Cost Amount `json:"cost,omitempty"`

	// What a request costs at least if a placeholder of `cost` yields no number. Not allowed
	// without a placeholder. Default: 1.
	CostFallback *int64 `json:"cost_fallback,omitempty"`

	// When to charge a request. `after`: once the status of the response is known.
	// Until then it counts in this process, in later windows too if it is slow, so
	// that one process never admits more than `events`; several processes together
	// may. `before`: when it arrives, in one step with the check, so that no more
	// than `events` are ever admitted; the price is a call of the primary, and a
	// refund of what turns out to be free. Default: `after`; with `concurrency`
	// always `before`.
	Charge string `json:"charge,omitempty"`

	// How many events this process takes from the store at once, to serve requests
	// from them without another call. A number, but no more than `events`; `auto`:
	// sized by traffic; `off`: one call for each request. None of them admits more
	// than `events`, but other processes lack what one has taken: a client whose
	// requests reach several may be refused while another process has events left. The
	// batches of `auto` hold at most 10 percent of `events` together.
	// Needs `charge` `before` and `fixed_window` or `sliding_window`; not with
	// `reserves`. Default: `off`.
	Batch Batch `json:"batch,omitempty"`

	// The response statuses that cost something: codes like `401` and classes like
	// `4xx`, or statuses of gRPC like `grpc:16`. `["all"]` charges every status. Default:
	// all but those in `count_status_not`.
	CountStatus StatusList `json:"count_status,omitempty"`

	// The response statuses that cost nothing. Not with `count_status`. Default:
	// `["304"]`, or none with `count_status`.
	CountStatusNot StatusList `json:"count_status_not,omitempty"`

	// The response statuses that empty the client's bucket, such as those of a login
	// that succeeds: what was counted before is forgiven, and the response costs
	// nothing. Requests of the client that are still running count when
	// they end. Not with `concurrency`. Default: none.
	ResetStatus StatusList `json:"reset_status,omitempty"`

	// The percentage of the limit from which a client is near it, from 1 to 100. The
	// first request of a client with which so much is used up in a window is logged,
	// counted in a metric, and emits the event `rate_limit_near`. Not with
	// `concurrency`. Default: none.
	Warn int `json:"warn,omitempty"`

	// How long to hold a request that does not fit until it does, in the order of
	// arrival at this process. A request that would have to wait longer is refused
	// at once. Use it with `charge` `before`: otherwise a slow request delays those
	// behind it until its response begins, even after its window, and requests held
	// by several processes can pass together. Not with `concurrency`. Default: 0,
	// which holds none.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`

	// How many requests each process holds at the same time, for each store. It
	// refuses those beyond. Default: 1000.
	MaxWaitQueue int `json:"max_wait_queue,omitempty"`

	// How long a refused client stays refused, even if there is room again.
	// Refusals in that time do not extend it, and a request that costs more than
	// could ever fit does not begin it. Not with `sliding_log`, `concurrency` and
	// `reserve`. Default: 0, no longer than needed.
	Penalty caddy.Duration `json:"penalty,omitempty"`

	// Whether a response with status 429 or 503 of the handlers behind, such as
	// `reverse_proxy`, keeps its client refused until it says: in `Retry-After`, or, if
	// nothing remains, `RateLimit`, `RateLimit-Reset` or `X-RateLimit-Reset`. At most an
	// hour. Such a time is a penalty: another response does not extend it. Not with
	// `sliding_log`, `concurrency` and a `reset_status` of 429 or 503. Default: false.
	ObeyUpstream bool `json:"obey_upstream,omitempty"`

	// The shares that are kept for more important requests, the most important ones
	// first. Requests that match none can use only what is not reserved. Default:
	// none.
	Reserves []*Reserve `json:"reserves,omitempty"`

	// The number of bits by which an IPv4 address in the key identifies a client:
	// its network counts. Default: 0, the whole address.
	IPv4Prefix int `json:"ipv4_prefix,omitempty"`

	// The number of bits by which an IPv6 address in the key identifies a client:
	// its network counts. One client commonly owns a network of 64 bits. Default:
	// 0, the whole address.
	IPv6Prefix int `json:"ipv6_prefix,omitempty"`

	// What happens to requests while the store cannot answer. `local`: this process
	// counts on alone, in memory, from what it knows. `deny`: they get the status 503.
	// `allow`: they pass without a limit. Default: the `on_error` of the store, which is
	// `local` by default.
	OnError string `json:"on_error,omitempty"`

	// The response status of clients that an operator has blocked: 429, or another one
	// from 400 to 499, such as 403. Default: 429.
	BlockStatus int `json:"block_status,omitempty"`

	// The percentage of the clients for which the limit is enforced, from 0 to 100;
	// fractions are allowed. The others are only observed: they pass, and metrics,
	// logs, placeholders and response headers show what would have been refused. A
	// hash of the client key, the same in every process, chooses the clients: a
	// higher percentage enforces the limit for more of them, and lifts it for none.
	// To change it while Caddy runs, replace this value through the admin API.
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
		Warn:        int64(z.Warn),
		BlockStatus: z.BlockStatus,
		Penalty:     time.Duration(z.Penalty), ObeyUpstream: z.ObeyUpstream, OnError: z.OnError, Enforce: z.Enforce,
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
		c.Free.Add(http.StatusNotModified)
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
