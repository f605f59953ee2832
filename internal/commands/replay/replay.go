// Package replay runs requests of the past, from access logs, through the zones of a config: with the
// clock of the log, and the counts in memory. [Run] returns what the zones would have done.
//
// The lines of logs are read in parallel (source.go, line.go, scan.go), as the config writes them
// (logging.go), put into the order of arrivals (clock.go), and decided by the limiters of the config
// (site.go), one after the other: a request is checked when it arrived, and settled with the status of
// the log when its response had ended. What logs lack is named (lacking.go), and the zones that need it are left out.
package replay

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/routes"
)

// Bounds of the memory.
const (
	// reorder is how long a request may have taken to be decided in the order of arrivals, and
	// mostPending how many requests are put in order at a time.
	reorder     = time.Minute
	mostPending = 1 << 14
	// defaultMost is how many clients of a zone are remembered, and buckets of a store.
	defaultMost = 1_000_000
)

// GCPercent is how rarely garbage is collected where a replay is all that a process does: a third less
// time for twice the memory.
const GCPercent = 400

// Config says what is replayed.
type Config struct {
	// HTTP is the JSON of the http app. The context of [Run] has the app rate_limit.
	HTTP json.RawMessage
	// Server is the server of the log; empty for the only one that has limits.
	Server string
	// Host is the host of requests in logs that have none.
	Host string
	// MaxNewBuckets are those of the stores, by name.
	MaxNewBuckets map[string]int

	// Logging is the JSON of the config's logging, if it has any.
	Logging json.RawMessage
	// Logs are files; "-" is Stdin.
	Logs  []string
	Stdin io.Reader
	// Suggest is the share of clients that suggested limits may refuse; negative for no suggestions.
	Suggest float64
	// MostClients is how many clients of a zone are remembered; 0 for a million.
	MostClients int
	// MostBuckets is how many buckets each store keeps; 0 for a million.
	MostBuckets int
	// Progress, if set, is called now and then.
	Progress func(p Progress)
	// Decided, if set, is called for each decision of a zone. The line lasts as long as the call.
	Decided func(l *Line, d limiter.Decision)

	evicted int64
}

// Progress is how far a replay is.
type Progress struct {
	Requests int64
	// Read are the bytes of logs that were read, and Total those that there are; 0 if that is not known.
	Read, Total int64
	// At is the time of the log.
	At time.Time
}

// run is a replay.
type run struct {
	*Config
	*site
	clock
	logs    *logs
	tallies map[tallyID]*tally
	order   []*tally
	last    *tally
	sizing  *sizing
	// passedOver are the modules of handlers that were not run.
	passedOver map[string]bool
	formats    map[Format]bool
	origins    map[origin]bool
	// leftOut are the zones that are left out, which skip selects; both are nil without any.
	leftOut map[*limiter.Zone]bool
	skip    func(z *limiter.Zone) bool
	// pending counts requests that were read and have not ended.
	pending  int
	answer   result.Replay
	late     int64
	unjudged int64
	reason   string
}

type tallyID struct{ store, zone string }

// Run replays logs until ctx ends. With an error about logs that could not be read to their ends it
// returns what it found.
func Run(ctx context.Context, loaded caddy.Context, c Config) (result.Replay, error) {
	c.MostClients, c.MostBuckets = cmp.Or(c.MostClients, defaultMost), cmp.Or(c.MostBuckets, defaultMost)
	r := &run{Config: &c, tallies: map[tallyID]*tally{}, passedOver: map[string]bool{}, formats: map[Format]bool{}, origins: map[origin]bool{}}
	var err error
	if r.site, err = loadSite(loaded, r.Config, &r.clock); err != nil {
		return result.Replay{}, err
	}
	defer func() { r.close() }()
	if c.Suggest >= 0 {
		if r.sizing, err = r.newSizing(loaded); err != nil {
			return result.Replay{}, err
		}
		defer r.sizing.close()
	}
	reading, stop := context.WithCancel(ctx)
	defer stop()
	if r.logs, err = openLogs(c.Logs, c.Stdin, r.wanted(), r.prepare); err != nil {
		return result.Replay{}, err
	}
	if err := r.replay(reading); err != nil {
		return result.Replay{}, err
	}
	return r.sum()
}

// wanted returns what reads the headers that the zones need.
func (r *run) wanted() reader {
	wanted := reader{logging: r.logging, wantedResponse: []string{"Content-Length"}}
	for _, z := range r.zones {
		request, response, all := z.needs.headers()
		wanted.isAll = wanted.isAll || all
		wanted.wanted = append(wanted.wanted, request...)
		wanted.wantedResponse = append(wanted.wantedResponse, response...)
	}
	wanted.wanted, wanted.wantedResponse = sorted(wanted.wanted), sorted(wanted.wantedResponse)
	return wanted
}

// sorted returns each text once.
func sorted(texts []string) []string {
	slices.Sort(texts)
	return slices.Compact(texts)
}

// replay decides about all requests. What is read ahead is at most what may be put in order.
func (r *run) replay(ctx context.Context) error {
	latest := int64(0)
	shown := time.Now()
	for n := 0; ; n++ {
		p, err := r.logs.next(ctx)
		if err != nil || p == nil {
			r.drain()
			return err
		}
		r.begin(p)
		latest = max(latest, p.line.End)
		for r.pending > 0 && (r.pending >= mostPending || r.next() < latest-int64(reorder)) {
			r.step()
		}
		if n%1024 != 0 {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if r.Progress != nil && time.Since(shown) >= time.Second {
			shown = time.Now()
			r.Progress(Progress{r.answer.Requests, r.logs.bytes.Load(), r.logs.total.Load(), r.Now()})
		}
	}
}

func (r *run) drain() {
	for r.pending > 0 {
		r.step()
	}
}

// begin takes a request: it will arrive.
func (r *run) begin(p *passing) {
	l := &p.line
	r.answer.Requests++
	if l.refused {
		r.answer.RefusedBefore++
	}
	if !r.origins[l.origin()] {
		// Otherwise it would keep the text of the log.
		r.meetOrigin(origin{l.Format, strings.Clone(l.Logger)})
	}
	for _, z := range r.zones {
		if p.isHiding && z.reason == "" {
			r.leaveOut(z, z.hides(l))
		}
	}
	if r.hasPassed(l.At) {
		r.late++
	}
	if r.answer.From == 0 || seconds(l.At) < r.answer.From {
		r.answer.From = seconds(l.At)
	}
	r.answer.To = max(r.answer.To, seconds(l.At))
	r.pending++
	r.schedule(l.At, true, p)
}

// meetOrigin leaves out the zones for which lines of a new origin lack something.
func (r *run) meetOrigin(from origin) {
	r.origins[from], r.formats[from.format] = true, true
	for _, z := range r.zones {
		r.leaveOut(z, r.lacks(z, from, r.Host != ""))
	}
	if from.format != Caddy {
		return
	}
	for _, reason := range r.logging.leavesOut(from.logger) {
		if !slices.Contains(r.unlogged, reason) {
			r.unlogged = append(r.unlogged, reason)
		}
	}
}

func seconds(nanos int64) float64 { return float64(nanos/1000) / 1e6 }

// leaveOut leaves a zone out, if there is a reason.
func (r *run) leaveOut(z *zone, reason string) {
	if reason == "" || z.reason != "" {
		return
	}
	z.reason = reason
	if r.leftOut == nil {
		r.leftOut = map[*limiter.Zone]bool{}
		r.skip = func(z *limiter.Zone) bool { return r.leftOut[z] }
	}
	r.leftOut[z.Zone] = true
	if r.sizing != nil {
		r.sizing.leaveOut(z, r.leftOut)
	}
}

// passing is a request of a log on its way. Once it has ended, another line takes its place, which spares two
// fifths of the garbage.
type passing struct {
	run  *run
	line Line
	// isHiding is set if the line does not show what some zone needs.
	isHiding bool
	// err is why no zone, or not all, can judge the request.
	err      error
	arrived  http.Request
	response response
	walk     routes.Walk
	// canJudge is set while all zones that it meets can judge the request.
	canJudge   bool
	hasArrived bool
	// isOpen is set until a zone has refused the request. A request that is none never is.
	isOpen  bool
	passage limiter.Passage
	// sized is the same request where limits are suggested, if isSized is set.
	isSized bool
	sized   limiter.Passage
}

// reuse makes p one of another line.
func (p *passing) reuse() {
	p.line.reuse()
	p.passage.Reuse(&p.response)
	p.sized.Reuse(&p.response)
	p.isHiding, p.err, p.response, p.walk = false, nil, response{}, routes.Walk{}
	p.canJudge, p.hasArrived, p.isOpen, p.isSized = false, false, false, false
}

// prepare makes the request of a line, and leads it to the limiters. It runs in parallel: what depends
// on the time, and on other requests, comes when the request arrives.
func (r *run) prepare(p *passing) {
	p.run = r
	p.isHiding = slices.ContainsFunc(r.zones, func(z *zone) bool { return z.hides(&p.line) != "" })
	request, err := r.request(&p.line, r.Host, &p.response, &p.arrived)
	if p.err = err; err != nil {
		return
	}
	p.isOpen, p.canJudge, p.isSized = true, true, r.sizing != nil
	p.walk = routes.Walk{Server: r.server, W: &p.response, Meet: p.meet}
	p.err = p.walk.Lead(request)
}

// meet asks the limiter that replays one of the config, and that which suggests its limits.
func (p *passing) meet(l *limiter.Limiter, request *http.Request) (goesOn bool, err error) {
	p.canJudge = p.canJudge && p.passage.Meet(p.run.limiters[l], request)
	if p.isSized {
		p.sized.Meet(p.run.sizing.limiters[l], request)
	}
	return p.canJudge || p.isSized, nil
}

// happen makes the request arrive, and then its response end.
func (p *passing) happen() {
	if p.hasArrived {
		p.end()
	} else {
		p.arrive()
	}
}

func (p *passing) arrive() {
	r := p.run
	p.hasArrived = true
	if p.err != nil {
		r.unjudge(p.err)
	}
	for _, module := range p.walk.PassedOver {
		r.passedOver[module] = true
	}
	if p.isOpen {
		p.decide()
	}
	r.schedule(p.line.End, false, p)
}

// decide asks the zones.
func (p *passing) decide() {
	r := p.run
	status := p.passage.Ask(r.skip)
	p.passage.Decisions(p.count)
	if status != 0 {
		r.answer.Refused++
		p.passage.End(status, 0)
		p.isOpen = false
	}
	if p.isSized {
		p.sized.Ask(r.skip)
		p.sized.Decisions(r.sizing.count)
	}
}

// unjudge notes a request that cannot be judged.
func (r *run) unjudge(err error) {
	r.unjudged++
	if r.reason == "" {
		r.reason = err.Error()
	}
}

func (p *passing) count(d limiter.Decision) {
	t := p.run.tallyOf(&d)
	t.add(&d, p.run.Now().Unix(), p.run.MostClients)
	if d.Zone.FallsBack(d.ClientKey) {
		t.fellBack++
		p.run.fallsBack(&d, &p.line)
	}
	if p.run.Decided != nil {
		p.run.Decided(&p.line, d)
	}
}

// tallyOf returns the tally of the zone that decided.
func (r *run) tallyOf(d *limiter.Decision) *tally {
	// Texts take longer to find.
	if r.last != nil && r.last.zone == d.Zone && r.last.store == d.Store {
		return r.last
	}
	id := tallyID{d.Store, d.Zone.Name}
	r.last = r.tallies[id]
	if r.last == nil {
		r.last = newTally(d.Zone, d.Store)
		r.tallies[id] = r.last
		r.order = append(r.order, r.last)
	}
	return r.last
}

func (p *passing) end() {
	status := p.line.Status
	if status == 0 || status == statusClientClosedRequest {
		status = limiter.StatusLeft
	}
	// Costs may be made of the header, which a request that arrives does not see.
	if !p.line.refused {
		// Otherwise it is a limiter's, which has nothing for limits to obey.
		p.response.header = p.line.Response
	}
	if p.isOpen {
		p.passage.End(status, p.line.Size)
	}
	if p.isSized {
		p.sized.End(status, p.line.Size)
	}
	p.run.pending--
	p.run.logs.free.Put(p)
}

// statusClientClosedRequest is what Caddy and nginx log if the client left.
const statusClientClosedRequest = 499

// sum returns what was found.
func (r *run) sum() (result.Replay, error) {
	a := &r.answer
	a.Lines = a.Requests + r.logs.other + r.logs.unreadable
	unread := errors.Join(r.logs.errs...)
	if a.Requests == 0 {
		return *a, errors.Join(unread, r.noRequest())
	}
	a.Zones, a.LeftOut, a.Notes = []result.Zone{}, []result.LeftOut{}, []string{}
	leftOut := r.sumLeftOut()
	r.noteRest()
	before := map[string]int64{}
	for _, t := range r.order {
		if leftOut[tallyID{t.store, t.zone.Name}] {
			before[t.zone.Name] += t.refused
			continue
		}
		z, notes := t.sum()
		if r.sizing != nil {
			var more []string
			z.Suggestions, more = r.sizing.suggest(tallyID{t.store, t.zone.Name}, r.Suggest)
			notes = append(notes, more...)
		}
		a.Zones, a.Notes = append(a.Zones, z), append(a.Notes, notes...)
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if before[name] > 0 {
			a.Notes = append(a.Notes, fmt.Sprintf("zone %s had refused %d requests before it was left out: these are among those refused", name, before[name]))
		}
	}
	return *a, unread
}

// sumLeftOut adds the zones that are left out to the answer, and returns them in each of their stores.
func (r *run) sumLeftOut() map[tallyID]bool {
	leftOut := map[tallyID]bool{}
	for _, z := range r.zones {
		if z.reason == "" {
			continue
		}
		if !leftOut[tallyID{z.stores[0], z.Name}] {
			r.answer.LeftOut = append(r.answer.LeftOut, result.LeftOut{Zone: z.Name, Reason: z.reason})
		}
		for _, store := range z.stores {
			leftOut[tallyID{store, z.Name}] = true
		}
	}
	return leftOut
}

// noRequest says why the logs have no request.
func (r *run) noRequest() error {
	if r.logs.unreadable > 0 {
		return fmt.Errorf("no line is an entry of Caddy's access log in JSON or of the combined format; the first is %s", r.logs.sample)
	}
	return errors.New("the logs have no requests")
}

// noteRest notes what the replay does not follow, or has dropped.
func (r *run) noteRest() {
	notes := &r.answer.Notes
	*notes = append(*notes, r.notes...)
	add := func(n int64, format string, args ...any) {
		if n > 0 {
			*notes = append(*notes, fmt.Sprintf(format, args...))
		}
	}
	if len(r.passedOver) > 0 {
		modules := slices.Sorted(maps.Keys(r.passedOver))
		*notes = append(*notes, "handlers that are not run, although they may decide which requests reach a rate_limit: "+strings.Join(modules, ", "))
	}
	if r.formats[Combined] {
		*notes = append(*notes, "the combined format has whole seconds and no durations: requests arrive and end in the order of its lines")
	}
	if r.formats[Caddy] && len(r.unlogged) > 0 {
		*notes = append(*notes, "the config keeps requests out of the log, which count nowhere: "+strings.Join(r.unlogged, ", "))
	}
	add(r.answer.RefusedBefore, "%d requests were refused by a limit when they were logged, so no handler answered: they count by that status", r.answer.RefusedBefore)
	add(r.late, "%d requests took longer than %v, or are not in order, or the config lacks the duration_format of the log: they arrive when they were read", r.late, reorder)
	add(r.unjudged, "%d requests are in no zone, the first because of: %s", r.unjudged, r.reason)
	for _, err := range r.logs.errs {
		*notes = append(*notes, err.Error()+": what comes before counts")
	}
	add(r.logs.unreadable, "%d lines are unreadable, the first is %s", r.logs.unreadable, r.logs.sample)
	add(r.logs.other, "%d entries of the log are about no request", r.logs.other)
	if r.sizing != nil {
		add(r.sizing.evicted, "%d counts of suggestions were dropped, so that they may be too low", r.sizing.evicted)
	}
	add(r.evicted, "%d buckets were dropped although they counted, because each store keeps %d", r.evicted, r.MostBuckets)
}
