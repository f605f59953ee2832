// Package commands adds `caddy rate-limit` to Caddy: the commands of package cli, with the page, the view
// of several Caddys, the replay of logs and the conversion of Envoy's configs.
//
// The root package imports it for this effect. It cannot import the root, so it reaches the app through
// Caddy's registry of modules.
package commands

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/cli"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/fleet"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "rate-limit",
		Usage: "<command>",
		Short: "Shows and steers the rate limits of a running Caddy",
		Long: `
Shows and steers the rate limits of a running Caddy, through its admin API. The
address of that is --address, or else what the config given by --config says, or
else the environment variable CADDY_ADMIN, or else Caddy's default. The commands
check, replay and schema need no running Caddy.

With several addresses, commands show all those Caddys as one, with the share of
each, and name one that does not answer. A change goes to one Caddy if they count in
the same shards, and to all if each counts in its memory.

It exits with status 1 if Caddy cannot be reached or the usage is wrong, with 2 if
a request that is simulated would be refused, with 3 if there is no such zone,
store or server, and with 4 if a shard cannot be reached that a change, or a list
of changes, is about.
`,
		CobraFunc: func(cmd *cobra.Command) {
			flags := cmd.PersistentFlags()
			flags.StringSlice("address", nil, "The address of Caddy's admin API, if not the default or that of --config; of several Caddys with commas, or repeated")
			flags.StringP("config", "c", "", "Configuration file that names the address of the admin API, or that is checked or replayed")
			flags.StringP("adapter", "a", "", "Name of the config adapter for --config")
			cli.Add(cmd, cli.Host{Connect: connectAdmin, Check: checkConfig, Replay: replayLogs, Schema: schema, Exit: exitWith})
		},
	})
}

// connectAdmin returns the admin API at the address that a command's flags select, or that of all
// Caddys if they select several.
func connectAdmin(cmd *cobra.Command) (cli.API, error) {
	flags := caddycmd.Flags{FlagSet: cmd.Flags()}
	given, err := cmd.Flags().GetStringSlice("address")
	if err != nil {
		return nil, err
	}
	isGiven := cmd.Flags().Changed("address")
	if len(given) == 0 {
		given = []string{""}
	}
	var members []fleet.Member
	for _, one := range given {
		if one = strings.TrimSpace(one); one == "" && isGiven {
			return nil, errors.New("--address: an address is empty; leave out the flag for the default")
		}
		address, err := adminAddress(one, flags.String("config"), flags.String("adapter"))
		if err != nil {
			return nil, err
		}
		// The API has no other scheme, and browsers show it so.
		address = strings.TrimSuffix(strings.TrimPrefix(address, "http://"), "/")
		if slices.ContainsFunc(members, func(m fleet.Member) bool { return m.Address == address }) {
			continue
		}
		client, err := newAdminClient(address)
		if err != nil {
			return nil, err
		}
		members = append(members, fleet.Member{Address: address, Caller: client})
	}
	if len(members) == 1 {
		return members[0].Caller, nil
	}
	return fleet.New(members), nil
}

// adminAddress returns an address of the admin API: the given one, or that of a config, or the default.
func adminAddress(given, file, adapter string) (string, error) {
	if given != "" || file == "" {
		return caddycmd.DetermineAdminAPIAddress(given, nil, "", "")
	}
	text, _, _, err := caddycmd.LoadConfig(file, adapter)
	if err != nil {
		return "", err
	}
	var config struct{ Admin struct{ Disabled bool } }
	if err := json.Unmarshal(text, &config); err != nil {
		return "", fmt.Errorf("decode config: %w", err)
	}
	if config.Admin.Disabled {
		// The default would be another Caddy's.
		return "", fmt.Errorf("the config %s has admin off: its Caddy has no admin API; use --address to ask another Caddy", file)
	}
	return caddycmd.DetermineAdminAPIAddress("", text, file, adapter)
}

// appID is the ID of the app's module.
const appID = "rate_limit"

// app is what commands need of the module rate_limit in Caddy's registry.
type app interface {
	caddy.CleanerUpper
	Stores() []*stores.Handle
	Missing() error
	Schema() any
}

// schema returns the JSON schema of configs.
func schema() any {
	module, err := caddy.GetModule(appID)
	if err != nil {
		panic(err) // the root package, which registers it, imports this one
	}
	return module.New().(app).Schema()
}

// exitWith returns the error that makes Caddy exit with a code and print nothing.
func exitWith(cmd *cobra.Command, code int) error {
	switch code {
	case 0:
		return nil
	case 1:
		return errExit
	default:
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return code, nil })(cmd, nil)
	}
}

// errExit makes Caddy exit with status 1. The reason has been printed.
var errExit = errors.New("exiting with status 1")
