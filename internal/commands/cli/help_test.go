package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// answers is an API that answers each call with a status.
type answers string

func (a answers) Call(ctx context.Context, method, path string, _ []byte) (int, []byte, error) {
	if _, isBounded := ctx.Deadline(); !isBounded || method != http.MethodGet || path != root || a == "" {
		return 0, nil, errors.New("cannot be reached")
	}
	return http.StatusOK, []byte(a), nil
}

// commands are all commands, of a Caddy that answers with a status; "" is one that does not run.
func commands(status string) *cobra.Command {
	program := &cobra.Command{Use: "caddy"}
	cmd := &cobra.Command{Use: "rate-limit <command>", Short: "Shows and steers"}
	program.AddCommand(cmd)
	Add(cmd, Host{Connect: func(*cobra.Command) (API, error) { return answers(status), nil }})
	return program
}

func TestCompletion(t *testing.T) {
	const status = `{"zones": [{"name": "login", "store": "main", "rollout": {"store": "new"}}, {"name": "api", "store": "main"}, {"name": "login", "store": "main"}],
		"stores": [{"name": "new"}, {"name": "main"}]}`
	for line, want := range map[string]string{
		"get |":                    "api login",
		"get l|":                   "login",
		"get x|":                   "",
		"get api |":                "",
		"top |":                    "api login",
		"block |":                  "api login",
		"unblock a|":               "api",
		"grant --reason x |":       "api login",
		"reset --store |":          "main new",
		"reset api --store |":      "main",
		"reset login --store |":    "main new",
		"reset login x --store=n|": "--store=new",
		"status |":                 "",
		"simulate |":               "",
		"check |":                  ":ShellCompDirectiveDefault",
	} {
		for _, answer := range []string{status, "", "{"} {
			program, out := commands(answer), new(bytes.Buffer)
			program.SetOut(out)
			program.SetErr(out)
			words := strings.Split(strings.TrimSuffix(line, "|"), " ")
			program.SetArgs(append([]string{cobra.ShellCompNoDescRequestCmd, "rate-limit"}, words...))
			if err := program.Execute(); err != nil {
				t.Errorf("%s: %v", line, err)
			}
			names, directive, _ := strings.Cut(out.String(), ":")
			got := strings.Join(strings.Fields(names), " ")
			switch {
			case strings.HasPrefix(want, ":"):
				if got != "" || !strings.Contains(directive, want[1:]) {
					t.Errorf("%s is completed with %q, %s", line, got, directive)
				}
			case answer != status && got != "" || answer == status && strings.ReplaceAll(got, "--store=", "") != strings.ReplaceAll(want, "--store=", ""):
				t.Errorf("%s is completed with %q of %q, want %q", line, got, answer, want)
			case !strings.Contains(directive, "ShellCompDirectiveNoFileComp"):
				t.Errorf("%s is completed with files: %s", line, directive)
			}
		}
	}
}

// TestManPagesHaveArguments: on the way through Markdown, <zone> is lost.
func TestManPagesHaveArguments(t *testing.T) {
	for name, want := range map[string]string{
		"": "caddy rate-limit COMMAND [flags]", "get": "caddy rate-limit get ZONE [VALUE...] [flags]", "top": "caddy rate-limit top [ZONE] [flags]",
		"block": "caddy rate-limit block ZONE [VALUE...] DURATION [flags]", "grant": "caddy rate-limit grant ZONE [VALUE...] EVENTS [flags]",
		"simulate": "caddy rate-limit simulate URL [flags]", "check": "caddy rate-limit check [CONFIG] [flags]", "status": "caddy rate-limit status [flags]",
	} {
		cmd, _, err := commands("").Find(append([]string{"rate-limit"}, strings.Fields(name)...))
		if err != nil {
			t.Fatal(err)
		}
		page := new(bytes.Buffer)
		if err := doc.GenMan(cmd, &doc.GenManHeader{Title: "Caddy", Section: "8"}, page); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(page.String(), `\fB`+want+`\fP`) || !strings.Contains(page.String(), document) {
			t.Errorf("the man page of %q lacks %s, or the link:\n%s", name, want, page)
		}
	}
}

// TestHelpLinksToSections: each command has its section, which exists.
func TestHelpLinksToSections(t *testing.T) {
	text, err := os.ReadFile("../../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	existing := map[string]bool{}
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		existing[strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")] = true
	}
	all := commands("").Commands()[0]
	for _, cmd := range append(all.Commands(), all) {
		if section := cmp.Or(sections[cmd.Name()], general); !existing[section] || !strings.HasSuffix(cmd.Long, document+section+"\n") {
			t.Errorf("%s links to section %q: %s", cmd.Name(), section, cmd.Long)
		}
	}
}
