package cli

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"
)

// top is what GET /rate_limit/top answers about a zone.
type top struct {
	Zone    string
	Since   float64
	Refused []struct {
		ClientKey string `json:"client_key"`
		Store     string
		Count     int64
	}
}

func topCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top [<zone>]",
		Short: "Shows the clients that were refused most in the last minutes",
		Long: `
Shows the clients that were refused most in the last minutes, in one zone or in
all, and renews that each second until Ctrl-C. Into a file or a pipe, and with
--json, it shows them once; --count says how often.
`,
		Args: cobra.MaximumNArgs(1),
	}
	cmd.Flags().IntP("number", "n", 20, "How many clients of each zone")
	liveFlags(cmd)
	cmd.RunE = host.run(func(s *session, cmd *cobra.Command, args []string) (int, error) {
		l, err := readLive(cmd)
		if err != nil {
			return 0, err
		}
		n, err := cmd.Flags().GetInt("number")
		if err != nil {
			return 0, err
		}
		if l.count == 0 && (s.raw || !isTerminal(s.out)) {
			l.count = 1
		}
		query := url.Values{"n": {strconv.Itoa(n)}}
		if len(args) > 0 {
			query.Set("zone", args[0])
		}
		return 0, l.show(s, func(s *session) error { return showTop(s, query) })
	})
	return cmd
}

func showTop(s *session, query url.Values) error {
	var answer struct {
		top
		Zones []top
	}
	if err := s.call(http.MethodGet, root+"top?"+query.Encode(), nil, &answer); err != nil || s.raw {
		return err
	}
	zones := answer.Zones
	if query.Has("zone") {
		zones = []top{answer.top}
	}
	t := newTable(s.out, "ZONE", "REFUSED", "STORE", "CLIENT KEY")
	covered := 0.0
	for _, z := range zones {
		covered = max(covered, z.Since)
		for _, client := range z.Refused {
			t.row(z.Zone, number(client.Count), client.Store, client.ClientKey)
		}
	}
	t.end()
	_, err := fmt.Fprintf(s.out, "in the last %s\n", or(seconds(covered), "moment"))
	return err
}
