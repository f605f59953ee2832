package guarantees

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// outcome holds the observations of a cell.
type outcome struct {
	cell
	lagged                        time.Duration // the longest lag that was seen
	arrived                       time.Duration // the longest that a charge can have taken to arrive
	sent, served, refused, failed int64         // failed have no answer of the limiter
	beyond, room                  int64         // as observed
	mayBeyond, mayRoom            int64         // the bounds of beyond and room
	windows, resets               int64         // resets is the most in one window
	others, disturbed             int64         // requests of the second client, and those that were not admitted
	unchecked                     int64         // admissions without a check, of all clients that roam like this one
}

func (c cell) judge(seen, others []response, peak int64, lagged, longest time.Duration) *outcome {
	// What lags longer than was set shows how long the machine stalled, as a Caddy may have
	// before it sent a charge.
	stalled := max(lagged-c.lag, 0)
	o := &outcome{cell: c, lagged: lagged, arrived: (arrival(longest) + stalled).Round(time.Millisecond), sent: int64(len(seen)), others: int64(len(others))}
	o.served, o.refused = count(seen, (*response).isAdmitted), count(seen, (*response).isRefused)
	o.failed = o.sent - o.served - o.refused
	o.beyond = c.limit.beyond(seen, peak)
	o.mayBeyond = c.limit.mayBeBeyond(c.caddys, unseen(seen, c.caddys, reach(o.arrived, lagged)), unasked(seen, c.caddys, o.arrived))
	o.room = newClient(c.limit, seen, o.arrived).room()
	o.mayRoom = c.limit.mayBeRoom(c.caddys)
	if c.limit.hasReset() {
		o.windows, o.resets = c.limit.wobble(seen, o.arrived)
	}
	o.disturbed = o.others - count(others, (*response).isAdmitted)
	return o
}

// isStill reports whether the machine stalled for so long that timeouts passed or that
// too little was sent, or too late.
func (o *outcome) isStill() bool { return o.failed > 0 || o.isIdle() || o.isChecked() }

// isChecked reports whether clients that should have been admitted without a check were not.
func (o *outcome) isChecked() bool { return o.roam != "" && o.unchecked == 0 }

func (o *outcome) breaches() (all []string) {
	tell := func(format string, args ...any) { all = append(all, o.cell.String()+": "+fmt.Sprintf(format, args...)) }
	if o.beyond > o.mayBeyond {
		tell("%d beyond the limit, at most %d may be", o.beyond, o.mayBeyond)
	}
	if o.room > o.mayRoom {
		tell("refused although there was room for %d, at most %d may be", o.room, o.mayRoom)
	}
	if o.resets > 1 {
		tell("%d resets in one window", o.resets)
	}
	if o.disturbed > 0 {
		tell("%d of %d requests of the second client were not admitted", o.disturbed, o.others)
	}
	if o.failed > 0 {
		tell("%d of %d requests got no answer of the limiter", o.failed, o.sent)
	}
	if o.isIdle() {
		tell("the limit was not reached: %d sent, %d refused", o.sent, o.refused)
	}
	if o.isChecked() {
		tell("no request was admitted without a check")
	}
	return all
}

// isIdle reports whether a client that should have reached its limit did not.
func (o *outcome) isIdle() bool {
	return o.refused == 0 && (o.limit.algorithm != concurrency || int64(o.connections) > o.limit.events)
}

func (o *outcome) String() string {
	return fmt.Sprintf("%s: %d sent, %d served, %d of %d beyond, room for %d of %d, lag %v, arrival %v, %d windows, %d unchecked",
		o.cell, o.sent, o.served, o.beyond, o.mayBeyond, o.room, o.mayRoom,
		o.lagged.Round(time.Millisecond), o.arrived, o.windows, o.unchecked)
}

// The load under faults.
const (
	faultCaddys      = 2
	faultConnections = 4                      // of each client
	faultPace        = 25 * time.Millisecond  // between the requests of a connection
	calm             = 500 * time.Millisecond // the time before and after the fault
	// longestCharge is how long a charge can be in flight unseen: charge_timeout, two
	// seconds for the reply, and time for the next charge.
	longestCharge = 3 * time.Second
)

// faultLimits are limits whose windows outlast the faults, and which no client reaches.
func faultLimits() (all []limit) {
	for _, l := range limits() {
		if l.batched || l.algorithm == concurrency {
			continue
		}
		l.events, l.window, l.takes = 5000, 48*time.Hour, 0
		if l.burst > 0 {
			l.burst = l.events
		}
		all = append(all, l)
	}
	return all
}

func tryFaults(ctx context.Context, set settings, wanted *regexp.Regexp) (all []*loss, err error) {
	for _, f := range faults() {
		if ctx.Err() != nil || !wanted.MatchString(f.name) {
			continue
		}
		losses, failed := f.try(ctx, set, faultLimits())
		err = errors.Join(err, failed)
		for _, l := range losses {
			fmt.Println(l)
			err = errors.Join(err, exceeded(l.breaches()))
		}
		all = append(all, losses...)
	}
	return all, err
}

func (f fault) try(ctx context.Context, set settings, limits []limit) (_ []*loss, err error) {
	shard, err := redistest.LaunchShard(1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, shard.Stop()) }()
	proxy, err := redistest.NewProxy(shard.Primary.Addr())
	if err != nil {
		return nil, err
	}
	defer proxy.Close()
	// Metrics tell the stores of the limits apart.
	stores, handlers := apart(limits, proxy.Addr(), shard, "", 250*time.Millisecond)
	sites, err := set.shop.StartAll(faultCaddys, site.Config{
		Log: "exclude http.log.error", Stores: stores, Routes: []string{"route {\n" + handlers + "respond ok\n}"},
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, site.StopAll(sites)) }()

	sending, end := context.WithCancel(ctx)
	losses, running := make([]*loss, len(limits)), sync.WaitGroup{}
	for i, l := range limits {
		running.Go(func() {
			t := &sender{client: faultClient, zone: l.zone(), sites: sites, connections: faultConnections, pace: faultPace, rest: faultPace}
			losses[i] = newLoss(f, l, t.run(sending))
		})
	}
	_ = traffic.Pause(ctx, calm)
	err = f.inflict(ctx, proxy)
	_ = traffic.Pause(ctx, calm)
	end()
	running.Wait()
	_ = traffic.Pause(ctx, longestCharge)
	if err != nil {
		return nil, err
	}
	for _, l := range losses {
		if err := l.look(ctx, sites); err != nil {
			return nil, err
		}
	}
	return losses, nil
}

const faultClient = "client"

func newLoss(f fault, l limit, seen []response) *loss {
	served, refused := count(seen, (*response).isAdmitted), count(seen, (*response).isRefused)
	return &loss{fault: f.name, limit: l, served: served, refused: refused, unanswered: int64(len(seen)) - served - refused}
}

// look waits until nothing is in flight, unsent or uncertain, and reads the counts.
func (l *loss) look(ctx context.Context, sites []*site.Site) error {
	settled := false
	err := traffic.Poll(ctx, time.Minute, func() error {
		waiting, used := int64(0), int64(0)
		for _, s := range sites {
			b, err := readBucket(s, l.limit, faultClient)
			if err != nil {
				return err
			}
			waiting += b.waiting
			used = max(used, b.used)
		}
		// A charge may arrive after its bucket was read, so two readings must agree.
		if settled && waiting == 0 {
			l.counted = used
			return nil
		}
		settled = waiting == 0
		return fmt.Errorf("%s, %s: %d charges are still in flight", l.fault, l.limit, waiting)
	})
	if err != nil {
		return err
	}
	all, err := site.AllMetrics(sites)
	for _, m := range all {
		store := `store="` + l.limit.zone() + `"`
		l.uncertain += int64(m.Sum("caddy_rate_limit_undelivered_total", store, `outcome="uncertain"`))
		l.notRefunded += int64(m.Sum("caddy_rate_limit_undelivered_total", store, `operation="refund"`))
		if l.limit.charge == before {
			for _, kind := range []string{"timeout", "connection"} {
				l.untold += int64(m.Sum("caddy_rate_limit_store_errors_total", store, `kind="`+kind+`"`))
			}
		}
	}
	return err
}

// bucket is a client's count at the primary, and the number of charges that a Caddy has
// yet to deliver.
type bucket struct{ used, waiting int64 }

func readBucket(s *site.Site, l limit, client string) (b bucket, err error) {
	text, err := s.Get("/rate_limit/buckets/" + l.zone() + "?key=" + url.QueryEscape(client) + "&store=" + l.zone())
	if err != nil {
		return b, err
	}
	var answer struct {
		Error string `json:"error"`
		adminapi.Buckets
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return b, fmt.Errorf("read a bucket: %w", err)
	}
	if n := len(answer.Buckets.Buckets); answer.Error != "" || n != 1 {
		return b, fmt.Errorf("read a bucket: %d of them, error %q", n, answer.Error)
	}
	for _, server := range answer.Buckets.Buckets[0].Servers {
		if server.Role != store.RolePrimary {
			continue
		}
		if server.Error != "" {
			b.waiting++ // so that it is read again
		}
		if server.State != nil {
			b.used = *server.State.Used
		}
	}
	if of := answer.Buckets.Buckets[0].Ledger; of != nil {
		b.waiting += of.InFlight + of.Unsent
	}
	return b, nil
}

// fault is a fault of the connection between Caddy and the primary.
type fault struct {
	name  string
	once  func(ctx context.Context, p *redistest.Proxy) error // begins and ends it
	times int
	apart time.Duration // between two times
}

func faults() []fault {
	return []fault{
		{"connections cut", func(_ context.Context, p *redistest.Proxy) error { return p.Cut() }, 60, 40 * time.Millisecond},
		{"replies swallowed for 300 ms", func(ctx context.Context, p *redistest.Proxy) error {
			if err := p.SwallowReplies(); err != nil {
				return err
			}
			_ = traffic.Pause(ctx, 300*time.Millisecond)
			return p.Pass()
		}, 3, 700 * time.Millisecond},
	}
}

func (f fault) inflict(ctx context.Context, p *redistest.Proxy) error {
	for range f.times {
		_ = traffic.Pause(ctx, f.apart)
		if err := f.once(ctx, p); err != nil {
			return err
		}
	}
	_ = traffic.Pause(ctx, f.apart)
	return ctx.Err()
}

// loss is the effect of a fault on a client's charges.
type loss struct {
	fault string
	limit limit
	// refused are the requests that the limit refused, unanswered those that on_error
	// denied because the outcome of their take is unknown.
	served, refused, unanswered int64
	counted                     int64 // by Redis
	uncertain, untold           int64 // charges and refunds, and takes, with an unknown outcome
	notRefunded                 int64 // refunds that were given up or are uncertain
}

// double is how much more was counted than was served, lost how much less.
func (l *loss) double() int64 { return max(l.counted-l.served, 0) }
func (l *loss) lost() int64   { return max(l.served-l.counted, 0) }

// mayBeDouble bounds double. With charge after nothing is sent twice. With charge before
// the takes of requests that were denied for want of a reply may count; a sliding log
// refunds those by name, unless the refund fails too.
func (l *loss) mayBeDouble() int64 {
	switch {
	case l.limit.charge == after:
		return 0
	case l.limit.algorithm == slidingLog:
		return l.notRefunded
	default:
		return min(l.untold, l.unanswered)
	}
}

// mayBeLost bounds lost. With charge after any charge without a reply may be lost. With
// charge before a request is served only after its take.
func (l *loss) mayBeLost() int64 {
	if l.limit.charge == after {
		return l.uncertain
	}
	return 0
}

// untouched is the breach of a client that the fault did not affect.
const untouched = "no reply was lost, so the fault did not happen"

func (l *loss) breaches() (all []string) {
	tell := func(format string, args ...any) {
		all = append(all, fmt.Sprintf("%s, %s: ", l.fault, l.limit)+fmt.Sprintf(format, args...))
	}
	if n, most := l.double(), l.mayBeDouble(); n > most {
		tell("%d counted beyond what was served, at most %d may be", n, most)
	}
	if n, most := l.lost(), l.mayBeLost(); n > most {
		tell("%d served and not counted, at most %d may be", n, most)
	}
	if l.uncertain+l.untold == 0 {
		tell(untouched)
	}
	if l.refused > 0 {
		tell("%d requests were refused, though the limit is far", l.refused)
	}
	return all
}

func (l *loss) String() string {
	return fmt.Sprintf("%s, %s: %d served, %d unanswered, %d counted, %d uncertain, %d untold; %d of %d double, %d of %d lost",
		l.fault, l.limit, l.served, l.unanswered, l.counted, l.uncertain, l.untold, l.double(), l.mayBeDouble(), l.lost(), l.mayBeLost())
}
