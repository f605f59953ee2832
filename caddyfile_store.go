package shardlimit

import (
	"encoding/json"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// parseGlobalOption parses the rate_limit global option, whose blocks add up:
//
//	rate_limit {
//		store [<name>] <module> { … }
//	}
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	app := App{StoresRaw: caddy.ModuleMap{}}
	if other, ok := existing.(httpcaddyfile.App); ok {
		if err := json.Unmarshal(other.Value, &app); err != nil {
			return nil, fmt.Errorf("read rate_limit: %w", err)
		}
	}
	d.Next()
	if d.NextArg() {
		return nil, d.Err("the global option rate_limit takes a block: rate_limit { … }; the directive belongs into a site")
	}
	for d.NextBlock(0) {
		if d.Val() != "store" {
			return nil, d.Errf("unknown option %s: the global option takes only store; zones and all else belong into the directive rate_limit in a site", d.Val())
		}
		if err := parseStore(d, app.StoresRaw); err != nil {
			return nil, err
		}
	}
	return httpcaddyfile.App{Name: "rate_limit", Value: caddyconfig.JSON(app, nil)}, nil
}

func parseStore(d *caddyfile.Dispenser, stores caddy.ModuleMap) error {
	name := defaultStore
	switch d.CountRemainingArgs() {
	case 1:
	case 2:
		d.NextArg()
		name = d.Val()
	default:
		return d.Err("write store [<name>] memory or store [<name>] redis, then a block")
	}
	d.NextArg()
	if !validName(name) {
		return d.Errf("store name %q: use only letters, digits and the characters _ . -", name)
	}
	if _, ok := stores[name]; ok {
		return d.Errf("store %s is defined twice: give each its own name, as in store <name> %s", name, d.Val())
	}
	module := d.Val()
	if _, err := caddy.GetModule("rate_limit.stores." + module); err != nil {
		return d.Errf("unknown store module %s: write store [<name>] memory or store [<name>] redis; other modules must be built into this Caddy", module)
	}
	unmarshaled, err := caddyfile.UnmarshalModule(d, "rate_limit.stores."+module)
	if err != nil {
		return err
	}
	stores[name] = caddyconfig.JSONModuleObject(unmarshaled, "module", module, nil)
	return nil
}
