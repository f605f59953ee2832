package limiter

import (
	"cmp"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// ruled is a zone in a handler, whose client a is named by a placeholder.
func ruled(t *testing.T, z *Zone) *Limiter {
	t.Helper()
	l := newTestHandler(t, z, memory.New(memory.NewBuckets(), memory.Options{}))
	z.Key = []string{"{" + headerA + "}"}
	z.prepare()
	return l
}

// rollOut gives the handler another store, which no client is moved to yet.
func rollOut(t *testing.T, l *Limiter) {
	t.Helper()
	other := &stores.Handle{Name: t.Name() + " 2", Module: deafModule{memory.New(memory.NewBuckets(), memory.Options{})}, Logger: zap.NewNop()}
	_, err := other.Enter()
	redistest.Must(t, err)
	t.Cleanup(other.Unload)
	l.Rollout = &Rollout{Store: other}
	l.Zones[0].countIn(rolloutStore, other)
}

// change sets an override, of the client a unless it is that of a zone.
func change(t *testing.T, l *Limiter, o store.Override) {
	t.Helper()
	if o.Zone = "test"; o.Kind != store.OverrideZone && o.ClientKey == "" {
		o.ClientKey = l.Zones[0].templates[0].tag + ":a"
	}
	if o.Until == 0 {
		o.Until = store.NoEnd
	}
	redistest.Must(t, l.Store.SetOverride(t.Context(), o))
}

// resolvedFor returns what a request of a client asks of the zone.
func resolvedFor(t *testing.T, l *Limiter, client, events string) resolved {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set("A", client)
	repl := values{headerA: client, headerB: events}.replacer()
	chosen := choice{limiter: l}
	asked, _, err := l.Zones[0].meet(r, repl, &chosen)
	redistest.Must(t, err)
	return asked
}

// TestLimitOfARequest: what is set of the client comes before what is set of the zone, and that before
// the config. A grant is added, and reserves are parts of the limit without it. Views show the same, and
// where it depends on the request, or there is none, the limit of the last one.
func TestLimitOfARequest(t *testing.T) {
	limit := func(events, burst int64) store.Override {
		return store.Override{Kind: store.OverrideLimit, Events: events, Burst: burst}
	}
	zone := func(events int64) store.Override { return store.Override{Kind: store.OverrideZone, Events: events} }
	grant := store.Override{Kind: store.OverrideGrant, Events: 7, Until: time.Now().Add(time.Hour).UnixMicro()}
	for name, c := range map[string]struct {
		algorithm            store.Algorithm
		events               Quantity
		header               string
		set                  []store.Override
		client               string
		want, burst, reserve int64
		keepsLast            bool
	}{
		"the config":                    {events: Quantity{Number: 10}, want: 10, reserve: 5},
		"a zone":                        {events: Quantity{Number: 10}, set: []store.Override{zone(20)}, want: 20, reserve: 10},
		"a client in a zone":            {events: Quantity{Number: 10}, set: []store.Override{zone(20), limit(40, 0)}, want: 40, reserve: 20},
		"another client":                {events: Quantity{Number: 10}, set: []store.Override{zone(20), limit(40, 0)}, client: "b", want: 20, reserve: 10},
		"a grant too":                   {events: Quantity{Number: 10}, set: []store.Override{limit(40, 0), grant}, want: 47, reserve: 20},
		"in place of a placeholder":     {events: Quantity{"{" + headerB + "}", 10}, header: "100", set: []store.Override{zone(20)}, want: 20, reserve: 10},
		"a placeholder":                 {events: Quantity{"{" + headerB + "}", 10}, header: "100", set: []store.Override{limit(40, 0)}, client: "b", want: 100, reserve: 50, keepsLast: true},
		"unlimited":                     {events: Quantity{Number: 10}, set: []store.Override{limit(store.Unlimited, 0)}, want: unlimited, keepsLast: true},
		"none":                          {events: Quantity{Number: 0}},
		"none, with a grant":            {events: Quantity{Number: 0}, set: []store.Override{grant}, want: 7},
		"limited in an unlimited zone":  {events: Quantity{"{" + headerB + "}", 10}, header: "unlimited", set: []store.Override{limit(40, 0)}, want: 40, reserve: 20},
		"more than the algorithm keeps": {algorithm: store.SlidingLog, events: Quantity{Number: 10}, set: []store.Override{limit(store.MaxEvents, 0)}, want: 100_000, reserve: 50_000},
		"a burst":                       {algorithm: store.GCRA, events: Quantity{Number: 10}, set: []store.Override{limit(40, 4)}, want: 40, burst: 4, reserve: 2},
		"a burst where there is none":   {events: Quantity{Number: 10}, set: []store.Override{limit(40, 4)}, want: 40, reserve: 20},
		"more than drains in a century": {algorithm: store.GCRA, events: Quantity{Number: 10}, set: []store.Override{limit(1, store.MaxEvents)}, want: 1, burst: 876_000, reserve: 438_000},
	} {
		t.Run(name, func(t *testing.T) {
			z := &Zone{Algorithm: c.algorithm, Reserves: []Reserve{{Percent: 50, Matchers: caddyhttp.MatcherSets{{caddyhttp.MatchMethod{http.MethodPost}}}}}}
			l := ruled(t, z)
			z.Events = c.events
			for _, o := range c.set {
				change(t, l, o)
			}
			client := "a"
			if c.client != "" {
				client = c.client
			}
			in := resolvedFor(t, l, client, c.header)
			if got := in.req; got.Events != c.want || got.Burst != c.burst || got.Reserved != c.reserve {
				t.Errorf("%d events, burst %d, %d reserved; want %d, %d, %d", got.Events, got.Burst, got.Reserved, c.want, c.burst, c.reserve)
			}
			const last = 3
			shown, want := l.Zones[0].About(in.req.ClientKey), cmp.Or(c.burst, c.want)
			if shown.Events = last; c.keepsLast {
				want = last
			}
			isLimited := l.Zones[0].LimitNow(&shown, l.Store, l.Zones[0].rule(l), l)
			if isLimited != (c.want != unlimited) || shown.Capacity() != want || shown.Events == 0 {
				t.Errorf("views show %d, limited: %t, and it drains by %d; want %d", shown.Capacity(), isLimited, shown.Events, want)
			}
		})
	}
}

// TestSharesOfAZone by a rule are those of the config with the same numbers, client by client.
func TestSharesOfAZone(t *testing.T) {
	quarter := 25.0
	l := ruled(t, &Zone{})
	rollOut(t, l)
	change(t, l, store.Override{Kind: store.OverrideZone, Enforce: &quarter, Rollout: &quarter})
	configured := &Zone{Enforce: &quarter}
	configured.prepare()
	for i := range 1000 {
		in := resolvedFor(t, l, "client-"+strconv.Itoa(i), "")
		key := in.req.ClientKey
		if is, want := l.Zones[0].enforces(key, in.rule), configured.enforces(key, nil); is != want {
			t.Fatalf("%s is enforced: %t, want %t", key, is, want)
		}
		if is, want := in.zone.in == rolloutStore, cohortOf(rolloutSalt, key) < cohortsIn(quarter); is != want {
			t.Fatalf("%s is moved: %t, want %t", key, is, want)
		}
	}
}

// TestLimitMovesWithItsClient: a rollout that moves the client to another store ends no limit. If both stores have
// one, that of the client's store counts.
func TestLimitMovesWithItsClient(t *testing.T) {
	l := ruled(t, &Zone{})
	rollOut(t, l)
	change(t, l, store.Override{Kind: store.OverrideLimit, Events: 40})
	for _, percent := range []float64{0, 100} {
		change(t, l, store.Override{Kind: store.OverrideZone, Rollout: &percent})
		if in := resolvedFor(t, l, "a", ""); in.req.Events != 40 || (in.zone.in == rolloutStore) != (percent == 100) {
			t.Errorf("at %v%% the limit is %d in store %d", percent, in.req.Events, in.zone.in)
		}
	}
	own := store.Override{Kind: store.OverrideLimit, Zone: "test", ClientKey: resolvedFor(t, l, "a", "").req.ClientKey, Events: 50, Until: store.NoEnd}
	redistest.Must(t, l.Rollout.Store.SetOverride(t.Context(), own))
	for percent, want := range map[float64]int64{0: 40, 100: 50} {
		change(t, l, store.Override{Kind: store.OverrideZone, Rollout: &percent})
		if in := resolvedFor(t, l, "a", ""); in.req.Events != want {
			t.Errorf("with a limit in each store, at %v%% it is %d, want %d", percent, in.req.Events, want)
		}
	}
}

// TestRulesReachRequestsThatWait: a raised limit lets them go on at once, a lowered one makes them wait
// longer, and that of another client does not matter.
func TestRulesReachRequestsThatWait(t *testing.T) {
	for name, o := range map[string]store.Override{
		"of the client": {Kind: store.OverrideLimit, ClientKey: "x", Events: 3},
		"of the zone":   {Kind: store.OverrideZone, Events: 3},
	} {
		t.Run(name, func(t *testing.T) {
			s := newQueueSite(t, []*Zone{{Name: "zone", Key: []string{"{" + headerA + "}"}, Events: Quantity{Number: 1}, Window: time.Hour, ChargeBefore: true, MaxWait: 2 * time.Hour}})
			synctest.Test(t, func(t *testing.T) {
				mustAll(t, "the first", []*sent{s.send(t.Context(), "x")}, http.StatusOK, 0)
				waiting := s.send(t.Context(), "x")
				pass(time.Minute)
				o.Zone, o.Until = "zone", store.NoEnd
				if o.ClientKey != "" {
					o.ClientKey, _ = s.limiters[0].Zones[0].clientKey(nil, values{headerA: "x"}.replacer(), s.limiters[0], true)
				}
				redistest.Must(t, s.handles[0].SetOverride(t.Context(), o))
				synctest.Wait()
				mustAll(t, "after the change", []*sent{waiting}, http.StatusOK, time.Minute)
			})
		})
	}
}

// TestRulesAreShownInTheNextResponse, raised and lowered.
func TestRulesAreShownInTheNextResponse(t *testing.T) {
	z := &Zone{ChargeBefore: true, Batch: 3}
	l := newTestHandler(t, z, memory.New(memory.NewBuckets(), memory.Options{}))
	l.Headers = HeadersGitHub
	for used, events := range []int64{10, 5000, 3, 2} {
		if used > 0 {
			change(t, l, store.Override{Kind: store.OverrideLimit, ClientKey: z.templates[0].tag + ":", Events: events})
		}
		w := l.answeredWith(http.StatusOK)
		if got := w.Header().Get("X-RateLimit-Limit"); got != strconv.FormatInt(events, 10) || (w.Code == http.StatusOK) != (int64(used) < events) {
			t.Errorf("request %d: status %d, limit %s, want %d", used+1, w.Code, got, events)
		}
	}
}

// TestBurstThatIsNotNamed stays that of the config: to lower the rate must not admit more at once.
func TestBurstThatIsNotNamed(t *testing.T) {
	for _, test := range []struct {
		algorithm    store.Algorithm
		config       Quantity
		by           store.Override
		events, most int64
	}{
		{store.GCRA, Quantity{Number: 10}, store.Override{Events: 50}, 50, 10},
		{store.GCRA, Quantity{Number: 10}, store.Override{Events: 5000, Burst: 20}, 5000, 20},
		{store.GCRA, Quantity{Text: "{b}", Number: 10}, store.Override{Events: 50}, 50, 10},
		{store.GCRA, Quantity{}, store.Override{Events: 50}, 50, 0},
		{store.FixedWindow, Quantity{}, store.Override{Events: 50}, 50, 0},
		{store.GCRA, Quantity{Number: 10}, store.Override{Events: store.Unlimited}, unlimited, 0},
	} {
		z := Zone{Algorithm: test.algorithm, Burst: test.config, Window: time.Hour}
		if events, burst := z.limitIn(&test.by); events != test.events || burst != test.most {
			t.Errorf("%+v gives %d events, burst %d, want %d and %d", test.by, events, burst, test.events, test.most)
		}
	}
}
