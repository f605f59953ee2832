package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// startGRPC starts a server of gRPC's health service and returns its address. The server answers
// when a request has ended, not before: a server of grpc-go that answers earlier resets the stream,
// which makes Caddy's proxy close the request's body while it is read (a data race in
// bodyNopCloserIfNotRead of Caddy 2.11.9, without consequence but for the race detector).
func startGRPC(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "listen", err)
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		for {
			switch err := stream.RecvMsg(new(grpc_health_v1.HealthCheckRequest)); {
			case errors.Is(err, io.EOF):
				return stream.SendMsg(&grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING})
			case err != nil:
				return err
			}
		}
	}))
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

// grpcClient is a client of gRPC's health service behind Caddy.
type grpcClient struct {
	t      *testing.T
	client grpc_health_v1.HealthClient
}

func dialGRPC(t *testing.T, c *caddytest.Caddy) grpcClient {
	t.Helper()
	conn, err := grpc.NewClient(c.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, "dial", err)
	t.Cleanup(func() { conn.Close() })
	return grpcClient{t, grpc_health_v1.NewHealthClient(conn)}
}

// call returns the status of one call of a client, and its trailers.
func (g grpcClient) call(key string) (st *status.Status, trailers metadata.MD) {
	g.t.Helper()
	ctx := metadata.AppendToOutgoingContext(g.t.Context(), "x-key", key)
	_, err := g.client.Check(ctx, new(grpc_health_v1.HealthCheckRequest), grpc.Trailer(&trailers))
	return status.Convert(err), trailers
}

// grpcSite speaks HTTP/2 without TLS to clients and to the backend.
func grpcSite(store, zones, backend string) string {
	site := zonesSite(store, zones, proxyTo("h2c://"+backend))
	return strings.Replace(site, "{{global}}", "{{global}}\nservers {\nprotocols h1 h2c\n}", 1)
}

// TestGRPCCallsAreRefused with a status of gRPC, which its clients understand.
func TestGRPCCallsAreRefused(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	backend := startGRPC(t)
	forStores(t, bothStores(servers, "on_error deny"), func(t *testing.T, store string) {
		for _, mode := range modes {
			zone := "calls." + mode
			c := caddytest.Start(t, grpcSite(store, zoneWith(zone, "events 2", "charge "+mode)+"grpc\n", backend))
			g := dialGRPC(t, c)
			for used := range int64(2) {
				st, _ := g.call("alice")
				must(t, "call", want("status", st.Code(), codes.OK))
				awaitUsed(t, servers, store, zone, "alice", used+1)
			}
			st, trailers := g.call("alice")
			must(t, "call too many", errors.Join(
				want("status", st.Code(), codes.ResourceExhausted), want("message", st.Message(), fmt.Sprintf("rate limit %s exceeded", zone)),
				want("having retry-after", len(trailers.Get("retry-after")), 1), want("x-ratelimit-remaining", fmt.Sprint(trailers.Get("x-ratelimit-remaining")), "[0]")))
			st, _ = g.call("bob")
			must(t, "another client", want("status", st.Code(), codes.OK))

			web, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.URL+"/grpc.health.v1.Health/Check", http.NoBody)
			must(t, "request", err)
			web.Header.Set("Content-Type", "application/grpc-web+proto")
			web.Header.Set("X-Key", "alice")
			resp, err := caddytest.Client.Do(web)
			must(t, "gRPC-Web", err)
			must(t, "close", resp.Body.Close())
			must(t, "gRPC-Web", errors.Join(want("status", resp.StatusCode, http.StatusTooManyRequests), want("grpc-status", resp.Header.Get("Grpc-Status"), "")))
			must(t, "only its content type", want("status", c.Get("/", "X-Key: alice", "Content-Type: application/grpc").StatusCode, http.StatusTooManyRequests))
			must(t, "other content", want("status", c.Get("/", "X-Key: alice", "Content-Type: application/grpcx").StatusCode, http.StatusTooManyRequests))
			c.Unload()
		}
	})
	c := caddytest.Start(t, grpcSite(servers.Store("on_error deny"), zoneWith("calls", "charge before", "block_status 451")+"grpc\n", backend))
	code, text := c.AdminCall(http.MethodPost, "/rate_limit/blocks/calls?key=mallory&for=1h", "", "")
	must(t, text, want("status", code, http.StatusOK))
	blocked, _ := dialGRPC(t, c).call("mallory")
	must(t, "a blocked client", errors.Join(want("status", blocked.Code(), codes.PermissionDenied), want("message", blocked.Message(), "the client is blocked in rate limit calls")))
	must(t, "kill", servers[0].Primary.Kill())
	st, _ := dialGRPC(t, c).call("carol")
	must(t, "call while Redis is away", errors.Join(want("status", st.Code(), codes.Unavailable), want("message", st.Message(), "rate limit store cannot answer, and on_error is deny")))
}

// TestGRPCIsAnOption: other handlers answer by HTTP status, which proxies that ask understand, and clients
// of gRPC take for UNAVAILABLE. A zone with statuses of gRPC needs no option.
func TestGRPCIsAnOption(t *testing.T) {
	t.Parallel()
	backend := startGRPC(t)
	for zones, code := range map[string]codes.Code{
		zoneWith("calls", "events 1"):                                                                     codes.Unavailable,
		zoneWith("calls", "events 1", "count_status not grpc:16"):                                         codes.ResourceExhausted,
		zoneWith("calls", "events 9", "reset_status grpc:16") + zoneWith("few", "events 1", "status 402"): codes.ResourceExhausted,
	} {
		g := dialGRPC(t, caddytest.Start(t, grpcSite("", zones, backend)))
		st, _ := g.call("alice")
		must(t, zones, want("first call", st.Code(), codes.OK))
		st, _ = g.call("alice")
		must(t, zones, want("second call", st.Code(), code))
	}
}
