package service_test

import (
	"strings"
	"testing"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/service/limitv1"
)

const gateway = `
	domain eg {
		descriptor user zone tokens postpaid {
			descriptor model zone hour day
		}
		descriptor spaced zone spaced postpaid
		descriptor watched zone watched postpaid
		descriptor paid zone paid
		descriptor never denied
	}
	zone tokens {
		key {rate_limit_service.user}
		events 1000
		window 1h
	}
	zone hour {
		events 5
		window 1h
	}
	zone day {
		events 4
		window 1d
	}
	zone spaced {
		algorithm gcra
		events 1000
		burst 1000
		window 1h
	}
	zone watched {
		events 1000
		window 1h
		enforce 0
	}
	zone paid {
		events 2
		window 1h
	}
`

// used returns the header of an answer with what its zone has used.
func used(a *ratelimitv3.RateLimitResponse) string {
	for _, h := range a.GetResponseHeadersToAdd() {
		if h.GetKey() == "X-Ratelimit-Used" {
			return h.GetValue()
		}
	}
	return ""
}

// TestPostpaid: the descriptor that looks also reports, which counts whole, whatever else the call asks.
func TestPostpaid(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, caddytest.Start(t, site(store, gateway)))
			look := func(entry string) *ratelimitv3.RateLimitRequest { return asking("eg", costing(0, descriptor(entry))) }
			counts := func(entry, want, wantUsed string) {
				t.Helper()
				// Charges beyond a limit arrive later than the answer.
				caddytest.Eventually(t, entry, func() error {
					a := c.call(look(entry))
					return caddytest.Want("a look", says(a)+" used "+used(a), want+" used "+wantUsed)
				})
			}
			report := func(entry string, n int64) *commonv3.RateLimitDescriptor { return costing(n, descriptor(entry)) }

			c.expect("before", "OK [OK 1000/1000 HOUR]", look("user=a"))
			c.expect("a report", "OK [OK 400/1000 HOUR]", asking("eg", report("user=a", 600)))
			counts("user=a", "OK [OK 400/1000 HOUR]", "600")
			c.expect("a report beyond the limit", "OK [OK 0/1000 HOUR]", asking("eg", report("user=a", 600)))
			counts("user=a", "OVER_LIMIT [OVER_LIMIT 0/1000 HOUR]", "1200")
			c.expect("a report when nothing is left", "OVER_LIMIT [OVER_LIMIT 0/1000 HOUR]", asking("eg", report("user=a", 100)))
			counts("user=a", "OVER_LIMIT [OVER_LIMIT 0/1000 HOUR]", "1300")
			c.expect("another user", "OK [OK 1000/1000 HOUR]", look("user=b"))
			c.expect("exactly the limit", "OK [OK 0/1000 HOUR]", asking("eg", report("user=b", 1000)))
			counts("user=b", "OVER_LIMIT [OVER_LIMIT 0/1000 HOUR]", "1000")

			// Beside a descriptor that refuses: asked before, found full, and denied outright.
			c.expect("spends the other", "OK [OK 0/2 HOUR]", asking("eg", report("paid=x", 2)))
			for range 2 {
				if got := says(c.call(asking("eg", report("user=c", 300), descriptor("paid=x")))); !strings.HasPrefix(got, "OVER_LIMIT [") {
					t.Errorf("a report beside a full zone: %s", got)
				}
			}
			counts("user=c", "OK [OK 400/1000 HOUR]", "600")
			c.expect("beside a denied one", "OVER_LIMIT [UNKNOWN, OVER_LIMIT]", asking("eg", report("user=c", 300), descriptor("never=1")))
			counts("user=c", "OK [OK 100/1000 HOUR]", "900")
			c.expect("a look beside a denied one", "OVER_LIMIT [UNKNOWN, OVER_LIMIT]", asking("eg", report("user=c", 0), descriptor("never=1")))
			counts("user=c", "OK [OK 100/1000 HOUR]", "900")
			c.expect("two reports of one call", "OK [OK 0/1000 HOUR, OK 0/1000 HOUR]", asking("eg", report("user=c", 300), report("user=c", 300)))
			counts("user=c", "OVER_LIMIT [OVER_LIMIT 0/1000 HOUR]", "1500")
			c.expect("what is given back", "OK [OK 500/1000 HOUR]", asking("eg", report("user=c", -1000)))
			counts("user=c", "OK [OK 500/1000 HOUR]", "500")

			c.expect("gcra", "OK [OK 0/1000 UNKNOWN]", asking("eg", report("spaced=x", 5000)))
			counts("spaced=x", "OVER_LIMIT [OVER_LIMIT 0/1000 UNKNOWN]", "5000")
			for range 3 {
				if a := c.call(asking("eg", report("watched=x", 600))); a.GetOverallCode() != ratelimitv3.RateLimitResponse_OK {
					t.Errorf("a zone that observes refuses: %s", says(a))
				}
			}
			counts("watched=x", "OK [OK 0/1000 HOUR]", "1800")
		})
	}
}

// TestSeveralZonesOfADescriptor: all have to fit, and the status is about the one that says most.
func TestSeveralZonesOfADescriptor(t *testing.T) {
	t.Parallel()
	caddy := caddytest.Start(t, site("", gateway))
	c := dial(t, caddy)
	call := func(hits int64) *ratelimitv3.RateLimitRequest {
		return asking("eg", costing(hits, descriptor("user=a", "model=m")))
	}
	c.expect("the least left", "OK [OK 1/4 DAY]", call(3))
	c.expect("the one that refuses", "OVER_LIMIT [OVER_LIMIT 1/4 DAY]", call(2))
	c.expect("none was charged", "OK [OK 0/4 DAY]", call(1))
	l := dialLimits(t, caddy)
	hits := uint64(3)
	r := new(limitv1.ReserveResponse)
	caddytest.Must(t, "reserve", l.conn.Invoke(t.Context(), limitService+"Reserve", &limitv1.ReserveRequest{
		Domain: "eg", RequestId: "two zones",
		Descriptors: []*limitv1.Descriptor{{Entries: []*limitv1.Entry{{Key: "user", Value: "b"}, {Key: "model", Value: "m"}}, Hits: &hits}},
	}, r))
	caddytest.Must(t, "code", caddytest.Want("code", r.GetCode(), limitv1.Code_OK))
	done := new(limitv1.CommitResponse)
	caddytest.Must(t, "commit", l.conn.Invoke(t.Context(), limitService+"Commit", &limitv1.CommitRequest{RequestId: "two zones", Hits: []uint64{1}}, done))
	caddytest.Must(t, "settlements", caddytest.Want("number", len(done.GetSettlements()), 2))
	caddytest.Eventually(t, "the rest comes back", func() error {
		return caddytest.Want("a look", says(c.call(asking("eg", costing(0, descriptor("user=b", "model=m"))))), "OK [OK 3/4 DAY]")
	})
}

// TestStandardServices of gRPC: health, and reflection.
func TestStandardServices(t *testing.T) {
	t.Parallel()
	l := dialLimits(t, caddytest.Start(t, site("", gateway)))
	health := grpc_health_v1.NewHealthClient(l.conn)
	for _, name := range []string{"", "envoy.service.ratelimit.v3.RateLimitService", "shardlimit.limit.v1.LimitService"} {
		a, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: name})
		caddytest.Must(t, name, err)
		caddytest.Must(t, name, caddytest.Want("status", a.GetStatus(), grpc_health_v1.HealthCheckResponse_SERVING))
	}
	if _, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "other"}); err == nil {
		t.Error("an unknown service is healthy")
	}
	stream, err := grpc_reflection_v1.NewServerReflectionClient(l.conn).ServerReflectionInfo(t.Context())
	caddytest.Must(t, "reflection", err)
	caddytest.Must(t, "ask", stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "shardlimit.limit.v1.LimitService"},
	}))
	a, err := stream.Recv()
	caddytest.Must(t, "answer", err)
	if len(a.GetFileDescriptorResponse().GetFileDescriptorProto()) == 0 {
		t.Errorf("reflection knows no file of the service: %v", a)
	}
}
