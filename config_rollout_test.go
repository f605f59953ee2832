package shardlimit_test

import (
	"testing"
)

func TestConfigOfRollouts(t *testing.T) {
	const stores = `{"stores": {"default": {"module": "memory"}, "other": {"module": "memory"}, "guest": {"module": "guest", "plain": true}}}`
	for name, test := range map[string]struct{ handler, want string }{
		"fraction":        {handler: withZone(`"rollout": {"store": "other", "percent": 0.01}`)},
		"nobody":          {handler: withZone(`"rollout": {"store": "other", "percent": 0}`)},
		"nobody, unsaid":  {handler: withZone(`"rollout": {"store": "other"}`)},
		"everybody":       {handler: withZone(`"rollout": {"store": "other", "percent": 100}`)},
		"null":            {handler: withZone(`"rollout": null`)},
		"to the default":  {handler: withZone(`"store": "other", "rollout": {"store": "default", "percent": 10}`)},
		"from an own one": {handler: withZone(`"store": {"module": "memory"}, "rollout": {"store": "default", "percent": 10}`)},
		"named zones":     {handler: handlerOf(`"rollout": {"store": "other", "percent": 10}, "rate_limits": {"api": {"key": "static", "window": "1m", "max_events": 10}}`)},

		"without a store":       {withZone(`"rollout": {"percent": 10}`), `rollout names no store: add the one to which clients are moved, such as rollout other 10`},
		"negative":              {withZone(`"rollout": {"store": "other", "percent": -0.01}`), `rollout other -0.01: it must be from 0 to 100 percent, such as 12.5`},
		"too large":             {withZone(`"rollout": {"store": "other", "percent": 100.01}`), `rollout other 100.01: it must be from 0 to 100 percent, such as 12.5`},
		"percent as a text":     {withZone(`"rollout": {"store": "other", "percent": "10"}`), `percent`},
		"unknown store":         {withZone(`"rollout": {"store": "another", "percent": 10}`), `rollout another is not configured: add it to the stores of the global rate_limit, or name another; there is default, guest, other`},
		"own store":             {withZone(`"store": "other", "rollout": {"store": "other", "percent": 10}`), `rollout other: that is the handler's own store: name the store to which clients are moved, or remove rollout`},
		"own store by default":  {withZone(`"rollout": {"store": "default", "percent": 10}`), `rollout default: that is the handler's own store`},
		"a store of its own":    {withZone(`"rollout": {"store": {"module": "memory"}, "percent": 10}`), `store`},
		"unknown field":         {withZone(`"rollout": {"store": "other", "share": 10}`), `unknown field "share"`},
		"text":                  {withZone(`"rollout": "other 10"`), `rollout`},
		"penalty only in one":   {handlerOf(`"rollout": {"store": "guest", "percent": 0}, "zones": [{"name": "api", "key": "static", "events": 10, "window": "1m", "penalty": "1m"}]`), `zone api: penalty does not go with the store guest: remove it`},
		"nobody to the unknown": {withZone(`"rollout": {"store": "another", "percent": 0}`), `rollout another is not configured`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(stores, test.handler), test.want) })
	}
	if n := guests.open.Load(); n != 0 {
		t.Errorf("%d stores are still open", n)
	}
}

// TestConfigOfRolloutsOfOneZone: a zone is defined alike wherever its clients may
// be counted, also while none are.
func TestConfigOfRolloutsOfOneZone(t *testing.T) {
	const stores = `{"stores": {"default": {"module": "memory"}, "other": {"module": "memory"}, "third": {"module": "memory"}}}`
	const twice = `zone api is defined twice, differently: once with key static, events 10, window 1m0s`
	zone := func(events, rest string) string {
		return handlerOf(`"zones": [{"name": "api", "key": "static", "events": ` + events + `, "window": "1m"}], ` + rest)
	}
	for name, test := range map[string]struct{ one, other, want string }{
		"equal in the other store":     {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`10`, `"store": "other"`), ``},
		"different in the other store": {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"store": "other"`), twice},
		"different, but for nobody":    {zone(`10`, `"rollout": {"store": "other", "percent": 0}`), zone(`20`, `"store": "other"`), twice},
		"different in both rollouts":   {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"store": "third", "rollout": {"store": "other", "percent": 5}`), twice},
		"different in the own store":   {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"rollout": {"store": "third", "percent": 5}`), twice},
		"different in a third store":   {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"store": "third"`), ``},
		"crosswise":                    {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`10`, `"store": "other", "rollout": {"store": "default", "percent": 5}`), ``},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(stores, test.one, test.other), test.want) })
	}
}
