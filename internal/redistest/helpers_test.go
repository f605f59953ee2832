package redistest_test

import (
	"context"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// deadline is a context that ends after d.
func deadline(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// serverAt finds the server with an address.
func serverAt(t *testing.T, servers []*redistest.Server, addr string) *redistest.Server {
	t.Helper()
	for _, s := range servers {
		if s.Addr() == addr {
			return s
		}
	}
	t.Fatalf("no server has address %s", addr)
	return nil
}

// newClient makes a client of a server that is not the server's own.
func newClient(t *testing.T, s *redistest.Server, username, password string) *goredis.Client {
	t.Helper()
	client := goredis.NewClient(&goredis.Options{
		Addr: s.Addr(), Username: username, Password: password, MaxRetries: -1,
	})
	t.Cleanup(func() { client.Close() })
	return client
}
