package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

// caddy is the admin API of a Caddy that does not exist: it answers what a test says.
type caddy struct {
	mu      sync.Mutex
	calls   []string
	answers map[string]string
	err     error
}

func (c *caddy) Call(_ context.Context, method, path string, _ []byte) (int, []byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, nil, c.err
	}
	if path != root {
		c.calls = append(c.calls, method+" "+path)
	}
	path, _, _ = strings.Cut(path, "?")
	switch answer := c.answers[method+" "+path]; {
	case answer == "":
		return http.StatusNotFound, []byte(`{"error":"nothing there"}`), nil
	case strings.HasPrefix(answer, `{"error"`):
		return http.StatusBadGateway, []byte(answer), nil
	default:
		return http.StatusOK, []byte(answer), nil
	}
}

// startFleet returns a fleet of Caddys with the zones of known, the last of which answer nothing.
func startFleet(t *testing.T, n, away int, answers map[string]string) (*API, []*caddy) {
	t.Helper()
	status, err := json.Marshal(known)
	if err != nil {
		t.Fatal(err)
	}
	caddys, members := make([]*caddy, n), make([]Member, n)
	for i := range caddys {
		caddys[i] = &caddy{answers: map[string]string{"GET " + root: string(status)}}
		for target, answer := range answers {
			caddys[i].answers[target] = answer
		}
		if i >= n-away {
			caddys[i].err = errors.New("no route")
		}
		members[i] = Member{fmt.Sprint("c", i), caddys[i]}
	}
	return New(members), caddys
}

// made returns the calls that each Caddy has got.
func made(caddys []*caddy) (all []string) {
	for i, c := range caddys {
		for _, call := range c.calls {
			all = append(all, fmt.Sprint("c", i, " ", call))
		}
	}
	return all
}

// TestChangesGoWhereTheyMust: to one Caddy if the store is shared, and otherwise to all.
func TestChangesGoWhereTheyMust(t *testing.T) {
	answers := map[string]string{}
	for _, zone := range []string{"api", "login", "moved"} {
		answers["POST "+root+"blocks/"+zone] = `{"overrides":[{"kind":"block","zone":"` + zone + `","client_key":"x"}]}`
		answers["POST "+root+"zones/"+zone] = answers["POST "+root+"blocks/"+zone]
		answers["DELETE "+root+"buckets/"+zone] = `{"zone":"` + zone + `","buckets":[{"client_key":"x","deleted":true}]}`
	}
	answers["POST "+root+"blocks"] = `{"overrides":[]}`
	answers["DELETE "+root+"zones/gone"] = `{"overrides":[{"kind":"zone","zone":"gone","client_key":"x"}]}`
	for target, all := range map[string]bool{
		"POST blocks/api?client_key=x": false, "POST blocks/login?client_key=x": true, "POST blocks/moved?client_key=x": true,
		"POST blocks/moved?client_key=x&store=redis": false, "DELETE buckets/api?client_key=x": false, "DELETE buckets/login?client_key=x": true,
		"POST blocks?name=x": true,
		// Where the rule of a zone is that no config has is not known.
		"DELETE zones/gone": true, "DELETE zones/gone?store=redis": false,
		// Settings of a zone are kept in the handler's own store, wherever its clients move.
		"POST zones/moved?enforce=5": false, "POST zones/login?enforce=5": true,
	} {
		api, caddys := startFleet(t, 3, 0, answers)
		method, path, _ := strings.Cut(target, " ")
		status, text, err := api.Call(t.Context(), method, root+path, nil)
		if want := map[bool]int{false: 1, true: 3}[all]; err != nil || status != http.StatusOK || len(made(caddys)) != want {
			t.Errorf("%s: %d %s, %v, called %v, want %d calls", target, status, text, err, made(caddys), want)
		}
		if n := strings.Count(string(text), `"client_key":"x"`); strings.Contains(path, "/") && n != 1 {
			t.Errorf("%s: the client is named %d times: %s", target, n, text)
		}
	}
}

// TestChangesWhileSomeAreAway: a shared store needs one Caddy that answers; each memory has to be changed,
// and who has not done so is named.
func TestChangesWhileSomeAreAway(t *testing.T) {
	answers := map[string]string{"POST " + root + "grants/api": `{"overrides":[]}`, "POST " + root + "grants/login": `{"overrides":[]}`}
	api, caddys := startFleet(t, 2, 1, answers)
	slices.Reverse(api.members)
	if status, text, err := api.Call(t.Context(), http.MethodPost, root+"grants/api?client_key=x", nil); err != nil || status != http.StatusOK || len(made(caddys)) != 1 || !strings.Contains(string(text), `"unanswered":["c1: no route"]`) {
		t.Errorf("shared: %d %s, %v", status, text, err)
	}
	status, text, err := api.Call(t.Context(), http.MethodPost, root+"grants/login?client_key=x", nil)
	if err != nil || status != http.StatusBadGateway || !strings.Contains(string(text), "done at c0; not at c1: no route") {
		t.Errorf("in memory: %d %s, %v", status, text, err)
	}
	// What is not in the memory of each is removed where it is.
	api, caddys = startFleet(t, 2, 0, nil)
	caddys[1].answers["DELETE "+root+"grants/login"] = `{"overrides":[]}`
	if status, text, err := api.Call(t.Context(), http.MethodDelete, root+"grants/login?client_key=x", nil); err != nil || status != http.StatusOK {
		t.Errorf("removed from one: %d %s, %v", status, text, err)
	}
	if status, text, err := api.Call(t.Context(), http.MethodDelete, root+"grants/login?client_key=y&store=memory", nil); err != nil || status != http.StatusOK {
		t.Errorf("removed from one: %d %s, %v", status, text, err)
	}
	delete(caddys[1].answers, "DELETE "+root+"grants/login")
	if status, text, err := api.Call(t.Context(), http.MethodDelete, root+"grants/login?client_key=x", nil); err != nil || status != http.StatusNotFound {
		t.Errorf("removed from none: %d %s, %v", status, text, err)
	}
}

// TestOneCaddyAtTwoAddresses is shown once, and makes a change once. Caddys that do not say who they are are
// taken for several.
func TestOneCaddyAtTwoAddresses(t *testing.T) {
	for id, want := range map[string]int{"x": 2, "": 3} {
		api, caddys := startFleet(t, 3, 0, map[string]string{
			"GET " + root + "top": `{"zone":"login","refused":[{"client_key":"k","count":4}]}`, "POST " + root + "grants/login": `{"overrides":[]}`,
		})
		for i, c := range caddys {
			st := *known
			if st.Instances = []adminapi.Instance{{ID: id}}; i == 1 {
				st.Instances[0].ID = "y"
			}
			text, err := json.Marshal(st)
			if err != nil {
				t.Fatal(err)
			}
			c.answers["GET "+root] = string(text)
		}
		var top adminapi.Top
		var st adminapi.Status
		for path, answer := range map[string]any{"top?zone=login": &top, "": &st} {
			if status, text, err := api.Call(t.Context(), http.MethodGet, root+path, nil); err != nil || status != http.StatusOK || json.Unmarshal(text, answer) != nil {
				t.Errorf("%s: %d %s, %v", path, status, text, err)
			}
		}
		if n := len(top.Refused[0].Shares); n != want || top.Refused[0].Count != int64(4*want) || len(st.Zones[0].Shares) != want {
			t.Errorf("%d have refused: %+v, %+v", n, top, st)
		}
		if last := st.Instances[2]; len(st.Instances) != 3 || (last.Same != "") != (want == 2) || last.Same != "" && (last.Address != "c2" || last.Same != "c0") {
			t.Errorf("the Caddys are %+v", st.Instances)
		}
		before := len(made(caddys))
		if status, text, err := api.Call(t.Context(), http.MethodPost, root+"grants/login?client_key=x", nil); err != nil || status != http.StatusOK || len(made(caddys)) != before+want {
			t.Errorf("a change: %d %s, %v, called %v", status, text, err, made(caddys))
		}
	}
}

// TestChangesByWhoReachesTheStore: a Caddy that does not reach it is passed over, and one that refuses is not.
func TestChangesByWhoReachesTheStore(t *testing.T) {
	target := "POST " + root + "grants/api"
	api, caddys := startFleet(t, 3, 0, map[string]string{target: `{"overrides":[]}`})
	change := func() (int, string) {
		status, text, err := api.Call(t.Context(), http.MethodPost, root+"grants/api?client_key=x", nil)
		if err != nil {
			t.Error(err)
		}
		return status, string(text)
	}
	caddys[0].answers[target] = `{"error":"store redis: timeout"}`
	if status, text := change(); status != http.StatusOK || len(made(caddys)) != 2 {
		t.Errorf("one cannot reach it: %d %s, called %v", status, text, made(caddys))
	}
	caddys[1].answers[target], caddys[2].answers[target] = `{"error":"b"}`, `{"error":"c"}`
	if status, text := change(); status != http.StatusBadGateway || !strings.Contains(text, "redis: timeout") {
		t.Errorf("none can: %d %s", status, text)
	}
	delete(caddys[0].answers, target)
	before := len(made(caddys))
	if status, text := change(); status != http.StatusNotFound || len(made(caddys)) != before+1 {
		t.Errorf("refused: %d %s, called %v", status, text, made(caddys))
	}
}

// TestZonesOfSome: a Caddy that does not know a zone has no part of it that could be missing.
func TestZonesOfSome(t *testing.T) {
	answers := map[string]string{"GET " + root + "history": `{"zones":[{"zone":"api"}]}`, "GET " + root + "top": `{"zone":"api"}`, "GET " + root + "buckets/api": `{"zone":"api"}`}
	for path, want := range map[string]int{"history?zone=api": 0, "top?zone=api": 0, "buckets/api?key=x": 0, "history": 1} {
		api, caddys := startFleet(t, 2, 0, answers)
		caddys[1].answers = map[string]string{"GET " + root: caddys[1].answers["GET "+root]}
		var got struct{ Unanswered []string }
		status, text, err := api.Call(t.Context(), http.MethodGet, root+path, nil)
		if err != nil || status != http.StatusOK || json.Unmarshal(text, &got) != nil || len(got.Unanswered) != want {
			t.Errorf("%s: %d %s, %v, want %d errors", path, status, text, err, want)
		}
	}
}

// TestAnswersOfTheFleet name who has not answered; if none has, that is an error, and what all refuse is
// refused.
func TestAnswersOfTheFleet(t *testing.T) {
	answers := map[string]string{
		"GET " + root + "top": `{"zones":[{"zone":"api","refused":[]}]}`, "GET " + root + "near": `{"zones":[]}`, "GET " + root + "overrides": `{"overrides":[]}`,
		"GET " + root + "clients": `{"zones":[]}`, "GET " + root + "history": `{"zones":[]}`, "GET " + root + "buckets/api": `{"zone":"api","buckets":[]}`, "GET " + root + "audit": `{"changes":[]}`,
	}
	for _, path := range []string{"top?n=5", "near", "overrides", "clients?name=x", "history?range=1h", "buckets/api?key=x", "audit"} {
		api, _ := startFleet(t, 3, 1, answers)
		var got struct{ Unanswered []string }
		status, text, err := api.Call(t.Context(), http.MethodGet, root+path, nil)
		if err != nil || status != http.StatusOK || json.Unmarshal(text, &got) != nil || len(got.Unanswered) != 1 || got.Unanswered[0] != "c2: no route" {
			t.Errorf("%s: %d %s, %v", path, status, text, err)
		}
	}
	api, caddys := startFleet(t, 2, 1, answers)
	var st adminapi.Status
	if _, text, err := api.Call(t.Context(), http.MethodGet, root, nil); err != nil || json.Unmarshal(text, &st) != nil || st.Instances[len(st.Instances)-1].Error != "no route" {
		t.Errorf("status: %s, %v", text, err)
	}
	if status, text, err := api.Call(t.Context(), http.MethodGet, root+"top?zone=x", nil); err != nil || status != http.StatusOK {
		t.Errorf("one zone: %d %s, %v", status, text, err)
	}
	delete(caddys[0].answers, "GET "+root+"top")
	if status, text, err := api.Call(t.Context(), http.MethodGet, root+"top", nil); err != nil || status != http.StatusNotFound || !strings.Contains(string(text), "nothing there") {
		t.Errorf("refused: %d %s, %v", status, text, err)
	}
	caddys[0].err = errors.New("stopped")
	for _, target := range []string{"GET top", "GET ", "DELETE buckets/api"} {
		method, path, _ := strings.Cut(target, " ")
		if _, _, err := api.Call(t.Context(), method, root+path, nil); err == nil || !strings.Contains(err.Error(), "stopped; no route") {
			t.Errorf("%s: %v", target, err)
		}
	}
	api, caddys = startFleet(t, 2, 0, answers)
	for _, target := range []string{"POST simulate", "POST overrides", "GET nothing"} {
		method, path, _ := strings.Cut(target, " ")
		if status, text, err := api.Call(t.Context(), method, root+path, nil); err != nil || status != http.StatusNotImplemented || !strings.Contains(string(text), "give one --address") || len(made(caddys)) > 0 {
			t.Errorf("%s: %d %s, %v", target, status, text, err)
		}
	}
}
