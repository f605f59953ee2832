package service_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestExactOverSeveralServices: two services on two shards admit exactly the limit of each client, also
// where a shard is killed and comes back meanwhile, and what they admitted is counted in the end.
func TestExactOverSeveralServices(t *testing.T) {
	t.Parallel()
	const limit, clients, workers, calls = 25, 4, 4, 16
	for _, kills := range []bool{false, true} {
		t.Run(fmt.Sprint("kills ", kills), func(t *testing.T) {
			t.Parallel()
			servers := caddytest.StartLastingShards(t, 2, 0)
			block := fmt.Sprintf("domain edge {\ndescriptor user zone users\n}\nzone users {\nevents %d\nwindow 1h\non_error deny\n}", limit)
			timeout := "check_timeout 1m"
			if kills {
				timeout = "check_timeout 2s" // a call that waits for a shard that is away is to be refused soon
			}
			services := make([]client, 2)
			for i, c := range caddytest.StartMany(t, len(services), site(servers.Store(timeout), block)) {
				services[i] = dial(t, c)
			}
			var admitted [clients]atomic.Int64
			ask := func(service, user int) error {
				answer, err := services[service].ShouldRateLimit(t.Context(), asking("edge", descriptor(fmt.Sprint("user=", user))))
				if err == nil && answer.GetOverallCode() == ratelimitv3.RateLimitResponse_OK {
					admitted[user].Add(1)
				}
				return err
			}
			restarted := make(chan error, 1)
			if !kills {
				restarted <- nil
			} else {
				// The first calls open the windows.
				caddytest.Together(t, clients, func(i int) error { return ask(0, i) })
				servers[:1].Kill(t)
				caddytest.Together(t, clients, func(i int) error { return ask(1, i) })
				go func() { restarted <- servers[0].Primary.Restart() }()
			}
			caddytest.Together(t, len(services)*workers, func(i int) (err error) {
				for n := range calls {
					err = errors.Join(err, ask(i%len(services), n%clients))
				}
				return err
			})
			caddytest.Must(t, "restart", <-restarted)
			caddytest.Eventually(t, "all is spent", func() (err error) {
				for user := range clients {
					for service := range services {
						err = errors.Join(err, ask(service, user))
					}
				}
				for user := range clients {
					if n := admitted[user].Load(); n < limit && !kills {
						err = errors.Join(err, fmt.Errorf("user %d: %d admitted", user, n))
					}
				}
				return err
			})
			counted := servers.Counts(t, "users")
			for user := range clients {
				switch n, held := admitted[user].Load(), counted[fmt.Sprint("user=", user)]; {
				case n > limit:
					t.Errorf("user %d: %d admitted, more than %d", user, n, limit)
				case held < n || held > limit:
					t.Errorf("user %d: %d admitted, and %d counted", user, n, held)
				case n < limit:
					t.Logf("user %d: %d admitted, the rest is lost in replies of the shard that was killed", user, n)
				}
			}
		})
	}
}

// TestStoreDown: on_error decides, and deny is no error of the protocol.
func TestStoreDown(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	block := "domain edge {\n"
	zones := ""
	for _, mode := range []string{"deny", "allow", "local"} {
		block += "descriptor " + mode + " zone " + mode + "\n"
		zones += "zone " + mode + " {\nevents 2\nwindow 1h\non_error " + mode + "\n}\n"
	}
	c := dial(t, caddytest.Start(t, site(servers.Store("check_timeout 200ms"), block+"}\n"+zones)))
	servers.Kill(t)
	c.expect("deny", "OVER_LIMIT [OVER_LIMIT]", asking("edge", descriptor("deny=a")))
	for range 3 {
		c.expect("allow", "OK [OK]", asking("edge", descriptor("allow=a")))
	}
	for _, want := range []string{"OK [OK 1/2 HOUR]", "OK [OK 0/2 HOUR]", "OVER_LIMIT [OVER_LIMIT 0/2 HOUR]"} {
		c.expect("local", want, asking("edge", descriptor("local=a")))
	}
	both := c.call(asking("edge", descriptor("local=b"), descriptor("deny=a")))
	caddytest.Must(t, "deny beside others", caddytest.Want("code", both.GetOverallCode(), ratelimitv3.RateLimitResponse_OVER_LIMIT))
	c.expect("which charges none", "OK [OK 1/2 HOUR]", asking("edge", descriptor("local=b")))
}

// TestCallerThatLeaves pays nothing: what its call took is given back once the store has answered.
func TestCallerThatLeaves(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	c := dial(t, caddytest.Start(t, site(servers.Store(), edge)))
	d := descriptor("remote_address=192.0.2.1")
	c.expect("first", "OK [OK 4/5 HOUR]", asking("edge", d))
	caddytest.Must(t, "pause", servers[0].Primary.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := c.ShouldRateLimit(ctx, asking("edge", d))
	// On one connection the service learns in order what happens.
	c.expect("a call after it has left", "OK [OK]", asking("edge", descriptor("path=/health")))
	caddytest.Must(t, "resume", servers[0].Primary.Resume())
	caddytest.Must(t, fmt.Sprint(err), caddytest.Want("code", grpcstatus.Code(err), codes.DeadlineExceeded))
	caddytest.Eventually(t, "the refund arrives", func() error {
		return caddytest.Want("a look", says(c.call(asking("edge", costing(0, descriptor("remote_address=192.0.2.1"))))), "OK [OK 4/5 HOUR]")
	})
}

// TestSharedZone: a zone of rate_limit counts together with that of a service, and what operators set holds in
// both.
func TestSharedZone(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	const zone = "zone clients {\nkey {header.X-Tenant} {client_ip}\nevents 5\nwindow 1h\n}\n"
	text := caddytest.Site("servers {\nprotocols h1 h2c\n}\n"+servers.Store(),
		"route {\nrate_limit_service {\ndomain edge {\ndescriptor x-tenant zone clients\ndescriptor remote_address zone clients\n}\n"+zone+"}\nrate_limit {\n"+zone+"}\nrespond ok\n}\n")
	caddys := caddytest.StartMany(t, 2, text)
	c, tenant, address := dial(t, caddys[0]), descriptor("x-tenant=acme"), descriptor("remote_address=127.0.0.1")
	c.expect("by the service", "OK [OK 4/5 HOUR]", asking("edge", tenant))
	remaining := func(want string, headers ...string) error {
		return caddytest.Want("remaining", caddytest.Remaining(caddys[0].Get("/", headers...)), want)
	}
	caddytest.Must(t, "by the handler", errors.Join(remaining("3", "X-Tenant: acme"), remaining("4")))
	// The handler charges after the response; a look charges nothing.
	look := func(d *commonv3.RateLimitDescriptor) string { return says(c.call(asking("edge", costing(0, d)))) }
	caddytest.Eventually(t, "the handler has charged", func() error { return caddytest.Want("address", look(address), "OK [OK 4/5 HOUR]") })

	code, text := caddys[1].AdminCall(http.MethodPost, "/rate_limit/blocks/clients?key=acme&for=1h", "", "")
	caddytest.Must(t, text, caddytest.Want("status", code, 200))
	eventually := func(what, want string) {
		t.Helper()
		caddytest.Eventually(t, what, func() error {
			code, _, _ := strings.Cut(look(tenant), " ")
			return caddytest.Want(what, code, want)
		})
	}
	eventually("blocked", "OVER_LIMIT")
	code, text = caddys[1].AdminCall(http.MethodDelete, "/rate_limit/blocks/clients?key=acme", "", "")
	caddytest.Must(t, text, caddytest.Want("status", code, 200))
	eventually("unblocked", "OK")
	code, text = caddys[1].AdminCall(http.MethodPost, "/rate_limit/grants/clients?key=acme&events=100", "", "")
	caddytest.Must(t, text, caddytest.Want("status", code, 200))
	caddytest.Eventually(t, "granted", func() error {
		return caddytest.Want("tenant", look(tenant), "OK [OK 103/105 HOUR]")
	})
	// Operators see both as one zone.
	c.expect("refused", "OVER_LIMIT [OVER_LIMIT 103/105 HOUR]", asking("edge", costing(1000, descriptor("x-tenant=acme"))))
	_, top := caddys[0].AdminCall(http.MethodGet, "/rate_limit/top", "", "")
	caddytest.Must(t, top, caddytest.Want("the client among those refused most", strings.Contains(top, "acme"), true))
}
