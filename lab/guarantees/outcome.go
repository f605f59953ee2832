package guarantees

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

// outcome holds the observations of a cell.
type outcome struct {
	cell
	// lagged is the longest lag that was seen, arrived the longest that a charge
	// can have taken to arrive.
	lagged, arrived time.Duration

	sent, served, refused int64
	failed                int64 // requests without an answer of the limiter
	// beyond and room are what was seen, mayBeyond and mayRoom what may be.
	beyond, mayBeyond int64
	room, mayRoom     int64
	windows, resets   int64 // windows is how many there were, resets the most in one of them
	// disturbed is how many requests of the second client were not admitted, of
	// how many.
	disturbed, others int64
}

func (c cell) judge(seen, others []response, peak int64, lagged, longest time.Duration) *outcome {
	o := &outcome{cell: c, lagged: lagged, arrived: arrival(longest), sent: int64(len(seen)), others: int64(len(others))}
	o.served, o.refused = count(seen, (*response).isAdmitted), count(seen, (*response).isRefused)
	o.failed = o.sent - o.served - o.refused
	o.beyond = c.limit.beyond(seen, peak)
	o.mayBeyond = c.limit.mayBeBeyond(c.caddys, unseen(seen, c.caddys, reach(o.arrived, lagged)))
	o.room = newClient(c.limit, seen, o.arrived).room()
	o.mayRoom = c.limit.mayBeRoom(c.caddys)
	if c.limit.hasReset() {
		o.windows, o.resets = wobble(seen, c.limit.window)
	}
	o.disturbed = o.others - count(others, (*response).isAdmitted)
	return o
}

// isStill reports whether the machine stood still for so long that timeouts passed,
// or that too little was sent.
func (o *outcome) isStill() bool { return o.failed > 0 || o.isIdle() }

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
	return all
}

// isIdle reports whether a client that should have reached its limit did not, so
// that nothing was tried.
func (o *outcome) isIdle() bool {
	return o.refused == 0 && (o.limit.algorithm != concurrency || int64(o.connections) > o.limit.events)
}

func (o *outcome) String() string {
	return fmt.Sprintf("%s: %d sent, %d served, %d of %d beyond, room for %d of %d, lag %v, arrival %v, %d windows",
		o.cell, o.sent, o.served, o.beyond, o.mayBeyond, o.room, o.mayRoom,
		o.lagged.Round(time.Millisecond), o.arrived, o.windows)
}

func document(set settings, took time.Duration, outcomes []*outcome, losses []*loss) string {
	return head(set, took, outcomes) + limitTable(outcomes) + "\n" + resetTable(outcomes) + "\n" + lossTable(losses)
}

func head(set settings, took time.Duration, outcomes []*outcome) string {
	lagged := map[time.Duration]time.Duration{}
	var arrived time.Duration
	var sent, others, disturbed int64
	for _, o := range outcomes {
		lagged[o.lag] = max(lagged[o.lag], o.lagged)
		sent, others, disturbed, arrived = sent+o.sent, others+o.others, disturbed+o.disturbed, max(arrived, o.arrived)
	}
	seen := ""
	for _, lag := range lags {
		seen += fmt.Sprintf(" %s: %v;", lagName(lag), lagged[lag].Round(time.Millisecond))
	}
	return fmt.Sprintf("%s. `make guarantees` took %v, each cell %v: %d requests of clients, and %d of others, of which %d were not admitted. The longest lag that was seen, by what was set:%s the longest arrival: %v. The bounds of a cell reckon with its own.\n\n",
		report.Machine(), took.Round(time.Second), set.lasts, sent, others, disturbed, seen, arrived)
}

func lagName(lag time.Duration) string {
	if lag == 0 {
		return "none"
	}
	number := strings.TrimRight(lag.String(), "ms")
	return number + " " + strings.TrimPrefix(lag.String(), number)
}

// row is a row of the table: all numbers of requests at a time.
type row struct {
	limit  limit
	caddys int
	lag    time.Duration
}

func rows(outcomes []*outcome) (order []row, of map[row][]*outcome) {
	of = map[row][]*outcome{}
	for _, o := range outcomes {
		r := row{o.limit, o.caddys, o.lag}
		of[r] = append(of[r], o)
	}
	for _, l := range limits() {
		for _, caddys := range caddyCounts {
			for _, lag := range lags {
				if r := (row{l, caddys, lag}); of[r] != nil {
					order = append(order, r)
				}
			}
		}
	}
	return order, of
}

func limitTable(outcomes []*outcome) string {
	t := report.NewTable("algorithm, charge", "Caddys", "replica lag", "admitted beyond the limit: 1", "16", "256 at a time",
		"refused though there was room for: 1", "16", "256 at a time")
	order, of := rows(outcomes)
	for _, r := range order {
		cells := []string{r.limit.String(), strconv.Itoa(r.caddys), lagName(r.lag)}
		for _, figure := range []func(*outcome) (int64, int64){
			func(o *outcome) (int64, int64) { return o.beyond, o.mayBeyond },
			func(o *outcome) (int64, int64) { return o.room, o.mayRoom },
		} {
			for _, connections := range crowds {
				cells = append(cells, atATime(of[r], connections, figure))
			}
		}
		t.Row(cells...)
	}
	return t.String()
}

func atATime(outcomes []*outcome, connections int, figure func(*outcome) (int64, int64)) string {
	for _, o := range outcomes {
		if o.connections == connections {
			n, most := figure(o)
			return mark(n, most)
		}
	}
	return ""
}

// mark writes what was seen and what may be, and makes an excess stand out.
func mark(n, most int64) string {
	if n > most {
		return fmt.Sprintf("**%d of %d**", n, most)
	}
	return fmt.Sprintf("%d of %d", n, most)
}

func resetTable(outcomes []*outcome) string {
	t := report.NewTable("algorithm, charge", "Caddys", "responses", "windows", "resets in one window")
	for _, l := range limits() {
		if !l.hasReset() {
			continue
		}
		for _, caddys := range caddyCounts {
			var responses, windows, resets int64
			for _, o := range outcomes {
				if o.limit == l && o.caddys == caddys {
					responses, windows, resets = responses+o.served+o.refused, windows+o.windows, max(resets, o.resets)
				}
			}
			if responses > 0 {
				t.Rowf("%s | %d | %d | %d | %s", l, caddys, responses, windows, mark(resets, 1))
			}
		}
	}
	return t.String()
}

func lossTable(losses []*loss) string {
	t := report.NewTable("fault", "algorithm, charge", "served", "denied", "counted in Redis", "charges and refunds without a reply",
		"takes without a reply", "counted beyond what was served", "served and not counted")
	for _, l := range losses {
		t.Rowf("%s | %s | %d | %d | %d | %d | %d | %s | %s", l.fault, l.limit, l.served, l.unanswered,
			l.counted, l.uncertain, l.untold, mark(l.double(), l.mayBeDouble()), mark(l.lost(), l.mayBeLost()))
	}
	return t.String()
}

const (
	faultCaddys = 2 // how many Caddys serve while replies are lost
	// faultConnections is how many requests of a client there are at a time, and
	// faultPace how long each connection waits in between.
	faultConnections = 4
	faultPace        = 25 * time.Millisecond
	calm             = 500 * time.Millisecond // how long there is no fault at first, and at the end
	// longestCharge is how long a charge can be in flight unseen: charge_timeout and two
	// seconds for the reply, and time for the next charge.
	longestCharge = 3 * time.Second
)

// faultLimits are limits that forget nothing while faults last, and refuse no client.
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
	// Each limit has a store, so that metrics tell them apart.
	stores, handlers := "", ""
	for _, l := range limits {
		stores += fmt.Sprintf("store %s redis {\nshard a {\nprimary %s\nreplica %s\n}\nkey_prefix %s\ncheck_timeout 250ms\non_error deny\n}\n",
			l.zone(), proxy.Addr(), shard.Replicas[0].Addr(), l.zone())
		handlers += "rate_limit {\nstore " + l.zone() + "\n" + l.caddyfile() + "}\n"
	}
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

// faultClient is the client that is served under faults.
const faultClient = "client"

func newLoss(f fault, l limit, seen []response) *loss {
	served, refused := count(seen, (*response).isAdmitted), count(seen, (*response).isRefused)
	return &loss{fault: f.name, limit: l, served: served, refused: refused, unanswered: int64(len(seen)) - served - refused}
}

// countTimeout bounds how long charges may take whose replies were lost.
const countTimeout = time.Minute

// look waits until nothing is in flight, unsent or uncertain, and reads the counts.
func (l *loss) look(ctx context.Context, sites []*site.Site) error {
	settled := false
	err := traffic.Poll(ctx, countTimeout, func() error {
		waiting, used := int64(0), int64(0)
		for _, s := range sites {
			b, err := readBucket(s, l.limit, faultClient)
			if err != nil {
				return err
			}
			waiting += b.waiting
			used = max(used, b.used)
		}
		// A charge may arrive after its bucket was read, so two readings have to agree.
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

// bucket is a client's count at the primary, and the charges that a Caddy has yet to
// deliver.
type bucket struct{ used, waiting int64 }

func readBucket(s *site.Site, l limit, client string) (b bucket, err error) {
	text, err := s.Get("/rate_limit/buckets/" + l.zone() + "?key=" + url.QueryEscape(client) + "&store=" + l.zone())
	if err != nil {
		return b, err
	}
	var answer struct {
		Error   string `json:"error"`
		Buckets []struct {
			Servers []struct {
				Role  string `json:"role"`
				Error string `json:"error"`
				State *struct {
					Used int64 `json:"used"`
				} `json:"state"`
			} `json:"servers"`
			Ledger *struct {
				InFlight int64 `json:"in_flight"`
				Unsent   int64 `json:"unsent"`
			} `json:"ledger"`
		} `json:"buckets"`
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return b, fmt.Errorf("read a bucket: %w", err)
	}
	if answer.Error != "" || len(answer.Buckets) != 1 {
		return b, fmt.Errorf("read a bucket: %d of them, error %q", len(answer.Buckets), answer.Error)
	}
	for _, server := range answer.Buckets[0].Servers {
		if server.Role != "primary" {
			continue
		}
		if server.Error != "" {
			// It is asked again.
			b.waiting++
		}
		if server.State != nil {
			b.used = server.State.Used
		}
	}
	if of := answer.Buckets[0].Ledger; of != nil {
		b.waiting += of.InFlight + of.Unsent
	}
	return b, nil
}

// fault is a fault of the connection between Caddy and the primary.
type fault struct {
	name string
	once func(ctx context.Context, p *redistest.Proxy) error // once makes it happen, and ends it
	// times is how often it happens, apart how long there is nothing in between.
	times int
	apart time.Duration
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
	// served is how many requests were, refused how many the limit refused, and
	// unanswered how many on_error denied because it is not known whether what
	// they took counts.
	served, refused, unanswered int64
	counted                     int64 // what Redis holds
	// uncertain is how many charges and refunds Caddy does not know the outcome
	// of, untold how many takes; notRefunded is how many refunds were given up,
	// with those that are uncertain.
	uncertain, untold, notRefunded int64
}

// double is how much more was counted than was served, lost how much less.
func (l *loss) double() int64 { return max(l.counted-l.served, 0) }
func (l *loss) lost() int64   { return max(l.served-l.counted, 0) }

// mayBeDouble is how much more may be counted than was served: with charge after nothing,
// for nothing is sent twice; with charge before the takes of requests that were denied
// for want of a reply. A sliding log refunds those by name, unless the refund fails too.
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

// mayBeLost is how much less may be counted: with charge after the charges without a
// reply, any of which may not have arrived; with charge before nothing, for a request is
// served only after its take.
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
