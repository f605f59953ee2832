package commands

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/admin"
	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/lint"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// checkConfig loads the stores of a config, and checks them and the routes around limiters. Other modules of the config
// may do things when they are provisioned, so it loads none of them.
func checkConfig(ctx context.Context, cmd *cobra.Command, file string) (adminapi.Check, error) {
	flags := caddycmd.Flags{FlagSet: cmd.Flags()}
	if file != "" && flags.String("config") != "" {
		return adminapi.Check{}, errors.New("the config is given twice: as an argument, and as --config")
	}
	text, _, _, err := caddycmd.LoadConfig(cmp.Or(file, flags.String("config")), flags.String("adapter"))
	if err != nil {
		return adminapi.Check{}, err
	}
	if len(text) == 0 {
		return adminapi.Check{}, errors.New("there is no config: name one, such as Caddyfile")
	}
	text = caddy.RemoveMetaFields(text)
	config, err := appWithStores(text)
	if config == nil || err != nil {
		return admin.Check(ctx, nil, nil), err
	}
	// The logs of the config are those of the running Caddy.
	loaded, err := caddy.ProvisionContext(&caddy.Config{
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "WARN"}}}},
	})
	if err != nil {
		return adminapi.Check{}, err
	}
	loaded, unload := caddy.NewContext(loaded)
	defer stores.End(caddy.Log())
	defer unload()
	module, err := loaded.LoadModuleByID(appID, config)
	if err != nil {
		return adminapi.Check{}, err
	}
	if err := module.(app).Missing(); err != nil {
		return adminapi.Check{}, err
	}
	return admin.Check(ctx, module.(app).Stores(), lint.Config(text)), nil
}

// appWithStores returns the JSON of an app rate_limit with all stores of a config, those of single
// handlers included; nil if the config has no rate_limit.
func appWithStores(config []byte) (json.RawMessage, error) {
	var root struct {
		Apps map[string]any `json:"apps"`
	}
	if err := json.Unmarshal(config, &root); err != nil {
		return nil, fmt.Errorf("decode config: %w", err)
	}
	own := map[string]any{}
	isUsed := addOwnStores(own, root.Apps)
	configured, isConfigured := root.Apps[appID].(map[string]any)
	if !isUsed && !isConfigured {
		return nil, nil
	}
	named, _ := configured["stores"].(map[string]any)
	if len(named) == 0 {
		named = map[string]any{stores.DefaultName: map[string]any{"module": "memory"}}
	}
	maps.Copy(named, own)
	return json.Marshal(map[string]any{"stores": named})
}
