package limiter

import (
	"context"
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
)

// provider is what several Caddys that share a store have behind them.
type provider struct {
	t       *testing.T
	now     time.Time
	caddys  []*Limiter
	asked   int
	key     string
	buckets *memory.Buckets
}

func newProvider(t *testing.T, caddys int, key string, options ...func(*Zone)) *provider {
	t.Helper()
	p := &provider{t: t, now: time.Now().Truncate(time.Second), key: key, buckets: memory.NewBuckets()}
	clock := func() time.Time { return p.now }
	for n := range caddys {
		handle := &stores.Handle{Name: t.Name() + strconv.Itoa(n), Module: deafModule{memory.New(p.buckets, memory.Options{Now: clock})}, Logger: zap.NewNop()}
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
// stay away, or answers 200; meanwhile, if not nil, runs before that.
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

// TestOneNetworkClosesForAMinute: whoever provokes an answer that asks for an hour closes the bucket of all for a
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
