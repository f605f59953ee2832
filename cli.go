package shardlimit

import (
	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/shardlimit/caddy-shardlimit/internal/cli"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "rate-limit",
		Usage: "<command>",
		Short: "Shows and steers the rate limits of a running Caddy",
		Long: `
Shows and steers the rate limits of a running Caddy, through its admin API. The
address of that is --address, or else what the config given by --config says, or
else Caddy's default.

It exits with status 1 if Caddy cannot be reached or the usage is wrong, with 2 if
a request that is simulated would be refused, with 3 if there is no such zone,
store or server, and with 4 if a shard cannot be reached.
`,
		CobraFunc: func(cmd *cobra.Command) {
			flags := cmd.PersistentFlags()
			flags.String("address", "", "The address of Caddy's admin API, if not the default or that of --config")
			flags.StringP("config", "c", "", "Configuration file that tells the address of the admin API")
			flags.StringP("adapter", "a", "", "Name of the config adapter for --config")
			cli.Add(cmd, cli.Host{Connect: connectAdmin, Exit: exitWith})
		},
	})
}

// connectAdmin returns the admin API at the address that a command's flags mean.
func connectAdmin(cmd *cobra.Command) (cli.API, error) {
	flags := caddycmd.Flags{FlagSet: cmd.Flags()}
	address, err := caddycmd.DetermineAdminAPIAddress(flags.String("address"), nil, flags.String("config"), flags.String("adapter"))
	if err != nil {
		return nil, err
	}
	return newAdminClient(address)
}

// exitWith makes Caddy exit with a code, without a word.
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
