package commands

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

	"github.com/shardlimit/caddy-shardlimit/internal/commands/cli"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

// replayLogs runs the requests of logs through the limits of a config, and does not run the config.
func replayLogs(ctx context.Context, cmd *cobra.Command, asked cli.Replayed) (result.Replay, error) {
	flags := caddycmd.Flags{FlagSet: cmd.Flags()}
	text, _, _, err := caddycmd.LoadConfig(flags.String("config"), flags.String("adapter"))
	if err != nil {
		return result.Replay{}, err
	}
	if len(text) == 0 {
		return result.Replay{}, errors.New("there is no config: name one, such as --config Caddyfile")
	}
	r := replay.Config{
		Server: asked.Server, Host: asked.Host, Logs: asked.Logs, Stdin: cmd.InOrStdin(), Suggest: asked.Suggest,
	}
	if asked.Progress != nil {
		r.Progress = func(p replay.Progress) { asked.Progress(p.Requests, p.Read, p.Total) }
	}
	// A replay makes much garbage, and its memory is bounded.
	defer debug.SetGCPercent(debug.SetGCPercent(replay.GCPercent))
	return ReplayConfig(ctx, caddy.RemoveMetaFields(text), r)
}

// ReplayConfig replays logs through the limits of a config in JSON, and does not run the config.
func ReplayConfig(ctx context.Context, config []byte, r replay.Config) (result.Replay, error) {
	var root struct {
		Apps    map[string]any  `json:"apps"`
		Logging json.RawMessage `json:"logging"`
	}
	if err := json.Unmarshal(config, &root); err != nil {
		return result.Replay{}, fmt.Errorf("decode config: %w", err)
	}
	if root.Apps["http"] == nil {
		return result.Replay{}, errors.New("the config has no HTTP servers")
	}
	inMemory, bounds, err := storesInMemory(root.Apps)
	if err != nil {
		return result.Replay{}, err
	}
	r.MaxNewBuckets, r.Logging = bounds, root.Logging
	if r.HTTP, err = json.Marshal(root.Apps["http"]); err != nil {
		return result.Replay{}, err
	}
	// The logs of the config are those of the running Caddy.
	loaded, err := caddy.ProvisionContext(&caddy.Config{
		AppsRaw: caddy.ModuleMap{appID: inMemory},
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "WARN"}}}},
	})
	if err != nil {
		return result.Replay{}, err
	}
	defer stores.End(caddy.Log())
	if module, err := loaded.App(appID); err == nil {
		// Only the contexts of running configs end.
		defer func() { _ = module.(app).Cleanup() }()
	}
	loaded, unload := caddy.NewContext(loaded)
	defer unload()
	return replay.Run(ctx, loaded, r)
}

// storesInMemory puts stores in memory in place of all stores of a config, those of single handlers
// included, and returns their app, and their bounds on new buckets by name. So no server is called,
// and no secret is needed.
func storesInMemory(apps map[string]any) (inMemory json.RawMessage, bounds map[string]int, err error) {
	own := map[string]any{}
	addOwnStores(own, apps)
	configured, _ := apps[appID].(map[string]any)
	named, _ := configured["stores"].(map[string]any)
	if len(named) == 0 {
		named = map[string]any{stores.DefaultName: map[string]any{}}
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
	inMemory, err = json.Marshal(map[string]any{"stores": memory})
	return inMemory, bounds, err
}
