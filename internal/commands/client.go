package commands

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/cli"
)

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
	resp, err := c.send(ctx, method, path, body)
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) {
		// At a reload Linux resets connections that wait at the endpoint of the old config. No call does more if it
		// is made twice.
		resp, err = c.send(ctx, method, path, body)
	}
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

func (c *adminClient) send(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.origin+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if !c.isUnix {
		r.Header.Set("Origin", c.origin)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	return c.client.Do(r)
}

var _ cli.API = (*adminClient)(nil)
