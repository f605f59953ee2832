package adversary

import (
	"math"
	"slices"
	"strconv"
)

// Model is what all clients have spent, hold and may spend.
type Model struct {
	Zones []*Zone
	// Doubt says why nothing more can be judged: a call may have been on either side of an end.
	Doubt string
	// Settled is the cost that metrics should show, Returned what refused requests may have taken and given
	// back beside that.
	Settled, Returned map[Settlement]int64
	// Forgiven is how many responses metrics should show to have emptied a bucket, Idle how many found
	// nothing in it, which metrics may count.
	Forgiven, Idle map[string]int64
	buckets        map[client]*bucket
	overrides      map[client]*overrides
	ids            int64
}

// Settlement is a kind of settled cost of a zone.
type Settlement struct{ Zone, Kind string }

type client struct{ zone, key string }

// overrides are what operators have changed for a client or, with an empty key, for a zone.
type overrides struct {
	events, grant *int64
	block         Span
	enforced      *bool
}

// NewModel returns one in which nothing was spent.
func NewModel(zones []*Zone) *Model {
	return &Model{
		Zones: zones, Settled: map[Settlement]int64{}, Returned: map[Settlement]int64{},
		Forgiven: map[string]int64{}, Idle: map[string]int64{}, buckets: map[client]*bucket{}, overrides: map[client]*overrides{},
	}
}

// Request is what zones know of a request.
type Request struct {
	Caddy     int
	Key, Cost string
	// Events are the limits of dynamic zones, by name.
	Events map[string]string
}

// The reasons of refusals, and the outcomes.
const (
	OverLimit   = "over_limit"
	InFlight    = "in_flight"
	Penalized   = "penalty"
	Blocked     = "blocked"
	Allowed     = "allowed"
	Refused     = "refused"
	WouldRefuse = "would_refuse"
)

// Verdict is what a zone says about a request. Used includes what the Caddy has in flight.
type Verdict struct {
	Zone        *Zone
	Limit, Cost int64
	Used, spent Count
	MayPass     bool
	MayRefuse   bool
	Reasons     []string
	Enforced    bool
	// Never is set if waiting does not help. Else a refused request fits at an instant in Fits.
	Never      bool
	Fits, gone Span
	at         Span
	bucket     *bucket
	window     int64
}

// hold is what a running request holds of a bucket.
type hold struct {
	caddy    int
	cost, id int64
	verdict  *Verdict
	// anew is set if its take was forgiven, and counts once its request ends; gone if it never does.
	anew, gone bool
}

// Running is a request that was admitted.
type Running struct {
	Request  Request
	Verdicts []*Verdict
	holds    []*hold
}

// forever is later than all that is judged.
const forever = math.MaxInt64 / 4

func (m *Model) bucket(zone *Zone, key string) *bucket {
	id := client{zone.Name, key}
	if m.buckets[id] == nil {
		m.buckets[id] = &bucket{zone: zone}
	}
	return m.buckets[id]
}

func (m *Model) override(zone, key string) *overrides {
	id := client{zone, key}
	if m.overrides[id] == nil {
		m.overrides[id] = &overrides{}
	}
	return m.overrides[id]
}

// limit returns what the request may use in a zone, or false if it is left out.
func (m *Model) limit(z *Zone, r *Request) (int64, bool) {
	events := z.Events
	if given := r.Events[z.Name]; z.Dynamic && given == "unlimited" {
		events = -1
	} else if n, err := strconv.ParseInt(given, 10, 64); z.Dynamic && err == nil && n >= 0 {
		events = n
	}
	of, own := m.override(z.Name, ""), m.override(z.Name, r.Key)
	if of.events != nil {
		events = *of.events
	}
	if own.events != nil {
		events = *own.events
	}
	if events < 0 {
		return 0, false
	}
	if z.Burst != 0 {
		events = z.Burst
	}
	if own.grant != nil {
		events += *own.grant
	}
	return events, true
}

// Decide returns the verdicts of the zones that count a request.
func (m *Model) Decide(r *Request, now Span) (verdicts []*Verdict) {
	for _, z := range m.Zones {
		limit, limited := m.limit(z, r)
		block := m.override(z.Name, r.Key).block
		if !limited && block == (Span{}) {
			continue
		}
		b := m.bucket(z, r.Key)
		if !b.pass(now) {
			m.Doubt = "a call of zone " + z.Name + " was near the end of a window or penalty"
		}
		v := &Verdict{Zone: z, Limit: limit, Cost: z.Cost.amount(r.Cost, ""), Enforced: z.Enforced, at: now, bucket: b, window: b.window}
		if of := m.override(z.Name, "").enforced; of != nil {
			v.Enforced = *of
		}
		if block != (Span{}) {
			v.Enforced, v.MayRefuse, v.Reasons, v.Fits = true, true, []string{Blocked}, block
		} else {
			v.decide(r.Caddy, now)
		}
		verdicts = append(verdicts, v)
	}
	return verdicts
}

// decide judges a request that is not blocked.
func (v *Verdict) decide(caddy int, now Span) {
	z, b := v.Zone, v.bucket
	v.spent = b.spent(now)
	flight, returns := int64(0), Count{}
	for _, h := range b.running {
		switch {
		case z.Algorithm == Concurrency:
		case !z.Before && h.caddy == caddy:
			flight += h.cost
		case z.Before:
			taken := b.still(h.id, now)
			returns = Count{returns.Lo + taken.Lo, returns.Hi + taken.Hi}
		}
	}
	v.Used, v.gone = v.spent.plus(flight), b.gone(now)
	switch {
	case v.Limit == 0:
		v.MayRefuse, v.Never, v.Reasons = true, true, []string{OverLimit}
		return
	case b.penalty != (Span{}):
		v.MayRefuse, v.Reasons, v.Fits, v.Never = true, []string{Penalized}, b.penalty, v.Cost > v.Limit
		v.Fits.Hi = max(v.Fits.Hi, b.fits(v.Cost, v.Limit, now).Hi)
		return
	case v.Cost == 0:
		v.MayPass = true
		return
	}
	v.MayPass = v.Used.Lo+v.Cost <= v.Limit
	v.MayRefuse = v.Used.Hi+v.Cost > v.Limit
	if v.Never = v.Cost > v.Limit; !v.MayRefuse {
		return
	}
	if v.Used.Lo-flight-returns.Hi+v.Cost <= v.Limit && flight+returns.Hi > 0 {
		v.Reasons = append(v.Reasons, InFlight)
	}
	if v.Used.Hi-flight-returns.Lo+v.Cost > v.Limit || flight == 0 && !z.mayReturn() || z.Algorithm == Concurrency {
		v.Reasons = append(v.Reasons, OverLimit)
	}
	switch {
	case z.Algorithm == Concurrency || v.Reasons[0] == InFlight:
		v.Fits = Span{now.Lo + 1_000_000, forever}
		if (z.Before || len(v.Reasons) > 1) && z.Algorithm != Concurrency && !v.Never {
			v.Fits.Lo = min(v.Fits.Lo, b.fits(v.Cost, v.Limit, now).Lo)
		}
	default:
		v.Fits = b.fits(v.Cost, v.Limit, now)
		if flight > 0 {
			v.Fits.Hi = forever
		}
	}
	if z.Penalty != 0 && slices.Contains(v.Reasons, OverLimit) {
		ends := now.plus(z.Penalty)
		v.Reasons = append(v.Reasons, Penalized)
		if v.Fits.Hi = max(v.Fits.Hi, ends.Hi); v.Reasons[0] == OverLimit {
			v.Fits.Lo = max(v.Fits.Lo, ends.Lo)
		}
	}
}

// Penalize begins the penalty of a zone that has refused with one of these reasons.
func (m *Model) Penalize(v *Verdict, reason string, now Span) {
	if v.Zone.Penalty != 0 && reason == InFlight && len(v.Reasons) > 1 {
		m.Doubt = "zone " + v.Zone.Name + " may begin a penalty"
	}
	if b := v.bucket; v.Zone.Penalty != 0 && b.penalty == (Span{}) && reason != InFlight && reason != Blocked && !v.Never {
		b.penalty = now.plus(v.Zone.Penalty)
	}
}

// Ask opens the window of a zone that was asked, whatever it has decided.
func (m *Model) Ask(v *Verdict, now Span) {
	b := v.bucket
	switch {
	case v.Limit == 0 || len(v.Reasons) > 0 && v.Reasons[0] == Blocked:
		return // no store is asked
	case b.penalty != (Span{}) && !b.open && v.Zone.hasWindows():
		m.Doubt = "whether a penalized request opens a window is not promised"
	}
	b.begin(now)
	v.window = b.window
}

// See takes note of the end of a window that begins with the first request: it must not move.
func (v *Verdict) See(reset int64) {
	if b := v.bucket; b.open && b.window == v.window && v.Zone.Algorithm == FixedWindow && v.Zone.Align == "" {
		end := reset*1_000_000 - v.Zone.Window.Microseconds()
		b.start = Span{max(b.start.Lo, end-1_000_000), min(b.start.Hi, end)}
	}
}

// Admit returns the request as it runs. Refusals among the verdicts are of zones that observe.
func (m *Model) Admit(r Request, verdicts []*Verdict, refused func(*Verdict) bool, now Span) *Running {
	run := &Running{Request: r, Verdicts: verdicts}
	for _, v := range verdicts {
		m.Ask(v, now)
		if refused(v) {
			run.holds = append(run.holds, nil)
			continue
		}
		m.ids++
		h := &hold{caddy: r.Caddy, cost: v.Cost, id: m.ids, verdict: v}
		if v.Zone.Before && v.Zone.Algorithm != Concurrency {
			v.bucket.add(h.id, h.cost, now)
		}
		v.bucket.running = append(v.bucket.running, h)
		run.holds = append(run.holds, h)
	}
	return run
}

// Shown is what a response should say of a zone.
type Shown struct {
	*Verdict
	Outcome string
	Used    Count
	Cost    int64
	// Vague is set if Used is not promised.
	Vague bool
}

// End settles a request whose response has a status and a cost, and returns what that should show.
func (m *Model) End(run *Running, status int, cost string, now Span) (shown []Shown) {
	for i, v := range run.Verdicts {
		h := run.holds[i]
		if h == nil {
			shown = append(shown, Shown{Verdict: v, Outcome: WouldRefuse, Used: v.Used, Cost: v.Cost})
			continue
		}
		z, b := v.Zone, v.bucket
		s := Shown{Verdict: v, Outcome: Allowed, Cost: z.Cost.amount(run.Request.Cost, cost)}
		b.running = slices.DeleteFunc(b.running, func(other *hold) bool { return other == h })
		if z.Algorithm == Concurrency {
			s.Used = v.Used.plus(h.cost)
			shown = append(shown, s)
			continue
		}
		if !b.pass(now) {
			m.Doubt = "a response of zone " + z.Name + " was near the end of a window or penalty"
		}
		s.Vague = h.anew || h.gone || b.window != v.window
		switch {
		case z.forgives(status):
			own := int64(0)
			if z.Before {
				own = h.cost
			}
			if v.spent.Lo > 0 && b.spent(now).Lo > own {
				m.Forgiven[z.Name]++
			} else {
				m.Idle[z.Name]++
			}
			if z.Before {
				m.Returned[Settlement{z.Name, "refunded"}] += h.cost
			}
			s.Cost, s.Used = 0, Count{}
			m.forgive(b, run.Request.Caddy)
		case !z.counts(status):
			m.free(z, h, now)
			s.Cost, s.Used = 0, v.Used
		default:
			m.Settled[Settlement{z.Name, "charged"}] += s.Cost
			s.Used = v.Used.plus(s.Cost)
			m.charge(b, h, s.Cost, now)
		}
		shown = append(shown, s)
	}
	return shown
}

// free gives back what a request of a free status holds.
func (m *Model) free(z *Zone, h *hold, now Span) {
	if z.Before && !h.anew {
		m.Settled[Settlement{z.Name, "refunded"}] += h.cost
		h.verdict.bucket.refund(h.id, h.cost, now)
		return
	}
	m.Settled[Settlement{z.Name, "free"}] += h.cost
}

// charge makes a request cost what it does.
func (m *Model) charge(b *bucket, h *hold, cost int64, now Span) {
	m.ids++
	switch {
	case h.gone:
	case !b.zone.Before || h.anew:
		b.add(m.ids, cost, now)
	case cost > h.cost:
		b.add(m.ids, cost-h.cost, now)
	case cost < h.cost:
		m.Settled[Settlement{b.zone.Name, "refunded"}] += h.cost - cost
		b.refund(h.id, h.cost-cost, now)
	}
}

// forgive empties a bucket. What other requests of the same Caddy took counts when they end, whatever other Caddys
// have forgiven before or forgive later.
func (m *Model) forgive(b *bucket, caddy int) {
	b.empty()
	for _, h := range b.running {
		h.anew = h.anew || h.caddy == caddy
		h.gone = !h.anew
	}
}

// Leave settles a request whose client has left before there was a status.
func (m *Model) Leave(run *Running, now Span) {
	for _, h := range run.holds {
		if h == nil {
			continue
		}
		b := h.verdict.bucket
		b.running = slices.DeleteFunc(b.running, func(other *hold) bool { return other == h })
		if !b.pass(now) {
			m.Doubt = "a client has left near the end of a window"
		}
		m.Settled[Settlement{b.zone.Name, "charged"}] += h.cost
		m.charge(b, h, h.cost, now)
	}
}

// SpentHas reports whether n may be spent, without what is in flight.
func (v *Verdict) SpentHas(n int64) bool { return v.spent.Has(n) }

// Gone returns when nothing counts any more once the request has spent a cost.
func (v *Verdict) Gone(cost int64) Span {
	if v.Zone.Algorithm != GCRA {
		return v.gone
	}
	drains := func(n int64) int64 { return int64(float64(n) / v.Zone.rate()) }
	return Span{v.gone.Lo + drains(cost), v.gone.Hi + drains(cost+v.Used.Hi-v.spent.Lo)}
}

// Return notes that a request took something, perhaps, which was given back as another zone refused it.
func (m *Model) Return(v *Verdict) {
	if v.Zone.Before {
		m.Returned[Settlement{v.Zone.Name, "refunded"}] += v.Cost
	}
}

// MayWait reports whether the client of a refusal may be told to wait so many seconds, rounded up to whole ones if so:
// less than 0 if that does not help.
func (v *Verdict) MayWait(seconds float64, rounded bool) bool {
	if v.Never {
		return seconds < 0
	}
	wait := Span{v.Fits.Lo - v.at.Hi, v.Fits.Hi - v.at.Lo}
	if !rounded {
		return wait.Has(seconds, false)
	}
	wait.Hi = max(wait.Hi, 1) // nobody is told to come at once
	return seconds >= 1 && wait.Has(seconds, true)
}

// MayTie reports whether a refusal may make a client wait as long as another one of the same handler, so that either
// is shown.
func (v *Verdict) MayTie(other *Verdict) bool {
	isAlike := v.MayRefuse && v.Enforced && v.Zone.Inner == other.Zone.Inner && v.Never == other.Never
	return v == other || isAlike && v.Fits.Lo <= other.Fits.Hi && other.Fits.Lo <= v.Fits.Hi
}

// Outcome returns the one that is certain, or "".
func (v *Verdict) Outcome() string {
	switch {
	case v.MayPass && v.MayRefuse:
		return ""
	case v.MayPass:
		return Allowed
	case v.Reasons[0] == Blocked:
		return Blocked
	case v.Enforced:
		return Refused
	default:
		return WouldRefuse
	}
}
