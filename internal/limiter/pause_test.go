package limiter

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// provider is what several Caddys that share a store have behind them.
type provider struct {
	t       *testing.T
	now     time.Time
	caddys  []*Limiter
	asked   int
	key     string
	buckets *memory.Buckets
	stores  []*halfStore
}

// halfStore fails takes with err, unless it is nil, and carries them out anyway if it is late.
type halfStore struct {
	store.Store
	err    error
	isLate bool
}

func (s *halfStore) Take(ctx context.Context, asks []*store.Ask) {
	if s.err == nil || s.isLate {
		s.Store.Take(ctx, asks)
	}
	for _, a := range asks {
		if s.err != nil {
			a.State = store.State{Err: s.err}
		}
	}
}

func newProvider(t *testing.T, caddys int, key string, options ...func(*Zone)) *provider {
	t.Helper()
	p := &provider{t: t, now: time.Now().Truncate(time.Second), key: key, buckets: memory.NewBuckets()}
	clock := func() time.Time { return p.now }
	for n := range caddys {
		s := &halfStore{Store: memory.New(p.buckets, memory.Options{Now: clock})}
		p.stores = append(p.stores, s)
		handle := &stores.Handle{Name: t.Name() + strconv.Itoa(n), Module: deafModule{s}, Logger: zap.NewNop()}
		if _, err := handle.Enter(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(handle.Unload)
		z := &Zone{
			Name: "test", Key: []string{key}, Events: Quantity{Number: 1000}, Cost: Quantity{Number: 1}, Window: 24 * time.Hour,
			IPv4Prefix: 32, IPv6Prefix: 64, ObeyUpstream: true,
		}
		for _, set := range options {
			set(z)
		}
		p.caddys = append(p.caddys, New(Config{Zones: []*Zone{z}, Logger: zap.NewNop(), Now: clock, Store: handle}))
	}
	return p
}

// get sends a request of an address to a Caddy, and returns the status. The upstream tells it the seconds to
// stay away, answers 200 or, below -1, that status; or the client leaves, at -1. meanwhile, if not nil, runs before that.
func (p *provider) get(caddyNumber int, address string, seconds int, meanwhile func()) int {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	r = caddyhttp.PrepareRequest(r.WithContext(ctx), caddy.NewReplacer(), w, nil)
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
	err := p.caddys[caddyNumber].ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		p.asked++
		if meanwhile != nil {
			meanwhile()
		}
		switch {
		case seconds < -1:
			w.WriteHeader(-seconds)
		case seconds < 0:
			cancel()
			return context.Canceled
		case seconds > 0:
			w.Header().Set("Retry-After", strconv.Itoa(seconds))
			w.WriteHeader(http.StatusTooManyRequests)
		default:
			w.WriteHeader(http.StatusOK)
		}
		return nil
	}))
	if err != nil {
		return statusOf(err)
	}
	return w.Code
}

// reaches checks whether a request of an address reaches the upstream.
func (p *provider) reaches(what string, caddyNumber int, address string, want bool) {
	p.t.Helper()
	before := p.asked
	p.get(caddyNumber, address, 0, nil)
	if got := p.asked > before; got != want {
		p.t.Errorf("%s, a request of %s to Caddy %d reaches the upstream: %t", what, address, caddyNumber, got)
	}
}

const mallory, alice, bob = "192.0.2.1", "198.51.100.1", "203.0.113.1"

// TestOneNetworkClosesForAMinute: a client that provokes an answer with an hour closes the bucket of all for a
// minute. Then one request finds the upstream open, and all Caddys go on.
func TestOneNetworkClosesForAMinute(t *testing.T) {
	t.Setenv("PROVIDER", "weather")
	for _, key := range []string{"static", "{env.PROVIDER}", "a {system.hostname}"} {
		t.Run(key, func(t *testing.T) {
			p := newProvider(t, 3, key)
			p.get(0, mallory, 3600, nil)
			for n := range p.caddys {
				p.reaches("at once", n, alice, false)
			}
			p.now = p.now.Add(59 * time.Second)
			p.reaches("within the minute", 0, alice, false)
			p.now = p.now.Add(2 * time.Second)
			p.get(1, alice, 0, func() {
				for n := range p.caddys {
					p.reaches("during the probe", n, bob, false)
				}
			})
			p.reaches("after the probe", 1, bob, true)
			p.now = p.now.Add(probeInterval)
			for n := range p.caddys {
				p.reaches("a second later", n, bob, true)
				p.reaches("a second later", n, mallory, true)
			}
		})
	}
}

// TestTwoNetworksCloseInFull, for as long as both were told, and no longer.
func TestTwoNetworksCloseInFull(t *testing.T) {
	for _, test := range []struct {
		first, second string
		closes        bool
	}{
		{mallory, alice, true},
		{mallory, "192.0.2.200", false},
		{"2001:db8:1:1::1", "2001:db8:1:2::1", false},
		{"2001:db8:1::1", "2001:db8:2::1", true},
		{"::ffff:192.0.2.1", "192.0.2.2", false},
		{mallory, "2001:db8::1", false},
	} {
		t.Run(test.first+" "+test.second, func(t *testing.T) {
			p := newProvider(t, 1, "static")
			p.get(0, test.first, 3600, nil)
			p.now = p.now.Add(time.Minute)
			p.get(0, test.second, 3000, nil)
			for range 3 {
				p.now = p.now.Add(61 * time.Second)
				before := p.asked
				p.get(0, test.second, 2900, nil)
				p.get(0, test.second, 2900, nil)
				if got, want := p.asked-before, map[bool]int{true: 0, false: 1}[test.closes]; got != want {
					t.Errorf("%s and %s were told: in a later minute %d requests reach the upstream, want %d", test.first, test.second, got, want)
				}
			}
			if p.now = p.now.Add(time.Hour); test.closes {
				p.reaches("after it", 0, bob, true)
				p.reaches("after it", 0, bob, true)
			}
		})
	}
}

// TestShortAnswersConfirmNothing: another network was told to come again in seconds.
func TestShortAnswersConfirmNothing(t *testing.T) {
	p := newProvider(t, 1, "static")
	p.get(0, mallory, 0, func() { p.get(0, alice, 5, nil) })
	p.now = p.now.Add(6 * time.Second)
	p.get(0, mallory, 3600, nil)
	p.now = p.now.Add(61 * time.Second)
	p.reaches("a minute later", 0, bob, true)
}

// TestAnswersAtTheSameTime: the store keeps the first penalty, so the minute after it needs a probe as well.
func TestAnswersAtTheSameTime(t *testing.T) {
	p := newProvider(t, 1, "static")
	p.get(0, alice, 3600, func() { p.get(0, mallory, 3600, nil) })
	p.now = p.now.Add(61 * time.Second)
	before := p.asked
	p.get(0, bob, 3500, func() { p.reaches("during the probe", 0, alice, false) })
	p.now = p.now.Add(50 * time.Minute)
	p.reaches("within the hour", 0, alice, false)
	if got := p.asked - before; got != 1 {
		t.Errorf("%d requests reach the upstream, want 1", got)
	}
}

// TestProbesThatLearnNothing are given back: their clients left, or another handler refused them.
func TestProbesThatLearnNothing(t *testing.T) {
	p := newProvider(t, 2, "static")
	p.get(0, mallory, 3600, nil)
	p.reaches("at once", 1, alice, false)
	p.now = p.now.Add(61 * time.Second)
	p.get(0, mallory, -1, nil)
	p.get(0, bob, 3500, func() { p.reaches("during the probe", 1, alice, false) })
	if p.asked != 3 {
		t.Errorf("%d requests reach the upstream, want 3", p.asked)
	}
}

// TestClosuresOfOneClient last as long as they say: nobody else is refused.
func TestClosuresOfOneClient(t *testing.T) {
	p := newProvider(t, 2, "{http.vars.client_ip} static")
	p.get(0, mallory, 3600, nil)
	p.now = p.now.Add(59 * time.Minute)
	p.reaches("within the hour", 1, mallory, false)
	p.reaches("within the hour", 1, alice, true)
	p.now = p.now.Add(2 * time.Minute)
	p.reaches("after it", 1, mallory, true)
}

// TestProbesThatCannotBeAsked: while the store is away, the zone's own on_error decides. A take that came
// late is given back.
func TestProbesThatCannotBeAsked(t *testing.T) {
	for _, err := range []error{store.ErrNotExecuted, store.ErrUncertain} {
		p := newProvider(t, 2, "static")
		p.get(0, mallory, 3600, nil)
		p.now = p.now.Add(61 * time.Second)
		p.stores[0].err, p.stores[0].isLate = err, errors.Is(err, store.ErrUncertain)
		p.get(0, alice, -1, func() { p.get(0, bob, -1, nil) })
		if p.asked != 3 {
			t.Errorf("%v: %d requests reach the upstream, want 3", err, p.asked)
		}
		p.stores[0].err = nil
		p.reaches("after it", 0, bob, true)
	}
}

// TestWhatOpensAnUpstream: an answer that the upstream gives where it serves requests.
func TestWhatOpensAnUpstream(t *testing.T) {
	for status, opens := range map[int]bool{200: true, 404: true, 429: false, 420: false, 500: false, 502: false, 503: false, 529: false} {
		p := newProvider(t, 1, "static")
		p.get(0, mallory, 3600, nil)
		p.now = p.now.Add(61 * time.Second)
		p.get(0, alice, -status, nil)
		p.now = p.now.Add(2 * time.Second)
		p.reaches(strconv.Itoa(status), 0, bob, opens)
		p.now = p.now.Add(time.Minute)
		p.reaches("a minute later", 0, bob, true)
	}
}

// TestResetsEndPauses, by this Caddy or another one.
func TestResetsEndPauses(t *testing.T) {
	p := newProvider(t, 1, "static")
	p.get(0, mallory, 3600, nil)
	p.now = p.now.Add(61 * time.Second)
	p.get(0, alice, -429, nil)
	p.reaches("after a probe that was refused", 0, bob, false)
	z := p.caddys[0].Zones[0]
	z.ForgetReports(z.bound[ownStore].handle.Name, z.templates[0].tag+":")
	p.reaches("after a reset", 0, bob, true)

	var other pause
	other.believe("192.0.2.0/24", time.Hour, p.now)
	other.answered(p.now)
	if other.doubted.Load() == 0 {
		t.Error("a request from before the penalty ends it")
	}
	if other.answered(p.now.Add(30 * time.Second)); other.doubted.Load() != 0 {
		t.Error("a request that the closed bucket admitted does not end the pause")
	}
}

// TestPausesBesidePenalties: the other Caddy tells those of the upstream by their length.
func TestPausesBesidePenalties(t *testing.T) {
	p := newProvider(t, 2, "static", func(z *Zone) { z.Penalty = 5 * time.Second })
	p.get(0, mallory, 3600, nil)
	p.reaches("at once", 1, alice, false)
	p.now = p.now.Add(61 * time.Second)
	p.get(1, alice, -429, func() { p.reaches("during the probe", 1, bob, false) })
}

// TestShortAnswersTakeNothingBack from what two networks were told.
func TestShortAnswersTakeNothingBack(t *testing.T) {
	var p pause
	now := time.Now()
	p.believe("192.0.2.0/24", time.Hour, now)
	p.believe("198.51.100.0/24", time.Hour, now)
	p.believe("203.0.113.0/24", time.Second, now)
	if got := p.believe("203.0.113.0/24", 2*time.Hour, now.Add(time.Minute)); got != 59*time.Minute {
		t.Errorf("the third network's answer closes for %v, want 59m", got)
	}
}
