package limiter

import (
	"cmp"
	"net/http"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Passage is a request of the past that is decided and counted again. The handlers behind the
// limiters do not run: End tells what they answered. It does what [Limiter.ServeHTTP] does, in parts,
// because other requests arrive between them: Meet for each handler, Ask when the request arrives,
// and End when its response had ended. Only Meet may run at the same time as other passages.
type Passage struct {
	w       http.ResponseWriter
	tracker *tracker
	// err is why a handler, behind those that the tracker has met, cannot judge the request.
	err error
	// room is an empty tracker that Reuse has got from the passage before, or nil.
	room *tracker
}

// NewPassage returns a passage whose response has the header of w.
func NewPassage(w http.ResponseWriter) *Passage { return &Passage{w: w} }

// Reuse makes p the passage of another request, as NewPassage does, in the memory of the one before: that has
// ended, and nothing of its request is in use any more.
func (p *Passage) Reuse(w http.ResponseWriter) {
	room := cmp.Or(p.tracker, p.room)
	if room != nil {
		room.reuse(w)
	}
	*p = Passage{w: w, room: room}
}

// reuse makes t the empty tracker of another request. Its first evaluation keeps its room.
func (t *tracker) reuse(w http.ResponseWriter) {
	zones, asks, posts := t.first.zones, t.first.asks, t.first.posts
	for _, z := range zones[:cap(zones)] {
		if z != nil {
			*z = inZone{}
		}
	}
	clear(asks[:cap(asks)])
	clear(posts[:cap(posts)])
	*t = tracker{}
	t.first.use(nil, zones, asks, posts)
	t.ResponseWriter, t.own = w, t.room[:0]
}

// Meet resolves what the request asks of the zones of a handler, and reports whether the handler can
// judge it.
func (p *Passage) Meet(l *Limiter, r *http.Request) bool {
	t, e, err := l.collect(cmp.Or(p.tracker, p.room), p.w, r)
	switch {
	case err == nil && e != nil:
		p.tracker = t
	case err != nil && p.tracker == nil && p.room != nil:
		// Some zones were met before one failed.
		p.room.reuse(p.w)
	}
	p.err = err
	return err == nil
}

// Ask asks the zones of all handlers but those that skip selects, and returns the status with which
// one ends the request, or 0. If one does, End follows at once.
func (p *Passage) Ask(skip func(z *Zone) bool) (status int) {
	var evaluations []*evaluation
	if p.tracker != nil {
		evaluations = p.tracker.own
		p.tracker.own = evaluations[:0]
	}
	for _, e := range evaluations {
		if e.leaveOut(skip); len(e.zones) == 0 {
			continue
		}
		p.tracker.own = append(p.tracker.own, e)
		if p.tracker.response != nil {
			p.tracker.response.began = e.limiter.Now()
		}
		if err := e.limiter.admit(p.tracker, e, p.w, p.tracker.request); err != nil {
			return statusOf(err)
		}
	}
	if p.err != nil {
		return statusOf(p.err)
	}
	return 0
}

// leaveOut makes e go on without some zones. It has asked none.
func (e *evaluation) leaveOut(some func(z *Zone) bool) {
	if some == nil {
		return
	}
	e.zones = slices.DeleteFunc(e.zones, func(z *inZone) bool { return some(z.Zone) })
	e.asks = e.asks[:0]
	for _, z := range e.zones {
		e.asks = append(e.asks, &z.ask)
	}
}

// StatusLeft is the status of a request whose client left before there was one.
const StatusLeft = statusLeft

// End settles the request by the status, or [StatusLeft], and the size of its body.
func (p *Passage) End(status int, size int64) {
	t := p.tracker
	if t == nil || len(t.own) == 0 {
		return
	}
	t.commit(status)
	t.response.wrote(size, nil)
	t.finish(ending{ctx: t.request.Context()})
	t.end()
}

// Decision is what a zone has decided about a request.
type Decision struct {
	Zone  *Zone
	Store string
	// ClientKey is what the zone's key yields.
	ClientKey string
	Outcome   telemetry.Outcome
	// Burst is how many events are admitted at once, other than in a window; 0 if they are as many.
	Burst int64
	// Needed is the least limit that admits the request beside what its client has used.
	Needed int64
	// State is what is known of the bucket. It is zero unless the store, or in its place this process,
	// has answered.
	State store.State
}

// Decisions visits what the zones have decided. After End their states show what was settled.
func (p *Passage) Decisions(visit func(d Decision)) {
	if p.tracker == nil {
		return
	}
	for _, e := range p.tracker.own {
		for _, z := range e.zones {
			visit(z.decision())
		}
	}
}

func (z *inZone) decision() Decision {
	d := Decision{Zone: z.Zone, Store: z.handle.Name, ClientKey: z.resolvedKey(), Outcome: z.outcome()}
	if d.Burst = z.ask.Burst; z.of.isAsked {
		// A take shows its own cost, and a check does not.
		d.Needed = z.ask.Used + z.ask.Cost - z.spent()
	}
	if z.hasAnswered() {
		d.State = z.ask.State
	}
	return d
}
