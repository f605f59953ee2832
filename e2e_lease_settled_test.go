package shardlimit_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestSlotIsRenewedWhileOthersAreSettled: a request that has begun its response
// is settled in one zone while its slot in another one is renewed.
func TestSlotIsRenewedWhileOthersAreSettled(t *testing.T) {
	t.Parallel()
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		// The slot is renewed after a third of a second, again and again.
		for range 3 {
			time.Sleep(300 * time.Millisecond)
			_, _ = w.Write([]byte("some"))
			_ = http.NewResponseController(w).Flush()
		}
	}))
	defer backend.Close()
	forStores(t, func(t *testing.T, store string) {
		c := caddytest.Start(t, fmt.Sprintf(`
{
	{{global}}
	%s
}
{{site}} {
	rate_limit {
		zone counted {
			key static
			events 100
			window 1h
			charge before
		}
		zone running {
			key static
			events 10
			window 1s
			algorithm concurrency
		}
	}
	reverse_proxy %s {
		flush_interval -1
	}
}
`, store, backend.Listener.Addr()))
		must(t, "a long response", want("status", c.Get("/").StatusCode, http.StatusOK))
		c.Stop()
	})
}
