package shardlimit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/shardlimit/caddy-shardlimit/internal/admin"
	"github.com/shardlimit/caddy-shardlimit/internal/admin/cli"
	"github.com/shardlimit/caddy-shardlimit/internal/admin/fleet"
	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "rate-limit",
		Usage: "<command>",
		Short: "Shows and steers the rate limits of a running Caddy",
		Long: `
Shows and steers the rate limits of a running Caddy, through its admin API. The
address of that is --address, or else what the config given by --config says, or
else the environment variable CADDY_ADMIN, or else Caddy's default. The commands
check, replay and schema need no running Caddy.

With several addresses, commands show all those Caddys as one, with the share of
each, and name one that does not answer. A change goes to one Caddy if they count in
the same shards, and to all if each counts in its memory.

It exits with status 1 if Caddy cannot be reached or the usage is wrong, with 2 if
a request that is simulated would be refused, with 3 if there is no such zone,
store or server, and with 4 if a shard cannot be reached that a change, or a list
of changes, is about.
`,
		CobraFunc: func(cmd *cobra.Command) {
			flags := cmd.PersistentFlags()
			flags.StringSlice("address", nil, "The address of Caddy's admin API, if not the default or that of --config; of several Caddys with commas, or repeated")
			flags.StringP("config", "c", "", "Configuration file that names the address of the admin API, or that is checked or replayed")
			flags.StringP("adapter", "a", "", "Name of the config adapter for --config")
			cli.Add(cmd, cli.Host{Connect: connectAdmin, Check: checkConfig, Replay: replayLogs, Schema: func() any { return Schema() }, Exit: exitWith})
		},
	})
}

// connectAdmin returns the admin API at the address that a command's flags select, or that of all
// Caddys if they select several.
func connectAdmin(cmd *cobra.Command) (cli.API, error) {
	flags := caddycmd.Flags{FlagSet: cmd.Flags()}
	given, err := cmd.Flags().GetStringSlice("address")
	if err != nil {
		return nil, err
	}
	isGiven := cmd.Flags().Changed("address")
	if len(given) == 0 {
		given = []string{""}
	}
	var members []fleet.Member
	for _, one := range given {
		if one = strings.TrimSpace(one); one == "" && isGiven {
			return nil, errors.New("--address: an address is empty; leave out the flag for the default")
		}
		address, err := caddycmd.DetermineAdminAPIAddress(one, nil, flags.String("config"), flags.String("adapter"))
		if err != nil {
			return nil, err
		}
		// The API has no other scheme, and browsers show it so.
		address = strings.TrimSuffix(strings.TrimPrefix(address, "http://"), "/")
		if slices.ContainsFunc(members, func(m fleet.Member) bool { return m.Address == address }) {
			continue
		}
		client, err := newAdminClient(address)
		if err != nil {
			return nil, err
		}
		members = append(members, fleet.Member{Address: address, Caller: client})
	}
	if len(members) == 1 {
		return members[0].Caller, nil
	}
	return fleet.New(members), nil
}

// checkConfig loads the stores of a config, and checks them. Other modules of the config
// may do things when they are provisioned, so it loads none of them.
func checkConfig(ctx context.Context, cmd *cobra.Command, file string) (adminapi.Check, error) {
	flags := caddycmd.Flags{FlagSet: cmd.Flags()}
	if file != "" && flags.String("config") != "" {
		return adminapi.Check{}, errors.New("the config is given twice: as an argument, and as --config")
	}
	text, _, _, err := caddycmd.LoadConfig(cmp.Or(file, flags.String("config")), flags.String("adapter"))
	if err != nil {
		return adminapi.Check{}, err
	}
	if len(text) == 0 {
		return adminapi.Check{}, errors.New("there is no config: name one, such as Caddyfile")
	}
	app, err := appWithStores(caddy.RemoveMetaFields(text))
	if app == nil || err != nil {
		return admin.Check(ctx, nil), err
	}
	// The logs of the config are those of the running Caddy.
	loaded, err := caddy.ProvisionContext(&caddy.Config{
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "WARN"}}}},
	})
	if err != nil {
		return adminapi.Check{}, err
	}
	loaded, unload := caddy.NewContext(loaded)
	defer stores.End(caddy.Log())
	defer unload()
	module, err := loaded.LoadModuleByID("rate_limit", app)
	if err != nil {
		return adminapi.Check{}, err
	}
	return admin.Check(ctx, module.(*App).Stores()), nil
}

// appWithStores returns the JSON of an [App] with all stores of a config, those of single
// handlers included; nil if the config has no rate_limit.
func appWithStores(config []byte) (json.RawMessage, error) {
	var root struct {
		Apps map[string]any `json:"apps"`
	}
	if err := json.Unmarshal(config, &root); err != nil {
		return nil, fmt.Errorf("decode config: %w", err)
	}
	own := map[string]any{}
	isUsed := addOwnStores(own, root.Apps)
	app, isConfigured := root.Apps["rate_limit"].(map[string]any)
	if !isUsed && !isConfigured {
		return nil, nil
	}
	named, _ := app["stores"].(map[string]any)
	if len(named) == 0 {
		named = map[string]any{defaultStore: map[string]any{"module": "memory"}}
	}
	maps.Copy(named, own)
	return json.Marshal(map[string]any{"stores": named})
}

// addOwnStores adds the stores that handlers in a value of JSON have for themselves, and
// reports whether there are handlers.
func addOwnStores(own map[string]any, value any) (isUsed bool) {
	switch value := value.(type) {
	case map[string]any:
		if isUsed = isLimiting(value); isUsed {
			if store, ok := value["store"].(map[string]any); ok {
				// Caddy encodes what a handler contains in the same way.
				text, _ := json.Marshal(store)
				own[ownStoreName(text)] = store
			}
		}
		for _, child := range value {
			isUsed = addOwnStores(own, child) || isUsed
		}
	case []any:
		for _, child := range value {
			isUsed = addOwnStores(own, child) || isUsed
		}
	}
	return isUsed
}

// isLimiting reports whether a value of JSON is a handler with limits.
func isLimiting(value map[string]any) bool {
	return value["handler"] == "rate_limit" || value["handler"] == "rate_limit_service"
}

// exitWith returns the error that makes Caddy exit with a code and print nothing.
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

// errExit makes Caddy exit with status 1. The reason has been printed.
var errExit = errors.New("exiting with status 1")

const (
	// adminTimeout bounds a call of the admin API, which itself waits for shards.
	adminTimeout = 30 * time.Second
	// maxAdminAnswer bounds the size of an answer, in bytes.
	maxAdminAnswer = 64 << 20
)

// adminClient calls the admin API of a running Caddy. Unlike Caddy's own
// AdminAPIRequest it leaves no connections behind, because it may be used once a
// second for days, and returns answers that are errors.
type adminClient struct {
	client *http.Client
	origin string
	isUnix bool
	shown  string
}

func newAdminClient(address string) (*adminClient, error) {
	parsed, err := caddy.ParseNetworkAddress(address)
	if err != nil || parsed.PortRangeSize() > 1 || parsed.IsFdNetwork() {
		return nil, fmt.Errorf("admin API address %q cannot be called: %w", address, cmp.Or(err, errors.ErrUnsupported))
	}
	c := &adminClient{origin: "http://" + parsed.JoinHostPort(0), shown: address, isUnix: parsed.IsUnixNetwork()}
	if c.isUnix {
		// Caddy expects this host on unix sockets.
		c.origin = "http://127.0.0.1"
		// The permissions of the socket are not part of its path.
		parsed.Host, _, _ = strings.Cut(parsed.Host, "|")
	}
	c.client = &http.Client{
		Timeout: adminTimeout,
		// The admin API sends no redirects; another server is not to be followed.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, parsed.Network, parsed.JoinHostPort(0))
			},
		},
	}
	return c, nil
}

// Call implements [cli.API].
func (c *adminClient) Call(ctx context.Context, method, path string, body []byte) (int, []byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.origin+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if !c.isUnix {
		r.Header.Set("Origin", c.origin)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.client.Do(r)
	if err != nil {
		hint := ""
		if opErr := new(net.OpError); errors.As(err, &opErr) && opErr.Op == "dial" {
			hint = "; is Caddy running, and is that its admin address? (see --address and --config)"
			if errors.Is(err, os.ErrPermission) {
				hint = "; this user may not use the socket"
			}
		}
		return 0, nil, fmt.Errorf("call Caddy's admin API at %s: %w%s", c.shown, err, hint)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminAnswer))
	if err != nil {
		return 0, nil, fmt.Errorf("read the answer of Caddy's admin API at %s: %w", c.shown, err)
	}
	return resp.StatusCode, answer, nil
}

var _ cli.API = (*adminClient)(nil)
