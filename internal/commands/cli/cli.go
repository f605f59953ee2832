// Package cli implements `caddy rate-limit`: commands that call the admin API of a
// running Caddy and print its answers, for people or, with --json, for scripts, and the
// commands check and replay, which need no running Caddy. [Add] adds the commands to a program, which
// is a [Host].
//
// Host provides what the commands need of Caddy.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/signal"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/ui"
)

// API is the admin API of a running Caddy.
type API = ui.API

// Exit codes other than 0.
const (
	exitFailed  = 1
	exitRefused = 2 // the simulated request would be refused
	exitUnknown = 3 // there is no such zone, store, server or block
	exitShard   = 4 // a shard cannot be reached
)

// root is the path of the admin API.
const root = "/rate_limit/"

// session is one run of a command.
type session struct {
	// api is nil if the command calls no running Caddy.
	api API
	ctx context.Context
	out io.Writer
	// raw is set if answers are printed as JSON.
	raw bool
}

// Host is the program that the commands are part of.
type Host struct {
	// Connect returns the API that a command's flags select.
	Connect func(cmd *cobra.Command) (API, error)
	// Check checks the stores of a config until ctx ends, and does not run it. The
	// config is the file or, if that is empty, the one that a command's flags select.
	Check func(ctx context.Context, cmd *cobra.Command, file string) (adminapi.Check, error)
	// Schema returns the JSON schema of configs.
	Schema func() any
	// Replay replays logs through the limits of the config that a command's flags select, and does
	// not run it.
	Replay func(ctx context.Context, cmd *cobra.Command, asked Replayed) (result.Replay, error)
	// Exit returns the error that makes the program exit with a code if a RunE of
	// cobra returns it; nil for 0.
	Exit func(cmd *cobra.Command, code int) error
}

// Add adds the commands to cmd.
func Add(cmd *cobra.Command, host Host) {
	cmd.PersistentFlags().Bool("json", false, "Print JSON: what the admin API answers, or what check or replay found")
	cmd.AddCommand(statusCommand(host), getCommand(host), resetCommand(host), blockCommand(host), unblockCommand(host), grantCommand(host),
		blocksCommand(host), ungrantCommand(host), setCommand(host), unsetCommand(host), rulesCommand(host), auditCommand(host),
		findCommand(host), nearCommand(host), simulateCommand(host), topCommand(host), uiCommand(host), checkCommand(host), schemaCommand(host), replayCommand(host), convertCommand(host))
	explain(cmd)
	host.complete(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			var known []string
			for _, c := range cmd.Commands() {
				known = append(known, c.Name())
			}
			return fmt.Errorf("unknown command %q; there is %s", args[0], strings.Join(known, ", "))
		}
		return cmd.Help()
	}
}

// between accepts from least to most arguments, and otherwise says how the command is used; most is -1
// without a bound.
func between(least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) >= least && (most < 0 || len(args) <= most) {
			return nil
		}
		return fmt.Errorf("%s: write %s; %s --help says more", counted(len(args), "argument"), cmd.UseLine(), cmd.CommandPath())
	}
}

// action carries out a command and returns the exit code.
type action = func(s *session, args []string) (code int, err error)

// run returns the RunE of a command with this action, which calls the API.
func (h Host) run(do action) func(cmd *cobra.Command, args []string) error {
	return h.runWith(h.Connect, do)
}

// runWith returns the RunE of a command with this action and what connects it, or nil.
// An interrupt or a termination ends the session's context.
func (h Host) runWith(connect func(cmd *cobra.Command) (API, error), do action) func(cmd *cobra.Command, args []string) error {
	return func(cmd *cobra.Command, args []string) error {
		code, err := perform(connect, do, cmd, args)
		if err != nil {
			fmt.Fprintln(cmd.ErrOrStderr(), "Error:", err)
			code = codeOf(err)
		}
		cmd.SilenceErrors = true
		return h.Exit(cmd, code)
	}
}

func perform(connect func(cmd *cobra.Command) (API, error), do action, cmd *cobra.Command, args []string) (int, error) {
	raw, err := cmd.Flags().GetBool("json")
	if err != nil {
		return 0, err
	}
	var api API
	if connect != nil {
		if api, err = connect(cmd); err != nil {
			return 0, err
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return do(&session{api: api, ctx: ctx, out: cmd.OutOrStdout(), raw: raw}, args)
}

// apiError is an error that the API answered.
type apiError struct {
	status int
	text   string
}

func (e *apiError) Error() string { return e.text }

func codeOf(err error) int {
	var refusal *apiError
	if errors.As(err, &refusal) {
		switch refusal.status {
		case http.StatusNotFound:
			return exitUnknown
		case http.StatusBadGateway:
			return exitShard
		}
	}
	return exitFailed
}

// call calls the API and decodes the answer. It also prints the answer if the
// session is raw.
func (s *session) call(method, path string, body []byte, answer any) error {
	status, text, err := s.api.Call(s.ctx, method, path, body)
	if err != nil {
		return err
	}
	if status >= http.StatusBadRequest {
		var failure struct{ Error string }
		if json.Unmarshal(text, &failure) != nil || failure.Error == "" {
			if status == http.StatusNotFound {
				return errors.New("that Caddy does not know rate_limit: it is another one, see --address, or was built without it")
			}
			failure.Error = fmt.Sprintf("status %d: %s", status, strings.TrimSpace(string(text)))
		}
		return &apiError{status, failure.Error}
	}
	if s.raw {
		if _, err := fmt.Fprintln(s.out, strings.TrimSpace(string(text))); err != nil {
			return err
		}
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("answer of the admin API: %w", err)
	}
	return nil
}

func uiCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Serves a page that shows the limits at work, to this machine",
		Long: `
Serves a page on a loopback address that shows the zones, the shards and the
clients that are refused most, near their limit or blocked, and finds, resets,
blocks and grants clients. It passes its calls on to the admin API, unix sockets
included, and ends with Ctrl-C.

Whoever can reach the port can do what the page does. It is only for this
machine: other addresses are refused, and so are requests from other sites'
pages.
`,
		Args: between(0, 0),
	}
	address := cmd.Flags().String("listen", "127.0.0.1:2020", "The loopback address to listen on; port 0 is any free one")
	cmd.RunE = host.run(func(s *session, _ []string) (int, error) {
		listener, err := ui.Listen(s.ctx, *address)
		if err != nil {
			return 0, err
		}
		fmt.Fprintf(s.out, "http://%s/\n", listener.Addr())
		return 0, ui.Serve(s.ctx, listener, ui.Handler(s.api, listener.Addr().(*net.TCPAddr)))
	})
	return cmd
}

func schemaCommand(host Host) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "schema",
		Short: "Prints a JSON schema of Caddy configs with rate_limit, for editors",
		Long: `
Prints a JSON schema (draft 2020-12) of Caddy's config in JSON: of the app
rate_limit, its stores, and the handlers rate_limit. An editor that knows it
completes and checks their fields. It accepts all else, and needs no running Caddy.
`,
		Example: "  $ caddy rate-limit schema > rate_limit.schema.json",
		Args:    between(0, 0),
	}
	cmd.RunE = host.runWith(nil, func(s *session, _ []string) (int, error) {
		out := json.NewEncoder(s.out)
		out.SetEscapeHTML(false)
		out.SetIndent("", "  ")
		return 0, out.Encode(host.Schema())
	})
	return cmd
}

// table writes aligned columns.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)}
	t.row(header...)
	return t
}

func (t *table) row(cells ...string) {
	for i := range cells {
		cells[i] = shown(cells[i])
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
}

func (t *table) end() { _ = t.w.Flush() }

// shown makes a text safe for a terminal and a table: clients choose their keys.
func shown(text string) string {
	quoted := strconv.Quote(text)
	if quoted = quoted[1 : len(quoted)-1]; strings.ContainsFunc(text, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return quoted
	}
	return text
}

// plain matches texts that a shell takes as they are.
var plain = regexp.MustCompile(`^[A-Za-z0-9_.:/@%+{}-]+$`)

// sequence matches the braces of which a shell makes several words, such as {1..3}.
var sequence = regexp.MustCompile(`{.*\.\.`)

// quoted returns text, as it is shown, as one argument for a shell: clients choose their
// keys, and operators copy them. An escape that came after the quotes could open them.
func quoted(text string) string {
	text = shown(text)
	if plain.MatchString(text) && !sequence.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// clientText returns what identifies a client, as arguments that the commands accept: the
// template and its values or, without one, the client key. A value that would be taken for
// an option comes after "--". A note follows in parentheses.
func clientText(c *adminapi.Client) string {
	var words []string
	if c.Template != "" {
		words = append(words, quoted(c.Template))
	}
	for _, value := range c.Values {
		words = append(words, quoted(value))
	}
	isOption := func(word string) bool { return strings.HasPrefix(strings.TrimPrefix(word, "'"), "-") }
	if len(words) == 0 {
		words = []string{quoted(c.ClientKey)}
	} else if slices.ContainsFunc(words, isOption) {
		words = slices.Insert(words, 0, "--")
	}
	if c.Note != "" {
		words = append(words, "("+c.Note+")")
	}
	return strings.Join(words, " ")
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

// seconds formats a duration in a few digits; 0 is "".
func seconds(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d <= 0:
		return ""
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(100 * time.Microsecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	default:
		return d.Round(time.Second).String()
	}
}

// until formats the time left until an instant, in seconds since the epoch; "-" if
// there is none.
func until(instant float64, now time.Time) string {
	if instant == 0 {
		return "-"
	}
	left := instant - float64(now.UnixMicro())/1e6
	if left <= 0 {
		return "now"
	}
	return "in " + seconds(left)
}

// ago formats the time since an instant, in seconds since the epoch; "-" if there is none.
func ago(instant float64, now time.Time) string {
	if instant == 0 {
		return "-"
	}
	return max(now.Sub(time.UnixMicro(int64(instant*1e6))), 0).Round(time.Second).String() + " ago"
}
