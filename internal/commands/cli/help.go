package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

// document is what operators read about the commands.
const document = "https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/operating.md#"

// sections are those of the document about single commands, and general is that about all.
var sections = map[string]string{
	"block": "block-or-grant", "blocks": "block-or-grant", "check": "check", "get": "find-why-a-client-got-429", "grant": "block-or-grant",
	"reset": "reset-a-client", "simulate": "find-why-a-client-got-429", "status": "status", "top": "see-who-is-refused", "ui": "the-page",
	"find": "clients", "near": "clients", "replay": "replay", "audit": "change-limits-while-running", "rules": "change-limits-while-running", "set": "change-limits-while-running", "unset": "change-limits-while-running", "unblock": "block-or-grant", "ungrant": "block-or-grant",
}

const general = "commands-and-the-admin-api"

// argument is an argument as the commands name it. Man pages are made by way of Markdown, which
// takes it for a tag and drops it.
var argument = regexp.MustCompile(`<[a-z-]+>`)

// explain gives a command, and those below it, arguments in capitals, as in man pages, and the link to its
// document.
func explain(cmd *cobra.Command) {
	cmd.Use = argument.ReplaceAllStringFunc(cmd.Use, func(text string) string { return strings.ToUpper(strings.Trim(text, "<>")) })
	if cmd.Long == "" {
		cmd.Long = cmd.Short + ".\n"
	}
	cmd.Long = strings.TrimRight(cmd.Long, "\n") + "\n\nMore about it: " + document + cmp.Or(sections[cmd.Name()], general) + "\n"
	for _, inner := range cmd.Commands() {
		explain(inner)
	}
}

// completionTimeout bounds how long a shell waits for words.
const completionTimeout = time.Second

// complete gives a command, and those below it, the completion of its arguments: the first is a zone if Use
// says so, the others are what the running config cannot know.
func (h Host) complete(cmd *cobra.Command) {
	for _, inner := range cmd.Commands() {
		h.complete(inner)
	}
	if hasZone := strings.Contains(cmd.Use, " ZONE") || strings.Contains(cmd.Use, " [ZONE"); hasZone {
		cmd.ValidArgsFunction = h.words(func(st *adminapi.Status, args []string) (names []string) {
			if len(args) > 0 {
				return nil
			}
			for _, z := range st.Zones {
				names = append(names, z.Name)
			}
			return names
		})
	} else if !strings.Contains(cmd.Use, "CONFIG") && !strings.Contains(cmd.Use, "FILE") {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	if cmd.Flags().Lookup("store") != nil {
		// It fails for a flag that does not exist, or has a completion.
		_ = cmd.RegisterFlagCompletionFunc("store", h.words(storesOf))
	}
}

// storesOf returns the stores in which the zone among the arguments counts, or all if there is none.
func storesOf(st *adminapi.Status, args []string) (names []string) {
	for _, z := range st.Zones {
		if len(args) > 0 && z.Name == args[0] {
			names = append(names, z.Store)
			if z.Rollout != nil {
				names = append(names, z.Rollout.Store)
			}
		}
	}
	for _, s := range st.Stores {
		if len(args) == 0 {
			names = append(names, s.Name)
		}
	}
	return names
}

// words completes with what the status of the running Caddy says; with nothing if that cannot be reached.
func (h Host) words(of func(st *adminapi.Status, args []string) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		names := of(h.statusWithin(cmd, completionTimeout), args)
		slices.Sort(names)
		return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return !strings.HasPrefix(name, begun) }), cobra.ShellCompDirectiveNoFileComp
	}
}

// statusWithin returns the status of the running Caddy, which is empty if it is not known in time.
func (h Host) statusWithin(cmd *cobra.Command, timeout time.Duration) *adminapi.Status {
	st := new(adminapi.Status)
	api, err := h.Connect(cmd)
	if err != nil {
		return st
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if status, text, err := api.Call(ctx, http.MethodGet, root, nil); err == nil && status == http.StatusOK {
		_ = json.Unmarshal(text, st) // then there is nothing to complete with
	}
	return st
}
