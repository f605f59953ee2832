package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// simulation is what POST /rate_limit/simulate answers.
type simulation struct {
	Decision, Zone string
	Wait           float64
	Zones          []struct {
		Name, Store                  string
		ClientKey                    string `json:"client_key"`
		Limit, Used, Remaining, Cost int64
		Reset                        float64
		Outcome, Reason, Error       string
	}
	PassedOver []string `json:"passed_over"`
	Error      string
}

func simulateCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "simulate <url>",
		Short: "Tells what would become of a request, and counts nothing",
		Long: `
Tells which zones would count a request, under which client keys, and whether it
would pass. Nothing is counted. The URL is a whole one, or a path if Caddy serves
one site.

It exits with status 0 if the request would pass, and with 2 if it would be
refused.
`,
		Example: "  $ caddy rate-limit simulate https://example.com/api -H 'X-Api-Key: k1' --remote-addr 203.0.113.7",
		Args:    cobra.ExactArgs(1),
	}
	cmd.Flags().StringP("method", "X", http.MethodGet, "The method")
	cmd.Flags().StringArrayP("header", "H", nil, `A header, such as "X-Api-Key: k1"; may be repeated`)
	cmd.Flags().String("remote-addr", "", "The address that the request comes from (default 127.0.0.1)")
	cmd.Flags().String("server", "", "The name of the server in Caddy's config, where that is not clear")
	cmd.RunE = host.run(func(s *session, cmd *cobra.Command, args []string) (int, error) {
		body, err := simulateArgs(cmd, args[0])
		if err != nil {
			return 0, err
		}
		var sim simulation
		if err := s.call(http.MethodPost, root+"simulate", body, &sim); err != nil {
			return 0, err
		}
		if !s.raw {
			sim.show(s)
		}
		if sim.Decision == "refused" || sim.Decision == "error_refused" {
			return ExitRefused, nil
		}
		if sim.Error != "" {
			// It is not known whether it would pass.
			return ExitFailed, nil
		}
		return 0, nil
	})
	return cmd
}

func simulateArgs(cmd *cobra.Command, url string) ([]byte, error) {
	flags := cmd.Flags()
	request := map[string]any{"url": url}
	for flag, field := range map[string]string{"method": "method", "remote-addr": "remote_addr", "server": "server"} {
		value, err := flags.GetString(flag)
		if err != nil {
			return nil, err
		}
		if value != "" {
			request[field] = value
		}
	}
	given, err := flags.GetStringArray("header")
	if err != nil {
		return nil, err
	}
	headers := map[string][]string{}
	for _, h := range given {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			return nil, fmt.Errorf("--header %q: it must be a name and a value, such as \"X-Api-Key: k1\"", h)
		}
		headers[name] = append(headers[name], strings.TrimSpace(value))
	}
	request["headers"] = headers
	return json.Marshal(request)
}

func (sim *simulation) show(s *session) {
	fmt.Fprint(s.out, sim.Decision)
	if sim.Zone != "" {
		fmt.Fprintf(s.out, " by zone %s", shown(sim.Zone))
	}
	if wait := seconds(sim.Wait); wait != "" {
		fmt.Fprintf(s.out, ", wait %s", wait)
	}
	fmt.Fprintln(s.out)
	if len(sim.Zones) == 0 {
		fmt.Fprintln(s.out, "no zone counts the request")
	} else {
		now := time.Now()
		t := newTable(s.out, "ZONE", "STORE", "CLIENT KEY", "LIMIT", "USED", "REMAINING", "COST", "RESET", "OUTCOME", "REASON")
		for _, z := range sim.Zones {
			t.row(z.Name, z.Store, z.ClientKey, number(z.Limit), number(z.Used), number(z.Remaining), number(z.Cost),
				until(z.Reset, now), z.Outcome, or(z.Error, z.Reason))
		}
		t.end()
	}
	if len(sim.PassedOver) > 0 {
		fmt.Fprintf(s.out, "not run, though they may answer or change a request: %s\n", shown(strings.Join(sim.PassedOver, ", ")))
	}
	if sim.Error != "" {
		fmt.Fprintf(s.out, "the request ends with an error: %s\n", shown(sim.Error))
	}
}
