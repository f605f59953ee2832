package e2e

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/adversary"
	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// adversaryPlaceholders are those that a response shows of a zone, by name.
type adversaryPlaceholders map[string]string

func (p adversaryPlaceholders) number(name string) int64 {
	n, err := strconv.ParseInt(p[name], 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// placeholders returns those of a zone, or without a name those of the zone that the response is about.
func placeholders(a *caddytest.Answer, zone string) adversaryPlaceholders {
	values := strings.Split(a.Header.Get("X-Shown-"+zone), "|")
	p := adversaryPlaceholders{}
	for i, name := range adversaryShown {
		if i < len(values) {
			p[name] = values[i]
		}
	}
	return p
}

func (h *adversaryRun) count(caddy int, zone, outcome string) {
	h.outcomes[caddy][[2]string{zone, outcome}]++
}

// admitted judges that a request has passed, and makes it run.
func (h *adversaryRun) admitted(r *adversaryRequest, verdicts []*adversary.Verdict, now adversary.Span) {
	for _, v := range verdicts {
		r.outcomes[v.Zone.Name] = adversary.Allowed
		if h.model.Doubt == "" && !v.MayPass {
			if v.Enforced {
				h.failf("request %s has passed, but zone %s refuses it: %+v", r.id, v.Zone.Name, v)
			}
			r.outcomes[v.Zone.Name] = adversary.WouldRefuse
		} else if !v.Enforced && v.MayRefuse {
			h.model.Doubt = "zone " + v.Zone.Name + " only observes, and may or may not refuse"
		}
	}
	r.run = h.model.Admit(r.ask, verdicts, func(v *adversary.Verdict) bool {
		return r.outcomes[v.Zone.Name] == adversary.WouldRefuse
	}, now)
	for _, v := range verdicts {
		if r.outcomes[v.Zone.Name] == adversary.WouldRefuse {
			h.model.Penalize(v, v.Reasons[0], now)
		}
	}
}

// refused judges a refusal.
func (h *adversaryRun) refused(r *adversaryRequest, verdicts []*adversary.Verdict, a *caddytest.Answer, now adversary.Span) {
	about := placeholders(a, "")
	h.answers[r.ask.Caddy][r.id] = *a
	h.refusals[r.ask.Caddy][[2]string{a.Resource, r.ask.Key}]++
	by, isCertain := verdictOf(verdicts, a.Resource), h.model.Doubt == ""
	if isCertain && (by == nil || a.Status != http.StatusTooManyRequests) {
		h.failf("status %d by zone %q", a.Status, a.Resource)
	}
	longest := 0.0
	for _, v := range verdicts {
		p := placeholders(a, v.Zone.Name)
		if p["outcome"] == "" {
			continue
		}
		h.count(r.ask.Caddy, v.Zone.Name, p["outcome"])
		if h.model.Doubt != "" {
			continue
		}
		if v.Zone.Inner && !by.Zone.Inner {
			h.failf("zone %s decided after a handler before it had refused", v.Zone.Name)
		}
		h.judgeShown(v, p)
		if p["outcome"] == adversary.Refused || p["outcome"] == adversary.Blocked {
			wait, _ := strconv.ParseFloat(p["wait"], 64)
			if v.Never {
				wait = math.Inf(1)
			}
			longest = max(longest, wait)
		}
		h.model.Ask(v, now)
		h.model.Return(v)
		if p["reason"] != "" {
			h.model.Penalize(v, p["reason"], now)
		}
	}
	if !isCertain {
		return
	}
	if !by.MayRefuse || !by.Enforced {
		h.failf("zone %s has refused request %s, which fits: %+v", by.Zone.Name, r.id, by)
	}
	if err := h.sameHeaders(a, by.Zone.Name); err != nil {
		h.failf("refusal %+v: %v", by, err)
	}
	if wait, _ := strconv.ParseFloat(about["wait"], 64); !by.Never && wait < longest {
		h.failf("zone %s refuses for %v, but another for %v", by.Zone.Name, wait, longest)
	}
	isReset := by.Never || by.Fits.Has(float64(a.Reset), true)
	if !isReset || !by.MayWait(float64(a.RetryAfter), true) || about.number("wait") != a.RetryAfter {
		h.failf("request %s is told to wait %d seconds, until %d: %+v", r.id, a.RetryAfter, a.Reset, by)
	}
	if !by.Never && slices.Equal(by.Reasons, []string{adversary.OverLimit}) {
		by.See(a.Reset)
	}
}

// judgeShown judges what a refused request shows of a zone.
func (h *adversaryRun) judgeShown(v *adversary.Verdict, p adversaryPlaceholders) {
	outcome, reasons := adversary.Allowed, []string{""}
	switch {
	case p["outcome"] == adversary.Blocked && v.MayRefuse && v.Reasons[0] == adversary.Blocked:
		return
	case p["outcome"] != adversary.Allowed && v.MayRefuse && v.Enforced:
		outcome, reasons = adversary.Refused, v.Reasons
	case p["outcome"] != adversary.Allowed && v.MayRefuse:
		outcome, reasons = adversary.WouldRefuse, v.Reasons
	case !v.MayPass:
		outcome = "no pass"
	}
	isUsed := v.Used.Has(p.number("used")) || outcome != adversary.Allowed && isKnownFull(v, p)
	if err := errors.Join(want("outcome", p["outcome"], outcome), want("reason being of those", slices.Contains(reasons, p["reason"]), true),
		want("limit", p.number("limit"), v.Limit), want("used being right", isUsed, true), want("cost", p.number("cost"), v.Cost),
		h.consistent(v, p)); err != nil {
		h.failf("zone %s shows %v on a refusal: %v; %+v", v.Zone.Name, p, err, v)
	}
}

// isKnownFull reports whether a zone that refuses may show what it does without asking: a bucket that is known to be
// full is not asked, so that what is in flight is not added; nor is one whose limit is 0, so that nothing is known of it.
func isKnownFull(v *adversary.Verdict, p adversaryPlaceholders) bool {
	used := p.number("used")
	return v.SpentHas(used) || v.Limit == 0 && used == 0 || slices.Index(v.Reasons, adversary.Penalized) == 0
}

// consistent returns an error if a zone shows numbers that do not fit together, or a wrong wait.
func (h *adversaryRun) consistent(v *adversary.Verdict, p adversaryPlaceholders) error {
	isWait := p["wait"] == ""
	if p["outcome"] == adversary.Refused || p["outcome"] == adversary.WouldRefuse {
		isWait = v.MayWait(float64(p.number("wait")), true)
	}
	err := want("wait being right", isWait, true)
	if p["reason"] == adversary.Penalized {
		return err
	}
	return errors.Join(err, want("remaining", p.number("remaining"), max(p.number("limit")-p.number("used"), 0)))
}

// sameHeaders returns an error unless the headers say what the placeholders of the zone do.
func (h *adversaryRun) sameHeaders(a *caddytest.Answer, zone string) error {
	p := placeholders(a, zone)
	return errors.Join(want("placeholders", fmt.Sprint(placeholders(a, "")), fmt.Sprint(p)),
		want("limit", a.Limit, p.number("limit")), want("used", a.Used, p.number("used")), want("remaining", a.Remaining, p.number("remaining")),
		want("reset", a.Reset, p.number("reset")))
}

// judgeAnswer judges the response to a request that was admitted.
func (h *adversaryRun) judgeAnswer(r *adversaryRequest, shown []adversary.Shown, a *caddytest.Answer, status int) {
	h.answers[r.ask.Caddy][r.id] = *a
	if a.Status != status || a.IsLimited() != (len(shown) > 0) {
		h.failf("request %s has status %d, want %d", r.id, a.Status, status)
	}
	least, observed := int64(math.MaxInt64), map[string]bool{}
	for _, s := range shown {
		z, p := s.Zone, placeholders(a, s.Zone.Name)
		h.count(r.ask.Caddy, z.Name, p["outcome"])
		err := errors.Join(want("outcome", p["outcome"], s.Outcome), want("limit", p.number("limit"), s.Limit), h.consistent(s.Verdict, p),
			want("cost", p.number("cost"), s.Cost),
			want("used being right", s.Vague || s.Used.Has(p.number("used")) || s.Outcome == adversary.WouldRefuse && isKnownFull(s.Verdict, p), true))
		if z.Algorithm != adversary.Concurrency && s.Outcome == adversary.Allowed && !s.Vague && s.Cost > 0 {
			err = errors.Join(err, want("reset being right", s.Gone(s.Cost).Has(float64(p.number("reset")), true), true))
			s.See(p.number("reset"))
		}
		if err != nil {
			h.failf("zone %s shows %v: %v; %+v %+v", z.Name, p, err, s, s.Verdict)
		}
		if least = min(least, p.number("remaining")); s.Outcome == adversary.WouldRefuse {
			observed[z.Name] = true
		}
	}
	if len(shown) == 0 {
		return
	}
	about := a.Remaining == least
	if len(observed) > 0 {
		about = observed[a.Resource]
	}
	if err := errors.Join(h.sameHeaders(a, a.Resource), want("the zone shown being right", about, true)); err != nil {
		h.failf("request %s: %v", r.id, err)
	}
}

// foresee simulates a request.
func (h *adversaryRun) foresee(c *caddytest.Caddy, r *adversaryRequest) *simulated {
	s := simulate(c, "/?id="+r.id, r.headers...)
	h.note("simulate request %s: %+v", r.id, s)
	return &s
}

// verdictOf returns the verdict of a zone, or nil.
func verdictOf(verdicts []*adversary.Verdict, zone string) *adversary.Verdict {
	for _, v := range verdicts {
		if v.Zone.Name == zone {
			return v
		}
	}
	return nil
}

// judgeForesight compares a simulation with the outcome of the request itself.
func (h *adversaryRun) judgeForesight(s *simulated, r *adversaryRequest, a *caddytest.Answer, verdicts []*adversary.Verdict) {
	if slices.ContainsFunc(verdicts, func(v *adversary.Verdict) bool { return v.Outcome() == "" }) {
		return // what drains in between decides
	}
	decision := adversary.Allowed
	if a != nil {
		decision = placeholders(a, "")["outcome"]
	}
	err := want("decision", s.Decision, decision)
	if a != nil {
		of, by := verdictOf(verdicts, s.Zone), verdictOf(verdicts, a.Resource)
		if of == nil || !of.MayTie(by) {
			h.failf("simulate names zone %q, request %s is refused by %s: %+v %+v", s.Zone, r.id, a.Resource, of, by)
		}
		wait := s.Wait
		if of.Never && wait == 0 {
			wait = -1
		}
		err = errors.Join(err, want("wait being right", of.MayWait(wait, false), true))
	}
	for _, z := range s.Zones {
		v, seen := verdictOf(verdicts, z.Name), r.outcomes[z.Name]
		if v == nil {
			h.failf("simulate has zone %s", z.Name)
		}
		if a != nil {
			seen = placeholders(a, z.Name)["outcome"]
		}
		if seen == "" { // simulate also asks zones that a refused request does not ask
			seen = v.Outcome()
		}
		isUsed := v.Used.Has(z.Used) || v.SpentHas(z.Used) || v.Limit == 0 && z.Used == 0 || z.Outcome == adversary.Blocked || z.Reason == adversary.Penalized
		err = errors.Join(err, want("outcome of zone "+z.Name, z.Outcome, cmp.Or(seen, z.Outcome)), want("used being right", isUsed, true))
		if z.Outcome == adversary.Blocked {
			continue
		}
		reasons := []string{""}
		if v.MayRefuse {
			reasons = v.Reasons
		}
		err = errors.Join(err, want("limit", z.Limit, v.Limit), want("cost", z.Cost, v.Cost), want("reason being of those", slices.Contains(reasons, z.Reason), true),
			want("allowed", z.Allowed, v.MayPass))
		if z.Reason != adversary.Penalized {
			err = errors.Join(err, want("remaining", z.Remaining, max(z.Limit-z.Used, 0)))
		}
	}
	if err != nil {
		h.failf("simulate %+v, request %s: %v", s, r.id, err)
	}
}

// settle waits until all that a client's requests have caused is counted.
func (h *adversaryRun) settle(key string) {
	for _, z := range h.model.Zones {
		h.look(z, key)
	}
	for _, z := range h.model.Zones {
		h.await("zone "+z.Name+" holds no more of "+key+" than runs", func() error { return h.judgeHeld(z, key) })
	}
	h.servers.AwaitReplicas(h.t)
}

// judgeHeld returns an error if servers hold more takes of a bucket than requests that run have made.
func (h *adversaryRun) judgeHeld(z *adversary.Zone, key string) error {
	const take = 24 // bytes
	held := int64(0)
	for _, shard := range h.servers {
		client := shard.Primary.Client()
		names, err := client.Keys(h.t.Context(), "*:"+z.Name+":*"+key+" held").Result()
		must(h.t, "keys", err)
		for _, name := range names {
			n, err := client.StrLen(h.t.Context(), name).Result()
			must(h.t, "length", err)
			held += n / take
		}
	}
	if most := h.model.Takes(z, key); held > most {
		return fmt.Errorf("%d are held, want %d at most", held, most)
	}
	return nil
}

// await waits until f returns nil.
func (h *adversaryRun) await(what string, f func() error) {
	h.t.Helper()
	if err := redistest.Poll(*adversaryPatience, f); err != nil {
		h.failf("waiting until %s: %v", what, err)
	}
}

// look compares what get shows of a bucket, at each Caddy.
func (h *adversaryRun) look(z *adversary.Zone, key string) {
	for i, c := range h.caddys {
		h.await("get shows what zone "+z.Name+" has of "+key, func() error {
			before := time.Now()
			b, err := bucketOf(c, z.Name, key)
			if err != nil {
				return err
			}
			spent, flight, penalized := h.model.Spent(z, key, i, h.since(before))
			if h.model.Doubt != "" {
				return nil
			}
			text, _ := json.Marshal(b)
			err = want("there being servers", len(b.Servers) > 0, true)
			for _, s := range b.Servers {
				used := int64(0)
				if s.State != nil && s.State.Used != nil {
					used = *s.State.Used
				}
				if !spent.Has(used) {
					err = errors.Join(err, fmt.Errorf("%d are used, want %v", used, spent))
				}
				err = errors.Join(err, want("a penalty", s.State != nil && s.State.Penalty != 0, penalized))
				if s.State != nil && s.State.Limit != nil && !penalized {
					err = errors.Join(err, want("remaining", *s.State.Remaining, max(*s.State.Limit-used, 0)))
				}
			}
			if z.Algorithm != adversary.Concurrency && h.servers != nil {
				account := cmp.Or(b.Ledger, &adminapi.Account{})
				err = errors.Join(err, want("unsent", account.Unsent, 0), want("in flight", account.InFlight, flight))
			}
			if err != nil {
				return fmt.Errorf("%w: %s", err, text)
			}
			return nil
		})
	}
}

// judgeAll compares what Caddy has counted over a history: metrics, top, near and the access log.
func (h *adversaryRun) judgeAll() {
	for i := range h.caddys {
		h.await("the access log is written", func() error { return h.judgeLog(i) })
	}
	h.await("metrics have counted everything", h.judgeMetrics)
	h.judgeNear()
}

// judgeMetrics returns an error unless metrics and top have what the model has.
func (h *adversaryRun) judgeMetrics() error {
	sums, forgiven := map[adversary.Settlement]int64{}, map[string]int64{}
	var wrong []error
	for i, c := range h.caddys {
		_, text := c.AdminCall(http.MethodGet, "/metrics", "", "")
		m, err := caddyproc.ParseMetrics(text)
		must(h.t, "metrics", err)
		outcomes, declined := map[[2]string]int64{}, map[string]int64{}
		requests := map[string]int64{}
		for key, value := range m {
			zone, n := caddyproc.Label(key, "zone"), int64(value)
			switch {
			case n == 0:
			case caddyproc.Has(key, "caddy_rate_limit_decisions_total"):
				outcomes[[2]string{zone, caddyproc.Label(key, "outcome")}] = n
			case caddyproc.Has(key, "caddy_rate_limit_requests_total"):
				requests[zone] = n
			case caddyproc.Has(key, "caddy_rate_limit_declined_requests_total"):
				declined[zone] = n
			case caddyproc.Has(key, "caddy_rate_limit_settled_cost_total"):
				sums[adversary.Settlement{Zone: zone, Kind: caddyproc.Label(key, "kind")}] += n
			case caddyproc.Has(key, "caddy_rate_limit_forgiven_total"):
				forgiven[zone] += n
			}
		}
		wantRequests, wantDeclined := map[string]int64{}, map[string]int64{}
		for zone, n := range h.outcomes[i] {
			wantRequests[zone[0]] += n
		}
		for client, n := range h.refusals[i] {
			wantDeclined[client[0]] += n
		}
		if err := errors.Join(wantMap("decisions", outcomes, h.outcomes[i]), wantMap("requests", requests, wantRequests),
			wantMap("declined", declined, wantDeclined), h.judgeTop(i)); err != nil {
			wrong = append(wrong, fmt.Errorf("Caddy %d: %w", i, err))
		}
	}
	maps.DeleteFunc(h.model.Settled, func(_ adversary.Settlement, n int64) bool { return n == 0 })
	for s, most := range h.model.Returned {
		// Whether a refused request took something first is not promised.
		back := min(max(sums[s]-h.model.Settled[s], 0), most)
		if sums[s] -= back; sums[s] == 0 {
			delete(sums, s)
		}
	}
	for zone, most := range h.model.Idle {
		if forgiven[zone] -= min(max(forgiven[zone]-h.model.Forgiven[zone], 0), most); forgiven[zone] == 0 {
			delete(forgiven, zone)
		}
	}
	return errors.Join(append(wrong, wantMap("settled cost", sums, h.model.Settled), wantMap("forgiven", forgiven, h.model.Forgiven))...)
}

func wantMap[K comparable](what string, got, want map[K]int64) error {
	if !maps.Equal(got, want) {
		return fmt.Errorf("%s are %v, want %v", what, got, want)
	}
	return nil
}

// judgeTop compares the clients that were refused.
func (h *adversaryRun) judgeTop(caddy int) error {
	var tops adminapi.Tops
	h.caddys[caddy].AdminJSON(http.MethodGet, "/rate_limit/top", "", &tops)
	got := map[[2]string]int64{}
	for _, zone := range tops.Zones {
		for _, client := range zone.Refused {
			got[[2]string{zone.Zone, strings.Join(client.Values, " ")}] = client.Count
		}
	}
	return wantMap("top", got, h.refusals[caddy])
}

// judgeNear compares the clients that are near their limit, where that does not change.
func (h *adversaryRun) judgeNear() {
	if h.kind.Moves || h.kind.Caddys > 1 {
		h.t.Log("near is not judged")
		return
	}
	for _, z := range h.model.Zones {
		before := time.Now()
		var near adminapi.Near
		h.caddys[0].AdminJSON(http.MethodGet, "/rate_limit/near?zone="+z.Name, "", &near)
		clients, full, ok := h.model.Near(z, h.since(before))
		if !ok {
			h.t.Logf("near is not judged in zone %s", z.Name)
			continue
		}
		got := map[string]int64{}
		for _, c := range near.Clients {
			got[strings.Join(c.Values, " ")] = c.Used
		}
		if err := errors.Join(wantMap("clients near their limit", got, clients), want("full", near.Full, full)); err != nil {
			h.failf("zone %s: %v", z.Name, err)
		}
	}
}

// judgeLog returns an error unless the access log says of each request what its response did.
func (h *adversaryRun) judgeLog(caddy int) error {
	answers := maps.Clone(h.answers[caddy])
	for _, entry := range entriesOf(h.caddys[caddy], "handled request") {
		request, _ := entry["request"].(map[string]any)
		uri, err := url.Parse(fmt.Sprint(request["uri"]))
		must(h.t, "uri", err)
		a, ok := answers[uri.Query().Get("id")]
		if !ok {
			continue
		}
		delete(answers, uri.Query().Get("id"))
		logged, _ := entry["rate_limit"].(map[string]any)
		p := placeholders(&a, "")
		for _, name := range adversaryShown {
			text := ""
			if value, ok := logged[name]; ok {
				text = fmt.Sprint(value)
			}
			if f, ok := logged[name].(float64); ok {
				text = strconv.FormatFloat(f, 'f', -1, 64)
			}
			if text != p[name] {
				h.failf("the access log says %s %q, the response %q: %v", name, text, p[name], entry)
			}
		}
		if logged != nil && logged["zone"] != a.Resource || entry["status"] != float64(a.Status) {
			h.failf("the access log says %v, the response %d %v", entry, a.Status, a.Header)
		}
	}
	return want("requests that are not logged", len(answers), 0)
}
