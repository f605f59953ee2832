package admin

import (
	"net/http"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// mostMatches is how many clients of a zone in one store are found by how they begin.
const mostMatches = 20

// findByPrefix answers GET /rate_limit/clients with the clients one of whose values, or whose client key,
// begins with a text, among those whose buckets this process remembers. It makes no call.
func findByPrefix(running runningConfig, prefix string) (any, error) {
	if prefix == "" {
		return nil, apiErrorf(http.StatusBadRequest, "prefix is empty: write how the client begins")
	}
	found := adminapi.Matches{Clients: []adminapi.Match{}}
	byStore := map[*stores.Handle][]zoneInStore{}
	for _, zone := range zonesInStores(running) {
		for _, z := range zone {
			byStore[z.store] = append(byStore[z.store], z)
		}
	}
	for handle, zones := range byStore {
		matchIn(handle, zones, prefix, &found)
	}
	slices.Sort(found.Unlisted)
	slices.SortFunc(found.Clients, func(a, b adminapi.Match) int { return a.Compare(&b) })
	return found, nil
}

// matchIn adds the clients of some zones in a store, which this process knows.
func matchIn(handle *stores.Handle, zones []zoneInStore, prefix string, found *adminapi.Matches) {
	open := handle.EnterOpen()
	if open == nil {
		return
	}
	defer handle.Leave()
	if open.Operable == nil {
		found.Unlisted = append(found.Unlisted, handle.Name)
		return
	}
	reqs, about := aboutAll(zones)
	matches := make([]map[string]adminapi.Match, len(zones))
	remembered := func(i int, r *store.Request) bool { return about(i, r) || r.Events > 0 }
	// It is called with a lock of the store held, so most client keys are passed over by their bytes.
	open.Walk(reqs, remembered, func(i int, clientKey string, st *store.State) {
		if isFull := len(matches[i]) == mostMatches && found.More; isFull || !strings.Contains(clientKey, prefix) {
			return
		}
		c := adminapi.Client(zones[i].ClientOf(clientKey))
		if !slices.ContainsFunc(append(c.Values, c.ClientKey), func(text string) bool { return strings.HasPrefix(text, prefix) }) {
			return
		}
		if matches[i] == nil {
			matches[i] = map[string]adminapi.Match{}
		}
		if _, isKnown := matches[i][clientKey]; !isKnown && len(matches[i]) == mostMatches {
			found.More = true
			return
		}
		matches[i][clientKey] = adminapi.Match{Zone: zones[i].Name, NearClient: adminapi.NearClient{
			Client: c, Store: handle.Name, Limit: st.Limit, Used: st.Used, Reset: limiter.EpochSeconds(st.Reset),
		}}
	})
	for _, of := range matches {
		for _, m := range of {
			found.Clients = append(found.Clients, m)
		}
	}
}
