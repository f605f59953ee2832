package shardlimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/admin/cli"
	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// replayLogs runs the requests of logs through the limits of a config, and does not run the config.
func replayLogs(ctx context.Context, cmd *cobra.Command, asked cli.Replayed) (adminapi.Replay, error) {
	flags := caddycmd.Flags{FlagSet: cmd.Flags()}
	text, _, _, err := caddycmd.LoadConfig(flags.String("config"), flags.String("adapter"))
	if err != nil {
		return adminapi.Replay{}, err
	}
	if len(text) == 0 {
		return adminapi.Replay{}, errors.New("there is no config: name one, such as --config Caddyfile")
	}
	r := replay.Config{
		Server: asked.Server, Host: asked.Host, Logs: asked.Logs, Stdin: cmd.InOrStdin(), Suggest: asked.Suggest,
	}
	if asked.Progress != nil {
		r.Progress = func(p replay.Progress) { asked.Progress(p.Requests, p.Read, p.Total) }
	}
	// A replay makes much garbage, and its memory is bounded.
	defer debug.SetGCPercent(debug.SetGCPercent(replay.GCPercent))
	return replayConfig(ctx, caddy.RemoveMetaFields(text), r)
}

// replayConfig is replayLogs for a config in JSON.
func replayConfig(ctx context.Context, config []byte, r replay.Config) (adminapi.Replay, error) {
	var root struct {
		Apps    map[string]any  `json:"apps"`
		Logging json.RawMessage `json:"logging"`
	}
	if err := json.Unmarshal(config, &root); err != nil {
		return adminapi.Replay{}, fmt.Errorf("decode config: %w", err)
	}
	if root.Apps["http"] == nil {
		return adminapi.Replay{}, errors.New("the config has no HTTP servers")
	}
	app, bounds, err := storesInMemory(root.Apps)
	if err != nil {
		return adminapi.Replay{}, err
	}
	r.MaxNewBuckets, r.Logging = bounds, root.Logging
	if r.HTTP, err = json.Marshal(root.Apps["http"]); err != nil {
		return adminapi.Replay{}, err
	}
	// The logs of the config are those of the running Caddy.
	loaded, err := caddy.ProvisionContext(&caddy.Config{
		AppsRaw: caddy.ModuleMap{"rate_limit": app},
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "WARN"}}}},
	})
	if err != nil {
		return adminapi.Replay{}, err
	}
	defer stores.End(caddy.Log())
	if module, err := loaded.App("rate_limit"); err == nil {
		// Only the contexts of running configs end.
		defer func() { _ = module.(*App).Cleanup() }()
	}
	loaded, unload := caddy.NewContext(loaded)
	defer unload()
	return replay.Run(ctx, loaded, r)
}

// storesInMemory puts stores in memory in place of all stores of a config, those of single handlers
// included, and returns their app, and their bounds on new buckets by name. So no server is called,
// and no secret is needed.
func storesInMemory(apps map[string]any) (app json.RawMessage, bounds map[string]int, err error) {
	own := map[string]any{}
	addOwnStores(own, apps)
	configured, _ := apps["rate_limit"].(map[string]any)
	named, _ := configured["stores"].(map[string]any)
	if len(named) == 0 {
		named = map[string]any{defaultStore: map[string]any{}}
	}
	all := maps.Clone(named)
	maps.Copy(all, own)
	bounds = map[string]int{}
	memory := map[string]any{}
	for name, s := range all {
		memory[name] = map[string]any{"module": "memory"}
		fields, _ := s.(map[string]any)
		if n, ok := fields["max_new_buckets"].(float64); ok {
			bounds[name] = int(n)
		}
	}
	nameOwnStores(apps)
	app, err = json.Marshal(map[string]any{"stores": memory})
	return app, bounds, err
}

// nameOwnStores makes handlers in a value of JSON name the stores that they have for themselves.
func nameOwnStores(value any) {
	switch value := value.(type) {
	case map[string]any:
		if s, ok := value["store"].(map[string]any); ok && isLimiting(value) {
			// As addOwnStores does.
			text, _ := json.Marshal(s)
			value["store"] = ownStoreName(text)
		}
		for _, child := range value {
			nameOwnStores(child)
		}
	case []any:
		for _, child := range value {
			nameOwnStores(child)
		}
	}
}
