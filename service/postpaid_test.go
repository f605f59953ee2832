package service_test

import (
	"strings"
	"testing"
	"time"

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

// TestReportsOfARepeatedTake are charged once, although the call is refused.
func TestReportsOfARepeatedTake(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := dialLimits(t, caddytest.Start(t, site(store, strings.ReplaceAll(gateway, "domain eg", "domain llm"))))
			expect(t, "spends the other", saysOf(l.take("", "paid", "x", 2)), "OK [OK paid 0/2]")
			ask := func(id string, descriptors ...*limitv1.Descriptor) limitv1.Code {
				a := new(limitv1.TakeResponse)
				caddytest.Must(t, "take", l.conn.Invoke(t.Context(), limitService+"Take", &limitv1.TakeRequest{Domain: "llm", RequestId: id, Descriptors: descriptors}, a))
				return a.GetCode()
			}
			for range 3 {
				for id, other := range map[string][]*limitv1.Descriptor{"full": tokensOf("paid", "x", 1), "denied": tokensOf("never", "x", 1)} {
					report := tokensOf("user", "u", 300)
					caddytest.Must(t, id, caddytest.Want("code", ask(id, report[0], other[0]), limitv1.Code_OVER_LIMIT))
				}
			}
			expect(t, "an accepted one", saysOf(l.take("fits", "user", "u", 100)), "OK [OK tokens 300/1000]")
			expect(t, "again", saysOf(l.take("fits", "user", "u", 100)), "OK [OK tokens 300/1000]")
			l.awaitLeft("user", "u", "OK [OK tokens 300/1000]")
			expect(t, "reserve", saysOf(l.reserve("r", "user", "u", 1, time.Hour)), "InvalidArgument")
		})
	}
}

// TestReportsWithoutTheirStore are answered as on_error says, and count once the store is back.
func TestReportsWithoutTheirStore(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 1, 0)
	block, zones := "domain eg {\n", ""
	modes := []string{"deny", "allow", "local"}
	for _, mode := range modes {
		block += "descriptor " + mode + " zone " + mode + " postpaid\n"
		zones += "zone " + mode + " {\nevents 1000\nwindow 10000h\non_error " + mode + "\n}\n"
	}
	caddy := caddytest.Start(t, site(servers.Store("check_timeout 200ms", "charge_timeout 200ms"), block+"}\n"+zones))
	c := dial(t, caddy)
	servers.Kill(t)
	for _, mode := range modes {
		c.call(asking("eg", costing(1200, descriptor(mode+"=x"))))
	}
	servers.Restart(t)
	caddy.AwaitServers()
	for _, mode := range modes {
		caddytest.Eventually(t, mode, func() error {
			a := c.call(asking("eg", costing(0, descriptor(mode+"=x"))))
			return caddytest.Want("a look", says(a)+" used "+used(a), "OVER_LIMIT [OVER_LIMIT 0/1000 UNKNOWN] used 1200")
		})
	}
}

// TestReportsOfACallThatWaits for another zone are charged once, whether it passes in the end or is refused.
func TestReportsOfACallThatWaits(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := dial(t, caddytest.Start(t, site(store, strings.ReplaceAll(gateway, "descriptor never", "descriptor slow zone slow\ndescriptor slower zone slower\ndescriptor never")+`
				zone slow {
					algorithm gcra
					events 2
					window 1s
					burst 1
					max_wait 1m
				}
				zone slower {
					algorithm gcra
					events 1
					window 1h
					burst 1
					max_wait 1m
				}
			`)))
			for i, other := range []string{"slow=x", "slower=x"} {
				c.call(asking("eg", descriptor(other)))
				want, user := []string{"OK", "OVER_LIMIT"}[i], "user="+other
				got := c.call(asking("eg", costing(300, descriptor(user)), descriptor(other)))
				caddytest.Must(t, other, caddytest.Want("code", got.GetOverallCode().String(), want))
				caddytest.Eventually(t, user, func() error {
					return caddytest.Want("a look", says(c.call(asking("eg", costing(0, descriptor(user))))), "OK [OK 700/1000 HOUR]")
				})
			}
		})
	}
}

// TestLimitOfADescriptor has no effect, and there is one warning about many of them.
func TestLimitOfADescriptor(t *testing.T) {
	t.Parallel()
	caddy := caddytest.Start(t, site("", gateway))
	c := dial(t, caddy)
	for i := range 5 {
		d := descriptor("paid=x")
		d.Limit = &commonv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1000}
		want := ratelimitv3.RateLimitResponse_OK
		if i >= 2 {
			want = ratelimitv3.RateLimitResponse_OVER_LIMIT
		}
		caddytest.Must(t, "call", caddytest.Want("code", c.call(asking("eg", d)).GetOverallCode(), want))
	}
	caddy.Unload()
	caddy.AwaitLines(t, 1, "the limit of a descriptor is ignored", `"domain":"eg"`, `"key":"paid"`)
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
