package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

const (
	badLogin  = "X-Status: 401"
	goodLogin = "X-Status: 200"
	forbidden = "X-Status: 403"
)

// TestBruteForceZone: a zone that counts failures alone stops who guesses.
func TestBruteForceZone(t *testing.T) {
	servers := caddytest.StartShards(t, 1, 1)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("logins."+mode, "events 3", "count_status 401 403", "charge "+mode)
	}
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			c := startWith(t, store, zones, byStatus)
			for _, mode := range modes {
				zone := "logins." + mode
				log := func(login, key string, status int, failures int64) {
					t.Helper()
					must(t, zone+", "+login, c.Probe("/"+zone, "X-Key: "+key, login).Shows(status, 3, failures))
					if store != "" {
						servers.AwaitUsed(t, zone, key, failures)
						servers.AwaitReplicas(t)
					}
				}
				for range 5 {
					log(goodLogin, "alice", http.StatusOK, 0)
				}
				log(badLogin, "alice", http.StatusUnauthorized, 1)
				log(goodLogin, "alice", http.StatusOK, 1)
				log("X-Status: 500", "alice", http.StatusInternalServerError, 1)
				log("X-Status: 304", "alice", http.StatusNotModified, 1)
				log(forbidden, "alice", http.StatusForbidden, 2)
				log(badLogin, "alice", http.StatusUnauthorized, 3)
				// Who knows the password by now is refused as well.
				for _, login := range []string{badLogin, goodLogin, forbidden, goodLogin} {
					a := c.Probe("/"+zone, "X-Key: alice", login)
					must(t, zone+", too many failures, "+login, errors.Join(a.Refuses(zone), a.Shows(http.StatusTooManyRequests, 3, 3)))
				}
				for range 5 {
					log(goodLogin, "bob", http.StatusOK, 0)
				}
				log(badLogin, "bob", http.StatusUnauthorized, 1)
			}
			c.Stop()
			if store == "" {
				return
			}
			for _, mode := range modes {
				must(t, mode, errors.Join(want("alice's count", servers.Content(t, "logins."+mode, "alice").Used, 3),
					want("bob's count", servers.Content(t, "logins."+mode, "bob").Used, 1)))
			}
		})
	}
}

// TestBruteForceZoneOpensAgain when the window ends, and not before.
func TestBruteForceZoneOpensAgain(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := caddytest.StartShards(t, 1, 0)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("logins."+mode, "events 3", "window 3s", "count_status 401 403", "charge "+mode)
	}
	c := startWith(t, servers.Store(), zones, byStatus)
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			zone := "logins." + mode
			key, over := "", time.Time{}
			// On a busy machine a window may end in between.
			for try := 0; ; try++ {
				key = fmt.Sprint("client-", try)
				for range 3 {
					c.Probe("/"+zone, "X-Key: "+key, badLogin)
				}
				eventually(t, "the failures have settled", func() error {
					n := servers.Content(t, zone, key).Used
					return want("their number being 3, or 0 because the window is over", n == 3 || n == 0, true)
				})
				b := servers.Buckets(t, zone)[key]
				if over = time.UnixMicro(b.Reset); b.Count == 3 && time.Until(over) > time.Second {
					break
				}
			}
			eventually(t, "a good login passes", func() error {
				a := c.Probe("/"+zone, "X-Key: "+key, goodLogin)
				if a.Status == http.StatusOK {
					must(t, "good login", errors.Join(want("coming before the window was over", a.Received.Before(over), false), want("used", a.Used, 0)))
					return nil
				}
				must(t, "good login", errors.Join(a.Refuses(zone), want("reset", a.Reset, ceilSeconds(over.UnixMicro()))))
				return errors.New("it is refused")
			})
		})
	}
}
