package shardlimit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// parseDirective parses the rate_limit directive:
//
//	rate_limit [<matcher>] <key> <events> <window> [<name>]
//
//	rate_limit [<matcher>] {
//		store   <name>
//		rollout <store> <percent>
//		zone <name> {
//			match       @<matcher> | { <matchers> }
//			key         <text>...
//			events      <n> | <placeholder> <fallback n>
//			window      <duration>
//			algorithm   fixed_window|sliding_window|sliding_log|gcra|concurrency
//			align
//			burst       <n>
//			cost        <n>|<placeholder>
//			charge      after|before
//			batch       off|auto|<n>
//			batch_share <percent>
//			free_status <code|class>... | none
//			count_status <code|class>...
//			max_wait    <duration>
//			max_wait_queue <n>
//			penalty     <duration>
//			reserve     <percent> @<matcher> | <percent> { <matchers> }
//			ipv4_prefix <bits>
//			ipv6_prefix <bits>
//			on_error    allow|deny|local
//			enforce     <percent>
//		}
//		headers github|ietf|both|none
//		problem
//		log_refusals first|all|none
//		jitter  <ratio>
//		log_key
//	}
//
// It only translates. What is allowed is for the handler and its zones to say;
// they are asked here as well, so that errors come with the line.
func parseDirective(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	handler := new(Handler)
	h.Next()
	start := h.Token()
	p := zoneParser{newParser(h.Dispenser)}
	zones := map[*Zone]caddyfile.Token{}
	oneLine := h.CountRemainingArgs() > 0
	if oneLine {
		z, err := p.oneLineZone()
		if err != nil {
			return nil, err
		}
		handler.Zones, zones[z] = []*Zone{z}, start
	}
	for h.NextBlock(0) {
		if oneLine && h.Val() == "zone" {
			return nil, h.Err("rate_limit has a zone on its line and another in its block: write both as zones in the block")
		}
		if h.Val() == "zone" {
			start := h.Token()
			z, err := parseZone(h)
			if err != nil {
				return nil, err
			}
			handler.Zones = append(handler.Zones, z)
			zones[z] = start
			p.startsAt("zone "+z.Name, start)
			continue
		}
		if err := p.handlerOption(handler); err != nil {
			return nil, err
		}
	}
	if err := handler.validate(); err != nil {
		return nil, p.at(err)
	}
	storeName, _, err := rawStoreName(handler.StoreRaw)
	if err != nil {
		return nil, p.at(err)
	}
	if err := knowsStore(h, "store", storeName); err != nil {
		return nil, p.at(err)
	}
	storeNames := []string{cmp.Or(storeName, defaultStore)}
	if handler.Rollout != nil {
		if err := knowsStore(h, "rollout", handler.Rollout.Store); err != nil {
			return nil, p.at(err)
		}
		storeNames = append(storeNames, handler.Rollout.Store)
	}
	return handler, claimZones(h, storeNames, handler.Zones, zones)
}

// knowsStore refuses the name of a store that the global option does not
// configure, as the app does for a config in JSON.
func knowsStore(h httpcaddyfile.Helper, which, name string) error {
	var app App
	if which, ok := h.Option("rate_limit").(httpcaddyfile.App); ok {
		if err := json.Unmarshal(which.Value, &app); err != nil {
			return fmt.Errorf("read rate_limit: %w", err)
		}
	}
	names := slices.Sorted(maps.Keys(app.StoresRaw))
	if len(names) == 0 {
		names = []string{defaultStore}
	}
	if slices.Contains(names, cmp.Or(name, defaultStore)) {
		return nil
	}
	return unknownStore(which, name, names)
}

// claimZones refuses zones that another directive defines differently, as the
// app does for a config in JSON, where there are no lines to name.
func claimZones(h httpcaddyfile.Helper, storeNames []string, zones []*Zone, starts map[*Zone]caddyfile.Token) error {
	type claim struct{ definition, place string }
	const state = "rate_limit.zones"
	claims, ok := h.State[state].(map[zoneID]claim)
	if !ok {
		claims = map[zoneID]claim{}
		h.State[state] = claims
	}
	for _, z := range zones {
		mine := claim{z.definition(), fmt.Sprintf("%s:%d", starts[z].File, starts[z].Line)}
		for _, store := range storeNames {
			other, taken := claims[zoneID{store, z.Name}]
			if !taken {
				claims[zoneID{store, z.Name}] = mine
			} else if err := sameDefinition(z.Name, other.definition, mine.definition); err != nil {
				return fmt.Errorf("at %s and %s: %w", other.place, mine.place, err)
			}
		}
	}
	return nil
}
