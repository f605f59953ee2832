package limiter

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// cookieZone counts by the cookie sid.
func cookieZone(limit int64, complete func(z *Zone)) *Zone {
	z := &Zone{Name: "zone", Key: []string{"{http.request.cookie.sid}"}, Window: time.Hour, Events: Quantity{Number: limit}}
	z.Free.Add(http.StatusNotModified)
	if complete != nil {
		complete(z)
	}
	return z
}

// with sends a request with cookies.
func (s *queueSite) with(cookies string) (int, http.Header) {
	r := httptest.NewRequestWithContext(s.t.Context(), http.MethodGet, "/", nil)
	r.Header.Set("Cookie", cookies)
	return s.serve(s.limiters, r)
}

func (s *queueSite) mustGet(cookies string, want int) http.Header {
	s.t.Helper()
	status, headers := s.with(cookies)
	if status != want {
		s.t.Errorf("%s: status %d, want %d: %v", cookies, status, want, headers)
	}
	return headers
}

// TestEachCookieCounts: a request with two cookies of one name counts for both clients, in any order, by any
// algorithm; where one has no room it counts for neither.
func TestEachCookieCounts(t *testing.T) {
	for name, complete := range map[string]func(z *Zone){
		"after":  nil,
		"before": func(z *Zone) { z.ChargeBefore = true },
		"batch":  func(z *Zone) { z.ChargeBefore, z.Batch = true, 2 },
		"log":    func(z *Zone) { z.Algorithm = store.SlidingLog },
		"gcra":   func(z *Zone) { z.Algorithm, z.ChargeBefore = store.GCRA, true },
		"end":    func(z *Zone) { z.SettleAtEnd = true },
		"wait":   func(z *Zone) { z.ChargeBefore, z.MaxWait = true, time.Millisecond },
	} {
		t.Run(name, func(t *testing.T) {
			s := newQueueSite(t, []*Zone{cookieZone(3, complete)})
			s.mustGet("sid=a; sid=b", http.StatusOK)
			s.mustGet("sid=b; sid=%61", http.StatusOK)
			s.mustGet("sid=a", http.StatusOK)
			s.mustGet("sid=c; sid=a", http.StatusTooManyRequests)
			s.mustGet("sid=a; sid=b; sid=c", http.StatusTooManyRequests)
			for range 3 {
				s.mustGet("sid=c", http.StatusOK)
			}
			s.mustGet("sid=c", http.StatusTooManyRequests)
			s.mustGet(`sid=c; sid="\142"`, http.StatusTooManyRequests)
			s.mustGet("sid=b", http.StatusOK)
			s.mustGet("sid=b", http.StatusTooManyRequests)
			s.mustGet("sid=1; sid=2; sid=3; sid=4", http.StatusBadRequest)
			s.mustGet("sid=1; sid=2; sid=3; sid=1; sid=%31; SID=2", http.StatusOK)

			s.answer = func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotModified) }
			for range 5 {
				s.mustGet("sid=f; sid=g", http.StatusNotModified)
			}
		})
	}
}

// TestPartsOfAKeyMultiply up to three clients.
func TestPartsOfAKeyMultiply(t *testing.T) {
	s := newQueueSite(t, []*Zone{cookieZone(2, func(z *Zone) {
		z.Key = []string{"{http.request.cookie.sid}-{http.request.cookie.tid}-{http.request.cookie.sid}"}
	})})
	s.mustGet("sid=a; sid=b; tid=t", http.StatusOK)
	s.mustGet("sid=a; tid=t", http.StatusOK)
	s.mustGet("sid=b; tid=t; sid=a", http.StatusTooManyRequests)
	s.mustGet("sid=a; sid=b; tid=t; tid=u", http.StatusBadRequest)
	s.mustGet("sid=a; sid=b; sid=c; tid=u", http.StatusOK)
	mixed := newQueueSite(t, []*Zone{cookieZone(2, func(z *Zone) { z.Key = []string{"{http.request.cookie.sid}-{" + headerA + "}"} })})
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	r.Header = http.Header{"A": {"x", "y"}, "Cookie": {"sid=a; sid=b"}}
	if status, _ := mixed.serve(mixed.limiters, r); status != http.StatusBadRequest {
		t.Errorf("with two headers as well: status %d", status)
	}
}

// TestSlotsOfEachCookie are taken and given back.
func TestSlotsOfEachCookie(t *testing.T) {
	s := newQueueSite(t, []*Zone{cookieZone(1, func(z *Zone) { z.Algorithm, z.ChargeBefore = store.Concurrency, true })})
	var within []int
	s.answer = func(http.ResponseWriter, *http.Request) {
		s.answer = nil
		for _, cookies := range []string{"sid=a", "sid=b", "sid=c; sid=b", "sid=c"} {
			status, _ := s.with(cookies)
			within = append(within, status)
		}
	}
	s.mustGet("sid=a; sid=b", http.StatusOK)
	if want := []int{429, 429, 429, 200}; !slices.Equal(within, want) {
		t.Errorf("beside the request: %v, want %v", within, want)
	}
	s.mustGet("sid=a", http.StatusOK)
	s.mustGet("sid=b", http.StatusOK)
}

// TestOperatorsAndEachCookie: a block of one refuses the request, a limit is that client's.
func TestOperatorsAndEachCookie(t *testing.T) {
	z := cookieZone(2, nil)
	s := newQueueSite(t, []*Zone{z})
	set := func(kind store.OverrideKind, client string, events int64) {
		key := z.templates[0].tag + ":" + client
		err := s.handles[0].SetOverride(t.Context(), store.Override{Kind: kind, Zone: "zone", ClientKey: key, Events: events, Until: time.Now().Add(time.Hour).UnixMicro()})
		if err != nil {
			t.Fatal(err)
		}
	}
	set(store.OverrideBlock, "blocked", 0)
	set(store.OverrideLimit, "many", 5)
	set(store.OverrideLimit, "all", store.Unlimited)
	z.BlockStatus = http.StatusForbidden
	s.mustGet("sid=a; sid=blocked", http.StatusForbidden)
	s.mustGet("sid=blocked; sid=many", http.StatusForbidden)
	for range 2 {
		s.mustGet("sid=many; sid=all; sid=a", http.StatusOK)
	}
	s.mustGet("sid=many; sid=a", http.StatusTooManyRequests)
	s.mustGet("sid=all; sid=a", http.StatusTooManyRequests)
	for range 3 {
		s.mustGet("sid=many", http.StatusOK)
	}
	s.mustGet("sid=many", http.StatusTooManyRequests)
}

// TestEnforcedCookieIsNotHidden behind those of clients that a zone only observes.
func TestEnforcedCookieIsNotHidden(t *testing.T) {
	z := cookieZone(1, nil)
	s := newQueueSite(t, []*Zone{z})
	z.enforced = cohorts / 2
	clients := map[bool]string{}
	for n := range 100 {
		client := fmt.Sprint("c", n)
		clients[z.enforces(z.templates[0].tag+":"+client, nil)] = client
	}
	observed, enforced := "sid="+clients[false], "sid="+clients[true]
	s.mustGet(observed+"; "+enforced, http.StatusOK)
	s.mustGet(observed+"; "+enforced, http.StatusTooManyRequests)
	s.mustGet(observed, http.StatusOK)
	for n := range 20 {
		s.mustGet(fmt.Sprintf("%s; sid=x%d; sid=y%d; sid=z%d", enforced, n, n, n), http.StatusBadRequest)
	}
	z.enforced = 0
	s.mustGet(enforced+"; sid=x; sid=y; sid=z", http.StatusOK)
}

// TestOneDecisionForAllCookies: fields, placeholders, problems and metrics have a zone once, with what decides.
func TestOneDecisionForAllCookies(t *testing.T) {
	s := newQueueSite(t, []*Zone{cookieZone(3, func(z *Zone) { z.Name = "once" })})
	l := s.limiters[0]
	l.Headers, l.Problem = HeadersBoth, true
	var before any
	s.answer = func(_ http.ResponseWriter, r *http.Request) {
		before, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Get("http.rate_limit.once.used")
	}
	s.mustGet("sid=b", http.StatusOK)
	for _, cookies := range []string{"sid=a; sid=b", "sid=b; sid=c"} {
		h := s.mustGet(cookies, http.StatusOK)
		if n := strings.Count(h.Get(policyField)+h.Get(limitField), "once"); n != 2 {
			t.Errorf("%s: %s", cookies, h)
		}
		if used, _ := strconv.ParseInt(h.Get("X-Ratelimit-Used"), 10, 64); before != used-1 {
			t.Errorf("%s: the placeholder was %v before, the header is %d", cookies, before, used)
		}
	}
	h := s.mustGet("sid=d; sid=b", http.StatusTooManyRequests)
	if n := strings.Count(h.Get(policyField)+h.Get(limitField), "once"); n != 2 {
		t.Errorf("refused: %s", h)
	}
	counts := &l.Zones[0].Counts.Decisions
	if allowed, refused := counts[telemetry.Allowed].Value(), counts[telemetry.Refused].Value(); allowed != 3 || refused != 1 {
		t.Errorf("%d allowed, %d refused, want 3, 1", allowed, refused)
	}
}

// TestCookiesWait in the line of the one that has no room.
func TestCookiesWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newQueueSite(t, []*Zone{cookieZone(1, func(z *Zone) {
			z.Window, z.MaxWait, z.ChargeBefore = time.Second, time.Minute, true
		})})
		s.mustGet("sid=b", http.StatusOK)
		s.mustGet("sid=a; sid=b", http.StatusOK)
		s.mustGet("sid=a", http.StatusOK)
		began := time.Now()
		s.mustGet("sid=c; sid=b", http.StatusOK)
		if waited := time.Since(began); waited > 2*time.Second {
			t.Errorf("waited %v", waited)
		}
		s.handles[0].Unload()
	})
}

// TestCookiesShareOneBucketOnce: new clients of one request count it once in the bucket that they share, also
// where the zone enforces only one of them.
func TestCookiesShareOneBucketOnce(t *testing.T) {
	for name, enforced := range map[string]uint64{"all": cohorts, "half": cohorts / 2} {
		t.Run(name, func(t *testing.T) {
			z := cookieZone(1, func(z *Zone) { z.ChargeBefore = true })
			w := newBoundedWorld(t, 1, z)
			z.Key = []string{"{http.request.cookie.sid}"}
			z.prepare()
			z.countIn(ownStore, w.handle)
			l := &Limiter{arrived: new(arrivals), Config: Config{Zones: []*Zone{z}, Logger: zap.NewNop(), Now: w.clock.Now, Store: w.handle, LogRefusals: LogNone}}
			s := &queueSite{t: t, limiters: []*Limiter{l}}
			s.mustGet("sid=first", http.StatusOK)
			z.enforced = enforced
			clients := map[bool]string{false: "other"}
			for n := range 100 {
				client := fmt.Sprint("c", n)
				clients[z.enforces(w.keyOf(client), nil)] = client
			}
			both := "sid=" + clients[false] + "; sid=" + clients[true]
			s.mustGet(both, http.StatusOK)
			s.mustGet(both, http.StatusTooManyRequests)
			w.clock.Advance(2 * time.Hour)
			s.mustGet("sid=second", http.StatusOK)
			s.mustGet(both, http.StatusOK)
		})
	}
}

// TestUnknownClientsStayApart: this process may decide for each of them.
func TestUnknownClientsStayApart(t *testing.T) {
	e, z := new(evaluation), new(boundZone)
	for range 2 {
		e.zones = append(e.zones, &inZone{boundZone: z, of: e, bucket: unknownBucket})
		e.asks = append(e.asks, &e.zones[0].ask)
	}
	if e.shareOnce(); len(e.zones) != 2 {
		t.Errorf("%d clients are left, want 2", len(e.zones))
	}
}

// TestIncludesPassZonesOfAddresses: a request of Caddy to itself counts by headers alone. Clients cannot send one.
func TestIncludesPassZonesOfAddresses(t *testing.T) {
	s := newQueueSite(t, []*Zone{cookieZone(1, nil)})
	send := func(remote, cookies string, isServed bool) int {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		if r.RemoteAddr = remote; isServed {
			r = httptest.NewRequestWithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{}), http.MethodGet, "/", nil)
			r.RemoteAddr = remote
		}
		r.Header.Set("Cookie", cookies)
		w := httptest.NewRecorder()
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, nil)
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, strings.Split(remote, ":")[0])
		err := s.limiters[0].ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil }))
		if err != nil {
			return statusOf(err)
		}
		return http.StatusOK
	}
	const itself = "127.0.0.1:10000"
	for _, test := range []struct {
		remote, cookies string
		isServed        bool
		want            []int
	}{
		{itself, "", false, []int{200, 200, 200}},
		{itself, "sid=v", false, []int{200, 429}},
		{itself, "", true, []int{200, 429}},
		{"127.0.0.2:10000", "", false, []int{200, 429}},
		{"127.0.0.1:10001", "", false, []int{429}},
		{itself, "", false, []int{200, 200}},
	} {
		for n, want := range test.want {
			if got := send(test.remote, test.cookies, test.isServed); got != want {
				t.Errorf("request %d from %s, cookies %q, served %t: status %d, want %d", n, test.remote, test.cookies, test.isServed, got, want)
			}
		}
	}
}

// TestRootlessTargetsAreRefused, because Caddy sends them to backends with a path that no matcher sees.
func TestRootlessTargetsAreRefused(t *testing.T) {
	s := newQueueSite(t, []*Zone{cookieZone(100, nil)})
	for line, want := range map[string]int{
		"GET a:http://h/burst":            http.StatusBadRequest,
		"GET http:http://h/burst":         http.StatusBadRequest,
		"GET a:b":                         http.StatusBadRequest,
		"GET http://h/burst":              http.StatusOK,
		"GET /a:http://h/burst":           http.StatusOK,
		"GET //h/burst":                   http.StatusOK,
		"OPTIONS *":                       http.StatusOK,
		"CONNECT h:443":                   http.StatusOK,
		"CONNECT /package.Service/Method": http.StatusOK,
	} {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(line + " HTTP/1.1\r\nHost: h\r\n\r\n")))
		if err != nil {
			t.Fatal(line, err)
		}
		if status, _ := s.serve(s.limiters, r.WithContext(t.Context())); status != want {
			t.Errorf("%s: status %d, want %d", line, status, want)
		}
	}
}
