package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
)

// Replayed says which logs are replayed.
type Replayed struct {
	// Logs are files; "-" is the command's input.
	Logs         []string
	Server, Host string
	// Suggest is the share of clients that suggested limits may refuse; negative for no suggestions.
	Suggest float64
	// Progress is nil if nobody watches. The bytes in total are 0 if that is not known.
	Progress func(requests, read, total int64)
}

func replayCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "replay <log>...",
		Short: "Shows what the limits of a config would have done with the requests of access logs",
		Long: `
Runs the requests of access logs through the limits of a config, by the clock of
the logs and with counts in memory, and shows for each zone which share of the
requests and of the clients it refuses, whom, and when. It calls no server, runs
no other handler, and needs no running Caddy. Logs are Caddy's, in JSON, or in
the combined format of Apache and nginx, plain or gzip; - is standard input. The
config is that of --config, or the Caddyfile in this folder.

With --suggest it shows the least limits that refuse at most a share of the
clients, such as 0.1%, for several windows. What a log lacks is named, and zones
that need it are left out.
`,
		Example: "  $ caddy rate-limit replay --config Caddyfile --suggest 0.1% --report report.html access.log*",
		Args:    between(1, -1),
	}
	var asked Replayed
	cmd.Flags().StringVar(&asked.Server, "server", "", "The server of the logs, if several have a rate_limit")
	cmd.Flags().StringVar(&asked.Host, "host", "", "The host of requests in logs that have none")
	suggest := cmd.Flags().String("suggest", "", "Suggest limits that ever refuse at most this share of the clients, such as 0.1%")
	report := cmd.Flags().String("report", "", "Write a report to this file, .html or .svg")
	cmd.RunE = host.runWith(nil, func(s *session, args []string) (int, error) {
		var err error
		asked.Logs = args
		if asked.Suggest, err = shareOf(*suggest); err != nil {
			return 0, err
		}
		if kind := filepath.Ext(*report); *report != "" && kind != ".html" && kind != ".svg" {
			return 0, fmt.Errorf("--report %s: it must end with .html or .svg", *report)
		}
		if _, err := os.Stat(filepath.Dir(*report)); err != nil {
			return 0, fmt.Errorf("--report %s: %w", *report, err)
		}
		var p progress
		if p.to = cmd.ErrOrStderr(); isTerminal(p.to) {
			asked.Progress = p.show
		}
		r, err := host.Replay(s.ctx, cmd, asked)
		p.end()
		if r.Requests == 0 {
			return 0, err
		}
		// Shown first, so that no failure of the report costs the result.
		err = errors.Join(err, s.showReplay(&r, *suggest))
		if *report != "" {
			err = errors.Join(err, writeReport(*report, &r))
		}
		return 0, err
	})
	return cmd
}

// shareOf returns the share that a text such as 0.1% means, as the nearest float64; -1 for none.
func shareOf(text string) (float64, error) {
	if text == "" {
		return -1, nil
	}
	number, isPercent := strings.CutSuffix(text, "%")
	share, err := strconv.ParseFloat(number+"e-2", 64)
	if !isPercent || err != nil || share < 0 || share > 1 {
		return 0, fmt.Errorf("--suggest %s: it must be from 0%% to 100%%, such as 0.1%%", text)
	}
	return share, nil
}

// progress is shown on a terminal, in one line.
type progress struct {
	to      io.Writer
	isShown bool
}

func (p *progress) show(requests, read, total int64) {
	p.isShown = true
	text := humanize.Comma(requests) + " requests, " + humanize.Bytes(uint64(read))
	if total > 0 {
		text += fmt.Sprintf(", %d%%", min(100*read/total, 100))
	}
	fmt.Fprint(p.to, "\r\x1b[K"+text)
}

func (p *progress) end() {
	if p.isShown {
		fmt.Fprint(p.to, "\r\x1b[K")
	}
}

func (s *session) showReplay(r *result.Replay, suggest string) error {
	if s.raw {
		out := json.NewEncoder(s.out)
		out.SetEscapeHTML(false)
		out.SetIndent("", "  ")
		return out.Encode(r)
	}
	fmt.Fprintf(s.out, "%s, %s to %s: %s refused\n\n", counted(int(r.Requests), "request"), instantOf(r.From), instantOf(r.To), percent(r.Refused, r.Requests))
	t := newTable(s.out, "ZONE", "ALGORITHM", "EVENTS", "WINDOW", "REQUESTS", "REFUSED", "WOULD REFUSE", "CLIENTS", "CLIENTS REFUSED", "CLIENTS WOULD REFUSE")
	for i := range r.Zones {
		z := &r.Zones[i]
		t.row(z.Name, z.Algorithm, z.Events, windowOf(z.Window, z.Calendar), number(z.Requests), percent(z.Refused, z.Requests),
			percent(z.WouldRefuse, z.Requests), number(z.Clients), percent(z.ClientsRefused, z.Clients), percent(z.ClientsWouldRefuse, z.Clients))
	}
	t.end()
	s.showTopClients(r)
	s.showHours(r)
	s.showSuggestions(r, suggest)
	for _, z := range r.LeftOut {
		fmt.Fprintf(s.out, "\nzone %s is left out: %s\n", shown(z.Zone), shown(z.Reason))
	}
	for i, note := range r.Notes {
		if i == 0 {
			fmt.Fprintln(s.out)
		}
		fmt.Fprintln(s.out, "note:", shown(note))
	}
	return nil
}

func (s *session) showTopClients(r *result.Replay) {
	isAny := func(z result.Zone) bool { return len(z.Top) > 0 }
	if !slices.ContainsFunc(r.Zones, isAny) {
		return
	}
	fmt.Fprintln(s.out)
	t := newTable(s.out, "ZONE", "REFUSED", "WOULD REFUSE", "REQUESTS", "CLIENT")
	for i := range r.Zones {
		for _, c := range r.Zones[i].Top {
			t.row(r.Zones[i].Name, number(c.Refused), number(c.WouldRefuse), number(c.Requests), clientText(&c.Client))
		}
	}
	t.end()
}

// mostHours is how many hours of a zone the text shows.
const mostHours = 24

func (s *session) showHours(r *result.Replay) {
	if !slices.ContainsFunc(r.Zones, func(z result.Zone) bool { return z.ClientsRefused+z.ClientsWouldRefuse > 0 }) {
		return
	}
	fmt.Fprintln(s.out)
	t := newTable(s.out, "ZONE", "HOUR", "REFUSED", "WOULD REFUSE", "REQUESTS")
	for i := range r.Zones {
		for _, h := range worstHours(r.Zones[i].Hours) {
			t.row(r.Zones[i].Name, instantOf(float64(h.Start)), percent(h.Refused, h.Requests), percent(h.WouldRefuse, h.Requests), number(h.Requests))
		}
	}
	t.end()
}

// worstHours returns the hours with most refusals, those that would have been included, in the order of time.
func worstHours(hours []result.Hour) []result.Hour {
	refusals := func(h result.Hour) int64 { return h.Refused + h.WouldRefuse }
	worst := slices.DeleteFunc(slices.Clone(hours), func(h result.Hour) bool { return refusals(h) == 0 })
	slices.SortStableFunc(worst, func(a, b result.Hour) int { return cmp.Compare(refusals(b), refusals(a)) })
	worst = worst[:min(len(worst), mostHours)]
	slices.SortFunc(worst, func(a, b result.Hour) int { return cmp.Compare(a.Start, b.Start) })
	return worst
}

func (s *session) showSuggestions(r *result.Replay, suggest string) {
	if suggest == "" {
		return
	}
	fmt.Fprintf(s.out, "\nlimits that refuse at most %s of the clients, each zone alone:\n", suggest)
	t := newTable(s.out, "ZONE", "WINDOW", "EVENTS", "CLIENTS REFUSED", "BUSIEST CLIENT", "HOW EXACT")
	for i := range r.Zones {
		for _, a := range r.Zones[i].Suggestions {
			window := windowOf(a.Window, a.Calendar)
			if a.IsOwn {
				window += " (its own)"
			}
			busiest := "-"
			if a.Most > 0 {
				busiest = number(a.Most)
			}
			t.row(r.Zones[i].Name, window, number(a.Events), percent(a.Refused, a.Clients), busiest, a.How)
		}
	}
	t.end()
}

// percent returns n and its share of all.
func percent(n, all int64) string {
	if n == 0 || all == 0 {
		return number(n)
	}
	return fmt.Sprintf("%d (%s%%)", n, strconv.FormatFloat(100*float64(n)/float64(all), 'g', 3, 64))
}

func instantOf(seconds float64) string {
	return time.UnixMicro(int64(seconds * 1e6)).UTC().Format("2006-01-02 15:04Z")
}

func windowOf(window float64, calendar string) string {
	return cmp.Or(calendar, cmp.Or(seconds(window), "-"))
}

// writeReport writes a report in the form that the file's name asks for.
func writeReport(file string, r *result.Replay) error {
	text := reportSVG(r)
	if filepath.Ext(file) == ".html" {
		text = reportHTML(r, text)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil { //nolint:gosec // a report is for others
		return errors.Join(errors.New("write the report"), err)
	}
	return nil
}
