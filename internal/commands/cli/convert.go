package cli

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/envoy"
)

func convertCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "convert envoy <file>...",
		Short: "Converts configs of another limiter to a Caddyfile",
		Long: `
Converts configs of envoyproxy/ratelimit, in YAML, to a Caddyfile with the
handler rate_limit_service, and prints it. What has no counterpart is named in
comments at its top, with its path. Further files may be configs of Envoy, in
YAML or from /config_dump: descriptors by which it reports costs at the end of
a stream get postpaid, or always. It needs no running Caddy.
`,
		Example: "  $ caddy rate-limit convert envoy config.yaml envoy.yaml > Caddyfile",
		Args:    between(2, -1),
	}
	cmd.RunE = host.runWith(nil, func(s *session, args []string) (int, error) {
		if args[0] != "envoy" {
			return 0, fmt.Errorf("convert %s: there is only envoy, for envoyproxy/ratelimit", args[0])
		}
		var files []envoy.File
		for _, name := range args[1:] {
			text, err := os.ReadFile(name)
			if err != nil {
				return 0, err
			}
			files = append(files, envoy.File{Name: filepath.Base(name), Text: text})
		}
		converted, err := envoy.Convert(files...)
		if err != nil {
			return 0, err
		}
		if s.raw {
			return 0, json.NewEncoder(s.out).Encode(converted)
		}
		_, err = fmt.Fprint(s.out, converted.Caddyfile)
		return 0, err
	})
	return cmd
}
