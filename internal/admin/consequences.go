package admin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// mostNamed is how many zones a text names.
const mostNamed = 5

// consequences returns what becomes of requests for which a shard of the store cannot answer, by the
// on_error of the zones that count there: "12.3/s pass unlimited: on_error allow (zone api)". A request may
// pass in several zones, so of these it is the highest rate.
func consequences(running runningConfig, measured *traffic, storeName string) string {
	zones := zonesInStores(running)
	byRule, passed, passing := map[string][]string{}, 0.0, 0
	for _, name := range sortedKeys(zones) {
		for _, z := range zones[name] {
			if z.store.Name != storeName {
				continue
			}
			rule := cmp.Or(z.OnError, z.store.OnError)
			byRule[rule] = append(byRule[rule], name)
			if rate := measured.uncheckedRate(name); rate > 0 && rule == stores.OnErrorAllow {
				passed, passing = max(passed, rate), passing+1
			}
		}
	}
	allowed := "requests pass unlimited"
	switch {
	case passing > 1:
		allowed = fmt.Sprintf("at least %.1f/s pass unlimited", passed)
	case passing > 0:
		allowed = fmt.Sprintf("%.1f/s pass unlimited", passed)
	}
	var all []string
	for _, c := range [][2]string{
		{stores.OnErrorAllow, allowed},
		{stores.OnErrorDeny, "requests are refused with 503"},
		{stores.OnErrorLocal, "this Caddy counts on alone"},
	} {
		if names := byRule[c[0]]; names != nil {
			all = append(all, fmt.Sprintf("%s: on_error %s (%s)", c[1], c[0], zonesText(names)))
		}
	}
	return strings.Join(all, ", ")
}

func zonesText(names []string) string {
	text := "zones "
	if len(names) == 1 {
		text = "zone "
	}
	if more := len(names) - mostNamed; more > 0 {
		return fmt.Sprintf("%s%s and %d more", text, strings.Join(names[:mostNamed], ", "), more)
	}
	return text + strings.Join(names, ", ")
}

// withoutPrimary returns what becomes of requests for which a shard without a primary cannot answer, after
// a separator. Replicas answer checks of windows that are open.
func withoutPrimary(shard *store.ShardFigures, consequences string) string {
	isReplica := func(server store.ServerFigures) bool {
		return server.Role == store.RoleReplica && server.State == store.ServerUp
	}
	if consequences != "" && slices.ContainsFunc(shard.Servers, isReplica) {
		return "; where no replica can answer, " + consequences
	}
	return after(consequences)
}

// after returns consequences, if there are any, after a separator.
func after(consequences string) string {
	if consequences == "" {
		return ""
	}
	return "; " + consequences
}
