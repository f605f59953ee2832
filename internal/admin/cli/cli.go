// Package cli is `caddy rate-limit`: commands that ask a running Caddy's admin
// API about its limits, and show the answers to people and scripts.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// API is the admin API of a running Caddy.
type API interface {
	// Call makes one request, whose path has the query in it, and returns the
	// answer whatever its status. An error means that there is none.
	Call(ctx context.Context, method, path string, body []byte) (status int, answer []byte, err error)
}

// Exit codes, beside 0.
const (
	// ExitFailed: Caddy cannot be reached, the usage is wrong, or anything else
	// went wrong.
	ExitFailed = 1
	// ExitRefused: the request that was simulated would be refused.
	ExitRefused = 2
	// ExitUnknown: there is no such zone, store or server.
	ExitUnknown = 3
	// ExitShard: a shard cannot be reached.
	ExitShard = 4
)

// root is where the admin API begins.
const root = "/rate_limit/"

// session is one run of a command.
type session struct {
	api API
	ctx context.Context
	out io.Writer
	// raw is set if the API's answers are printed as they are.
	raw bool
}

// Host is the program that the commands are part of.
type Host struct {
	// Connect returns the API that a command's flags mean.
	Connect func(cmd *cobra.Command) (API, error)
	// Exit returns the error with which cobra's RunE makes the program exit with
	// a code; nil for 0.
	Exit func(cmd *cobra.Command, code int) error
}

// Add adds the commands to cmd.
func Add(cmd *cobra.Command, host Host) {
	flags := cmd.PersistentFlags()
	flags.Bool("json", false, "Print what the admin API answers")
	cmd.AddCommand(statusCommand(host), getCommand(host), resetCommand(host), simulateCommand(host), topCommand(host), uiCommand(host))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("unknown command %q; there is get, reset, simulate, status, top, ui", args[0])
		}
		return cmd.Help()
	}
}

// action does what a command is for, and returns the exit code.
type action = func(s *session, cmd *cobra.Command, args []string) (code int, err error)

// run makes an action what a command runs. It ends when the user or the system
// wants it to.
func (h Host) run(do action) func(cmd *cobra.Command, args []string) error {
	return func(cmd *cobra.Command, args []string) error {
		code, err := h.do(do, cmd, args)
		if err != nil {
			fmt.Fprintln(cmd.ErrOrStderr(), "Error:", err)
			code = codeOf(err)
		}
		cmd.SilenceErrors = true
		return h.Exit(cmd, code)
	}
}

func (h Host) do(do action, cmd *cobra.Command, args []string) (int, error) {
	raw, err := cmd.Flags().GetBool("json")
	if err != nil {
		return 0, err
	}
	api, err := h.Connect(cmd)
	if err != nil {
		return 0, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return do(&session{api: api, ctx: ctx, out: cmd.OutOrStdout(), raw: raw}, cmd, args)
}

// apiError is an answer of the API that is an error.
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
			return ExitUnknown
		case http.StatusBadGateway:
			return ExitShard
		}
	}
	return ExitFailed
}

// call calls the API and reads its answer, which it prints if that is wanted as
// it is.
func (s *session) call(method, path string, body []byte, answer any) error {
	status, text, err := s.api.Call(s.ctx, method, path, body)
	if err != nil {
		return err
	}
	if status >= http.StatusBadRequest {
		var told struct{ Error string }
		if json.Unmarshal(text, &told) != nil || told.Error == "" {
			if status == http.StatusNotFound {
				return errors.New("that Caddy does not know rate_limit: it is another one, see --address, or was built without it")
			}
			told.Error = fmt.Sprintf("status %d: %s", status, strings.TrimSpace(string(text)))
		}
		return &apiError{status, told.Error}
	}
	if s.raw {
		_, err = fmt.Fprintln(s.out, strings.TrimSpace(string(text)))
		if err != nil {
			return err
		}
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("answer of the admin API: %w", err)
	}
	return nil
}

// bucketPath is that of a zone's buckets.
func bucketPath(zone string, query url.Values) string {
	return root + "buckets/" + url.PathEscape(zone) + "?" + query.Encode()
}
