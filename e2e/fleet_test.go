package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// startPage runs `caddy rate-limit ui` for some addresses, and returns a function that calls the API of the page.
func startPage(t *testing.T, addresses ...string) (call func(method, path string, answer any) int) {
	t.Helper()
	args := []string{"rate-limit", "ui", "--listen", "127.0.0.1:0"}
	for _, address := range addresses {
		args = append(args, "--address", address)
	}
	cmd := caddytest.Command(t.TempDir(), args...)
	out, err := cmd.StdoutPipe()
	must(t, "pipe", err)
	must(t, "start", cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		must(t, "the page's server ends", cmd.Wait())
	})
	page, err := bufio.NewReader(out).ReadString('\n')
	must(t, "address of the page", err)
	return func(method, path string, answer any) int {
		t.Helper()
		r, err := http.NewRequest(method, strings.TrimSpace(page)+"rate_limit/"+path, nil)
		must(t, path, err)
		r.Header.Set("X-Rate-Limit-Page", "1")
		resp, err := http.DefaultClient.Do(r)
		must(t, path, err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		must(t, path, err)
		must(t, path+": "+string(text), json.Unmarshal(text, answer))
		return resp.StatusCode
	}
}

// TestFleet: commands and the page show two Caddys as one, name a third one that does not answer, and
// send changes to where they count.
func TestFleet(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	// One zone counts in the shard, the other in the memory of each Caddy.
	site := caddytest.Site(strings.TrimSuffix(servers.Store(), "}")+"store own memory\n}",
		"route /shared {\nrate_limit {\n"+zoneWith("shared", "events 2", "window 1h")+"}\n}\nroute /own {\nrate_limit {\nstore own\n"+zoneWith("own", "events 2", "window 1h")+"}\n}\nrespond ok")
	one, other := caddytest.Start(t, site), caddytest.Start(t, site)
	away := caddytest.FreeAddr(t)
	ask := func(c *caddytest.Caddy, path string, n int) (refused int) {
		for range n {
			if c.Probe(path, "X-Key: alice").Status == http.StatusTooManyRequests {
				refused++
			}
		}
		return refused
	}
	must(t, "own limits", errors.Join(want("refused by one", ask(one, "/own", 5), 3), want("refused by the other", ask(other, "/own", 3), 1)))
	ask(one, "/shared", 2)
	servers.AwaitCount(t, "shared", "alice", 2)
	eventually(t, "both refuse", func() error {
		return want("refused", min(ask(one, "/shared", 1), ask(other, "/shared", 1)), 1)
	})

	addresses := one.Admin + "," + other.Admin + "," + away
	var st adminapi.Status
	out := prints(t, 0, []string{one.Admin, other.Admin, away + "  does not answer: ", "75%"}, "status", "--address", addresses)
	must(t, "as JSON", json.Unmarshal([]byte(prints(t, 0, nil, "status", "--json", "--address", one.Admin, "--address", other.Admin)), &st))
	must(t, out, errors.Join(want("Caddys", len(st.Instances), 2), want("zones", len(st.Zones), 2), want("refused", st.Zones[1].Decisions["refused"], 4),
		want("shares", fmt.Sprint(st.Zones[1].Shares[0].Decisions["refused"], st.Zones[1].Shares[1].Decisions["refused"]), "3 1")))
	prints(t, 0, []string{"refused most in the last", "no answer of " + away, "own   4 ", one.Admin + " 75%, " + other.Admin + " 25%"}, "top", "own", "--address", addresses)
	prints(t, 0, []string{"no answer of " + away, "own: 2 clients at their limit"}, "near", "own", "--address", addresses)

	// Lists and changes name it too, and are not of a shard that cannot be reached.
	for _, args := range [][]string{{"rules"}, {"audit"}, {"find", "alice"}, {"get", "shared", "alice"}, {"set", "shared", "carol", "--events", "7"}, {"unset", "shared", "carol"}, {"reset", "shared", "carol"}} {
		prints(t, 0, []string{"no answer of " + away}, append(args, "--address", addresses)...)
	}
	prints(t, 1, []string{"no answer of " + away}, "rules", "--export", "--address", addresses)
	// One Caddy is shown once.
	_, port, _ := strings.Cut(one.Admin, ":")
	prints(t, 0, []string{"own   3 ", one.Admin + " 100%"}, "top", "own", "--address", one.Admin+", localhost:"+port)
	prints(t, 0, []string{"localhost:" + port + "  is the Caddy at " + one.Admin}, "status", "--address", one.Admin+", localhost:"+port)
	for _, empty := range []string{"", one.Admin + ",", " ," + one.Admin} {
		prints(t, 1, []string{"an address is empty"}, "status", "--address", empty)
	}

	page := startPage(t, one.Admin, "http://"+other.Admin, away)
	must(t, "status of the page", errors.Join(want("status", page(http.MethodGet, "", &st), http.StatusOK), want("Caddys", len(st.Instances), 3)))
	must(t, "the one that is away", want("error", st.Instances[2].Address == away && st.Instances[2].Error != "", true))
	var top adminapi.Tops
	must(t, "top of the page", want("status", page(http.MethodGet, "top?n=10", &top), http.StatusOK))
	must(t, "top", errors.Join(want("zones", len(top.Zones), 2), want("count", top.Zones[0].Refused[0].Count, 4), want("errors", len(top.Unanswered), 1)))
	var found adminapi.Found
	must(t, "clients of the page", want("status", page(http.MethodGet, "clients?name=alice", &found), http.StatusOK))
	for _, zone := range found.Zones {
		must(t, zone.Zone, want("copies", len(zone.Buckets[0].Servers), map[string]int{"shared": 1, "own": 2}[zone.Zone]))
	}

	// A block in the shard needs one Caddy; one in memory is not complete while one is away.
	var all adminapi.Overrides
	must(t, "block", want("status", page(http.MethodPost, "blocks/shared?key=bob&for=1h", &all), http.StatusOK))
	var failure struct{ Error string }
	must(t, "block in memory", want("status", page(http.MethodPost, "blocks/own?key=bob&for=1h", &failure), http.StatusBadGateway))
	must(t, failure.Error, want("naming it", strings.Contains(failure.Error, "not at "+away), true))
	both := startPage(t, one.Admin, other.Admin)
	var resets adminapi.Resets
	must(t, "block in memory", want("status", both(http.MethodPost, "blocks/own?key=eve&for=1h", &all), http.StatusOK))
	must(t, "reset in memory", want("status", both(http.MethodDelete, "buckets/own?key=alice", &resets), http.StatusOK))
	must(t, "reset", errors.Join(want("buckets", len(resets.Buckets), 1), want("refused after it", ask(one, "/own", 1)+ask(other, "/own", 1), 0)))
	for _, c := range []*caddytest.Caddy{one, other} {
		for path, client := range map[string]string{"/shared": "bob", "/own": "eve"} {
			eventually(t, client+" is blocked in "+path, func() error {
				return want("status", c.Probe(path, "X-Key: "+client).Status, http.StatusTooManyRequests)
			})
		}
	}
	must(t, "overrides", want("status", both(http.MethodGet, "overrides", &all), http.StatusOK))
	must(t, fmt.Sprintf("%+v", all), want("blocks", len(all.Overrides), 3))
	// A simulation is about one Caddy.
	prints(t, 1, []string{"give one --address"}, "simulate", "/own", "--address", addresses)
	must(t, "unblock", want("status", both(http.MethodDelete, "blocks/own?key=eve", &all), http.StatusOK))
	must(t, "the other one's", want("status", other.Probe("/own", "X-Key: eve").Status, http.StatusOK))
}
