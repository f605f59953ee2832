package cli

import (
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/admin/ui"
)

func uiCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Serves a page that shows the limits at work, to this machine",
		Long: `
Serves a page on a loopback address that shows the zones, the shards and the
clients that are refused most, and looks up and resets buckets. It passes its
calls on to the admin API, unix sockets included, and ends with Ctrl-C.

Whoever can reach the port can do what the page does. It is only for this
machine: other addresses are refused, and so are requests from other sites'
pages.
`,
		Args: cobra.NoArgs,
	}
	cmd.Flags().String("listen", "127.0.0.1:2020", "The loopback address to listen on; port 0 is any free one")
	cmd.RunE = host.run(func(s *session, cmd *cobra.Command, _ []string) (int, error) {
		address, err := cmd.Flags().GetString("listen")
		if err != nil {
			return 0, err
		}
		listener, err := ui.Listen(s.ctx, address)
		if err != nil {
			return 0, err
		}
		fmt.Fprintf(s.out, "http://%s/\n", listener.Addr())
		return 0, ui.Serve(s.ctx, listener, ui.Handler(s.api, listener.Addr().(*net.TCPAddr)))
	})
	return cmd
}
