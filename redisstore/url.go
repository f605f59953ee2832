package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
)

// onlyShard is the name of the shard of a store that has a URL.
const onlyShard = "default"

var errURLAndShards = option.Errorf("url", "is for a store of one shard: remove it, and give each shard its own")

// server is what a URL says about a primary.
type server struct {
	addr               string
	username, password string
	db                 *int
	isTLS              bool
}

// errURL does not quote the URL, which may have a password.
var errURL = errors.New("it must be redis://[<user>]:<password>@<host>[:<port>][/<db>], or rediss:// for TLS; the user, the password and the number of the database may be left out")

// parseURL parses a URL of which the placeholders are resolved.
func parseURL(text string) (s server, err error) {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return server{}, errURL
	}
	switch u.Scheme {
	case "redis":
	case "rediss":
		s.isTLS = true
	default:
		return server{}, errURL
	}
	if db := strings.TrimPrefix(u.Path, "/"); db != "" {
		n, err := strconv.ParseUint(db, 10, 31)
		if err != nil {
			return server{}, errURL
		}
		number := int(n)
		s.db = &number
	}
	s.addr = net.JoinHostPort(u.Hostname(), orPort(u.Port()))
	s.username = u.User.Username()
	s.password, _ = u.User.Password()
	if !isAddr(s.addr) || s.username != "" && s.password == "" {
		return server{}, errURL
	}
	return s, nil
}

func orPort(port string) string {
	if port == "" {
		return redisPort
	}
	return port
}

// validateURL checks the options of a shard against its URL, as far as that is known
// before its placeholders are resolved.
func (s *Shard) validateURL() error {
	switch {
	case s.URL == "" || s.server != nil:
		return nil
	case s.Username != "":
		return option.Errorf("username", "does not go with url, which has the user in it: remove it")
	case s.Password != "":
		return option.Errorf("password", "does not go with url, which has the password in it: remove it")
	case s.PasswordCommand != nil:
		return option.Errorf("password_command", "does not go with url, which has the password in it: remove it")
	case s.DB != nil:
		return option.Errorf("db", "does not go with url, which ends in the number of the database: remove it")
	case isDynamic(s.URL):
		return nil
	}
	_, err := s.parseURL(s.URL)
	return err
}

// provisionURL derives the primary and the database from the URL.
func (s *Shard) provisionURL(l *loader) error {
	if err := s.validateURL(); err != nil {
		return fmt.Errorf("%s%w", l.place, err)
	}
	if s.URL == "" {
		return nil
	}
	if s.Primary != "" {
		return fmt.Errorf("%s%w", l.place, option.Errorf("primary", "does not go with url, which has the address in it: keep one of them"))
	}
	text, err := reveal(l.repl, s.URL)
	if err != nil {
		s.server = new(server)
		return l.check("url", err)
	}
	if s.server, err = s.parseURL(text); err != nil {
		return fmt.Errorf("%s%w", l.place, err)
	}
	s.Primary, s.DB = s.server.addr, s.server.db
	return nil
}

func (s *Shard) parseURL(text string) (*server, error) {
	parsed, err := parseURL(text)
	switch {
	case err != nil:
		return nil, option.Errorf("url", "is not understood: %w", err)
	case s.TLS != nil && !parsed.isTLS:
		return nil, option.Errorf("tls", "does not go with a url that begins with redis:// : write rediss:// there, or remove tls")
	}
	return &parsed, nil
}

// token returns the token that is the password of the servers, or nil.
func (r reach) token() *token {
	if r.PasswordCommand == nil || r.server != nil && r.server.password != "" {
		return nil
	}
	return &token{command: r.PasswordCommand.Command, lifetime: r.PasswordCommand.lifetime(), timeout: tokenTimeout, now: time.Now}
}

// credentials returns a function that resolves the user and the password of the servers,
// which is t if that is not nil, for each connection; nil if there are none.
func (r reach) credentials(t *token) wire.Credentials {
	if r.Missing != nil {
		return func(context.Context) (username, password string, err error) {
			return "", "", errors.New(strings.Join(r.Missing, "; "))
		}
	}
	if t != nil {
		return func(ctx context.Context) (username, password string, err error) {
			if username, err = reveal(caddy.NewReplacer(), r.Username); err != nil {
				return "", "", fmt.Errorf("username: %w", err)
			}
			password, err = t.get(ctx)
			return username, password, err
		}
	}
	if r.server == nil || r.server.password == "" {
		return credentials(r.Username, r.Password)
	}
	return func(context.Context) (username, password string, err error) {
		text, err := reveal(caddy.NewReplacer(), r.URL)
		if err != nil {
			return "", "", fmt.Errorf("url: %w", err)
		}
		s, err := parseURL(text)
		if err != nil {
			return "", "", fmt.Errorf("url: %w", err)
		}
		return s.username, s.password, nil
	}
}
