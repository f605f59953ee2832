package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"
)

const (
	badLogin  = "X-Status: 401"
	goodLogin = "X-Status: 200"
	forbidden = "X-Status: 403"
)

// TestBruteForceZone: a zone that counts failures alone stops who guesses.
func TestBruteForceZone(t *testing.T) {
	servers := startShards(t, 1, 1)
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
					must(t, zone+", "+login, c.probe("/"+zone, "X-Key: "+key, login).shows(status, 3, failures))
					if store != "" {
						servers.awaitUsed(t, zone, key, failures)
						servers.awaitReplicas(t)
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
					a := c.probe("/"+zone, "X-Key: alice", login)
					must(t, zone+", too many failures, "+login, errors.Join(a.refuses(zone), a.shows(http.StatusTooManyRequests, 3, 3)))
				}
				for range 5 {
					log(goodLogin, "bob", http.StatusOK, 0)
				}
				log(badLogin, "bob", http.StatusUnauthorized, 1)
			}
			c.stop()
			if store == "" {
				return
			}
			for _, mode := range modes {
				must(t, mode, errors.Join(want("alice's count", servers.content(t, "logins."+mode, "alice").used, 3),
					want("bob's count", servers.content(t, "logins."+mode, "bob").used, 1)))
			}
		})
	}
}

// TestBruteForceZoneOpensAgain when the window ends, and not before.
func TestBruteForceZoneOpensAgain(t *testing.T) {
	t.Parallel() // it spends its time waiting
	servers := startShards(t, 1, 0)
	zones := ""
	for _, mode := range modes {
		zones += pathZone("logins."+mode, "events 3", "window 3s", "count_status 401 403", "charge "+mode)
	}
	c := startWith(t, servers.store(), zones, byStatus)
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			zone := "logins." + mode
			key, over := "", time.Time{}
			// On a busy machine a window may end in between.
			for try := 0; ; try++ {
				key = fmt.Sprint("client-", try)
				for range 3 {
					c.probe("/"+zone, "X-Key: "+key, badLogin)
				}
				eventually(t, "the failures have settled", func() error {
					n := servers.content(t, zone, key).used
					return want("their number being 3, or 0 because the window is over", n == 3 || n == 0, true)
				})
				b := servers.buckets(t, zone)[key]
				if over = time.UnixMicro(b.Reset); b.Count == 3 && time.Until(over) > time.Second {
					break
				}
			}
			eventually(t, "a good login passes", func() error {
				a := c.probe("/"+zone, "X-Key: "+key, goodLogin)
				if a.status == http.StatusOK {
					must(t, "good login", errors.Join(want("coming before the window was over", a.received.Before(over), false), want("used", a.used, 0)))
					return nil
				}
				must(t, "good login", errors.Join(a.refuses(zone), want("reset", a.reset, ceilSeconds(over.UnixMicro()))))
				return errors.New("it is refused")
			})
		})
	}
}
