package shardlimit_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// topAnswer is what GET /rate_limit/top tells of a zone.
type topAnswer struct {
	Zone    string
	Since   float64
	Refused []struct {
		ClientKey string `json:"client_key"`
		Store     string
		Count     int64
	}
}

// adminRefuses calls the admin API, which is to refuse that and say why.
func adminRefuses(c *caddytest.Caddy, method, path, body string, status int, words ...string) {
	c.T.Helper()
	got, text := c.AdminCall(method, path, "application/json", body)
	var answer struct{ Error string }
	err := json.Unmarshal([]byte(text), &answer)
	if err != nil || got != status {
		c.T.Errorf("%s %s %s: %d: %s, %v; want %d", method, path, body, got, text, err, status)
	}
	for _, word := range words {
		if !strings.Contains(answer.Error, word) {
			c.T.Errorf("%s %s %s: the error %q does not tell of %q", method, path, body, answer.Error, word)
		}
	}
}

// TestTop tells who was refused most, across reloads, in each zone.
func TestTop(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 0)
	for name, store := range bothStores(servers) {
		t.Run(name, func(t *testing.T) {
			config := zonesSite(store, pathZone("api", "events 1")+pathZone("login", "events 1"), "respond ok")
			c := caddytest.Start(t, config)
			var all struct{ Zones []topAnswer }
			c.AdminJSON(http.MethodGet, "/rate_limit/top", "", &all)
			if len(all.Zones) != 2 || all.Zones[0].Zone != "api" || all.Zones[1].Zone != "login" || len(all.Zones[0].Refused) != 0 {
				t.Errorf("at first: %v", all)
			}
			refused := map[string]int64{"alice": 5, "bob": 3, "carol": 1}
			for client, n := range refused {
				for range n + 1 {
					c.Get("/api", "X-Key: "+client)
				}
			}
			c.MustLoad(strings.Replace(config, "respond ok", "respond yes", 1))
			c.Get("/api", "X-Key: alice")
			refused["alice"]++
			var top topAnswer
			c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api&n=2", "", &top)
			if len(top.Refused) != 2 || top.Since <= 0 {
				t.Fatalf("top is %v", top)
			}
			for i, client := range []string{"alice", "bob"} {
				got := top.Refused[i]
				if !strings.HasSuffix(got.ClientKey, ":"+client) || got.Count != refused[client] || got.Store != "default" {
					t.Errorf("place %d is %v, want %s with %d", i, got, client, refused[client])
				}
			}
			c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=login", "", &top)
			if top.Zone != "login" || len(top.Refused) != 0 {
				t.Errorf("login: %v", top)
			}
			for _, bad := range []struct {
				query  string
				status int
				word   string
			}{
				{"zone=nope", http.StatusNotFound, "there is api, login"},
				{"n=0", http.StatusBadRequest, "from 1 to 100"},
				{"n=101", http.StatusBadRequest, "from 1 to 100"},
				{"n=x", http.StatusBadRequest, "from 1 to 100"},
				{"zone=api&zone=login", http.StatusBadRequest, "twice"},
				{"name=api", http.StatusBadRequest, `"name" is unknown`},
				{"zone=%zz", http.StatusBadRequest, "query"},
			} {
				adminRefuses(c, http.MethodGet, "/rate_limit/top?"+bad.query, "", bad.status, bad.word)
			}
			adminRefuses(c, http.MethodDelete, "/rate_limit/top", "", http.StatusMethodNotAllowed)
		})
	}
}

// TestTopOfRollout shows a zone's clients of both stores.
func TestTopOfRollout(t *testing.T) {
	servers := caddytest.StartShards(t, 2, 0)
	c := caddytest.Start(t, strings.Replace(zonesSite(twoStores(servers), zoneWith("api", "events 1"), "respond ok"),
		"rate_limit {\nzone", "rate_limit {\nrollout other 50\nzone", 1))
	for i := range 20 {
		for range 2 {
			c.Get("/", fmt.Sprintf("X-Key: client-%d", i))
		}
	}
	var top topAnswer
	c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
	stores := map[string]int{}
	for _, client := range top.Refused {
		stores[client.Store]++
	}
	if len(top.Refused) != 20 || stores["default"] == 0 || stores["other"] == 0 {
		t.Errorf("top is %v", top)
	}
}
