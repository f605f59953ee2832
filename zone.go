package shardlimit

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
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

	// How many events are admitted per window and client, or with
	// `concurrency` at the same time: a number from 1 to 2^52, or a text with a
	// placeholder that yields one for the request, in which case
	// `events_fallback` is needed as well. The placeholder may also yield `0`,
	// which refuses the request, or `unlimited`, with which the zone does not
	// count it. Some algorithms admit fewer; a number that is out of range
	// becomes the nearest one. Changing it keeps what is counted. Required.
	Events Amount `json:"events,omitempty"`

	// What counts where the placeholder of `events` yields neither a whole number
	// from 0 on nor `unlimited`.
	EventsFallback int64 `json:"events_fallback,omitempty"`

	// The length of the window, from 1 millisecond to 100 years. With
	// `concurrency` it is how long the slot of a process that died stays taken,
	// at least 1 second. Changing it starts new counters. Required; with
	// `concurrency` the default is 1 minute.
	Window caddy.Duration `json:"window,omitempty"`

	// How events are counted. `fixed_window`: in windows that begin with a
	// client's first request; at the border of two a client can get twice as
	// much. `sliding_window`: as the last window of time, estimated from two
	// counters; up to 2^32-1 events. `sliding_log`: as the last window of time,
	// exactly, at the price of storing each event; up to 100000 events.
	// `gcra`: evenly spread, with bursts. `concurrency`: requests at the same
	// time; up to 100000 events. Changing it starts new counters. Default:
	// `fixed_window`.
	Algorithm string `json:"algorithm,omitempty"`

	// With `fixed_window`: windows begin on the clock, in UTC, at multiples of
	// their length since 1970, for all clients at once, and not with a
	// client's first request. Changing it starts new counters. Default: false.
	Align bool `json:"align,omitempty"`

	// With `gcra`: how many events are admitted at once, from 1 to 2^52, while
	// `events` per `window` is the rate at which they come back, all of them
	// within 100 years. Changing it keeps what is counted. Default: `events`.
	Burst int64 `json:"burst,omitempty"`

	// What a request costs: a number from 0 to 2^52, or a text with a
	// placeholder that yields one. The placeholder is read when the request
	// comes and again when its response begins, and the latter counts:
	// `{http.response.header.X-Cost}` charges what the backend says. Where it
	// yields no such number, the cost is 1. A request of cost 0 is free and is
	// told where it stands, so do not read the cost from what clients send.
	// Default: 1.
	Cost Amount `json:"cost,omitempty"`

	// When requests are charged. `after`: once the response's status is known.
	// Until then a request counts in this process, in later windows too if it is
	// slow, so that one process never admits more than `events`; several
	// processes together may. `before`: when they come, in one step with the
	// check, so that never more than `events` are admitted; the price is that
	// the primary is asked, and what turns out to be free is given back.
	// Default: `after`; with `concurrency` always `before`.
	Charge string `json:"charge,omitempty"`

	// How many events this process takes from the store at once, to serve
	// requests from them without asking the store again. A number: so many,
	// and no more than `events`. `auto`: sized by traffic. `off`: each request
	// asks. No more than `events` are admitted with any of them, but what one
	// process has taken is not there for the others: a client whose requests
	// reach several may be refused while another process has events left.
	// Needs `charge` `before` and `fixed_window` or `sliding_window`; not with
	// `reserves`. Default: `off`.
	Batch Batch `json:"batch,omitempty"`

	// With `batch` `auto`: how many percent of `events` the batches of all
	// processes together hold at most, from 1 to 100. More means fewer calls,
	// and more events that are not there for who needs them. Default: 10.
	BatchShare int `json:"batch_share,omitempty"`

	// The response statuses that cost nothing: codes like `304` and classes
	// like `5xx`. `["none"]` charges every status. Default: `["304"]`, or none
	// where `count_status` is given.
	FreeStatus StatusList `json:"free_status,omitempty"`

	// The only response statuses that cost something. With `[401, 403]` a zone
	// stops those who guess passwords. Not together with `free_status`.
	// Default: all that are not free.
	CountStatus StatusList `json:"count_status,omitempty"`

	// How long a request that does not fit is held until it does, in the order
	// of arrival at this process. A request that would have to wait longer is
	// refused at once. Goes with `charge` `before`: otherwise a slow request
	// holds up those behind it until its response begins, even when its window
	// is over, and requests held by several processes can pass together. Not
	// with `concurrency`. Default: 0, none is held.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`

	// How many requests are held at the same time by each process, for each
	// store; those beyond are refused. Default: 1000.
	MaxWaitQueue int `json:"max_wait_queue,omitempty"`

	// How long a client that was refused stays refused, even if there is room
	// again. Requests that are refused meanwhile do not make it longer. A
	// request that costs more than could ever fit is no reason for it. Not with
	// `sliding_log`, `concurrency` and `reserve`. Default: 0, no longer than
	// needed.
	Penalty caddy.Duration `json:"penalty,omitempty"`

	// What is kept for more important requests, the most important ones first.
	// Requests that match none have only what is not reserved. Default: none.
	Reserves []*Reserve `json:"reserves,omitempty"`

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

	// For how many percent of the clients the limit is enforced, from 0 to 100;
	// fractions are allowed. The others are only observed: they pass where they
	// would be refused, which metrics, logs and placeholders tell, and the
	// response headers show what would have been. A hash of the client key, the
	// same in every process, decides who is who: more percent enforce the limit
	// for more clients, and lift it for none. To change it while Caddy runs,
	// replace this value by the admin API. Default: 100.
	Enforce *float64 `json:"enforce,omitempty"`
}

// provision compiles a valid zone, and loads its matchers.
func (z *Zone) provision(ctx caddy.Context) (*limiter.Zone, error) {
	c := z.compile()
	if err := loadMatchers(ctx, z, z.MatcherSetsRaw, &c.Matchers); err != nil {
		return nil, fmt.Errorf("zone %s: %w", z.Name, err)
	}
	for i, reserve := range z.Reserves {
		if err := loadMatchers(ctx, reserve, reserve.MatcherSetsRaw, &c.Reserves[i].Matchers); err != nil {
			return nil, fmt.Errorf("zone %s: reserve %d: %w", z.Name, reserve.Percent, err)
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
		return fmt.Errorf("load matchers: %w", err)
	}
	return nil
}

// compile returns what the zone is for requests, without matchers.
func (z *Zone) compile() *limiter.Zone {
	c := &limiter.Zone{
		Name: z.Name, Key: z.Key, IPv4Prefix: z.IPv4Prefix, IPv6Prefix: z.IPv6Prefix,
		Algorithm: z.algorithm(), Window: z.window(), Align: z.Align, Burst: z.Burst,
		Events: z.Events.quantity(z.EventsFallback), Cost: cmp.Or(z.Cost, "1").quantity(1),
		ChargeBefore: z.Charge == limiter.ChargeBefore,
		BatchShare:   int64(cmp.Or(z.BatchShare, defaultBatchShare)),
		MaxWait:      time.Duration(z.MaxWait), MaxWaitQueue: cmp.Or(z.MaxWaitQueue, limiter.DefaultMaxWaitQueue),
		Penalty: time.Duration(z.Penalty), OnError: z.OnError, Enforce: z.Enforce,
	}
	c.Batch, _ = z.Batch.parse()
	switch {
	case len(z.CountStatus) > 0:
		counted, _ := z.CountStatus.compile()
		c.Free = counted.Complement()
	case len(z.FreeStatus) > 0:
		c.Free, _ = z.FreeStatus.compile()
	default:
		c.Free.Add(http.StatusNotModified)
	}
	for _, reserve := range z.Reserves {
		c.Reserves = append(c.Reserves, limiter.Reserve{Percent: int64(reserve.Percent)})
	}
	return c
}

// defaultLease is how long the slot of a process that died stays taken.
const defaultLease = time.Minute

// window is the length of the window, or of a lease.
func (z *Zone) window() time.Duration {
	if z.isLease() && z.Window == 0 {
		return defaultLease
	}
	return time.Duration(z.Window)
}

// isLease reports whether the zone counts requests while they run.
func (z *Zone) isLease() bool { return z.algorithm() == store.Concurrency }

// Reserve is a part of a zone's capacity that is kept for important requests.
type Reserve struct {
	// How much of the zone's `events`, or `burst`, is kept, in percent from 1
	// to 100, rounded up to whole events. Required.
	Percent int `json:"percent,omitempty"`

	// The requests for which it is kept; those that match any of the sets.
	// They may use what is kept for those after them as well. Required.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`
}

func (z *Zone) validateReserves() error {
	sum := 0
	for _, r := range z.Reserves {
		switch {
		case r == nil:
			return option.Errorf("reserve", "is null: define or remove it")
		case r.Percent < 1 || r.Percent > 100:
			return option.Errorf("reserve", "%d: it must be from 1 to 100 percent", r.Percent)
		case len(r.MatcherSetsRaw) == 0:
			return option.Errorf("reserve", "%d has no matchers: say for which requests it is kept", r.Percent)
		}
		if sum += r.Percent; sum > 100 {
			return option.Errorf("reserve", "%d makes it %d percent together: it must be at most 100", r.Percent, sum)
		}
	}
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
	add := func(different bool, format string, args ...any) {
		if different {
			fmt.Fprintf(&b, ", "+format, args...)
		}
	}
	if add(true, "events %s", z.Events.canonical()); z.EventsFallback != 0 {
		fmt.Fprintf(&b, " %d", z.EventsFallback)
	}
	window := time.Duration(z.Window)
	if z.isLease() && window == defaultLease {
		window = 0
	}
	add(window != 0, "window %s", window)
	add(z.Algorithm != "" && z.Algorithm != "fixed_window", "algorithm %s", z.Algorithm)
	add(z.Align, "align")
	add(z.Burst != 0 && strconv.FormatInt(z.Burst, 10) != z.Events.canonical(), "burst %d", z.Burst)
	add(z.Cost != "" && z.Cost.canonical() != "1", "cost %s", z.Cost.canonical())
	add(z.Charge == limiter.ChargeBefore && !z.isLease(), "charge %s", z.Charge)
	batch, _ := z.Batch.parse()
	add(batch != 0, "batch %s", Amount(z.Batch).canonical())
	add(z.BatchShare != 0 && z.BatchShare != defaultBatchShare, "batch_share %d", z.BatchShare)
	free := sortedStatuses(z.FreeStatus)
	add(free != "" && free != "304", "free_status %s", free)
	add(len(z.CountStatus) > 0, "count_status %s", sortedStatuses(z.CountStatus))
	add(z.MaxWait != 0, "max_wait %s", time.Duration(z.MaxWait))
	add(z.MaxWaitQueue != 0 && z.MaxWaitQueue != limiter.DefaultMaxWaitQueue, "max_wait_queue %d", z.MaxWaitQueue)
	add(z.Penalty != 0, "penalty %s", time.Duration(z.Penalty))
	for _, reserve := range z.Reserves {
		add(true, "reserve %d", reserve.Percent)
	}
	add(z.IPv4Prefix != 0, "ipv4_prefix %d", z.IPv4Prefix)
	add(z.IPv6Prefix != 0, "ipv6_prefix %d", z.IPv6Prefix)
	add(z.OnError != "", "on_error %s", z.OnError)
	return b.String()
}

func sortedStatuses(l StatusList) string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(l))), " ")
}
