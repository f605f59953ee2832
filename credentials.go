package shardlimit

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// credentials are a user and a password as the config has them, with the
// placeholders that yield them.
type credentials struct{ username, password string }

// provider resolves them for each connection, so that they may change; nil if
// there are none.
func (c credentials) provider() redis.Credentials {
	if c == (credentials{}) {
		return nil
	}
	return func(context.Context) (username, password string, err error) {
		repl := caddy.NewReplacer()
		if username, err = reveal(repl, c.username); err != nil {
			return "", "", fmt.Errorf("username: %w", err)
		}
		if password, err = reveal(repl, c.password); err != nil {
			return "", "", fmt.Errorf("password: %w", err)
		}
		return username, password, nil
	}
}

// source finds a placeholder that says where a secret is, and nothing of it.
var source = regexp.MustCompile(`\{(env|file)\.[^{}]*\}`)

// reveal replaces the placeholders in a secret, all of which have to yield
// something. Its errors do not quote the secret.
func reveal(repl *caddy.Replacer, secret string) (string, error) {
	revealed, err := repl.ReplaceOrErr(secret, true, true)
	switch {
	case err == nil:
		return revealed, nil
	case source.MatchString(err.Error()):
		return "", fmt.Errorf("placeholder %s is empty: set it, or see that Caddy can read the file", source.FindString(err.Error()))
	default:
		return "", errors.New("it has a placeholder that is not known: write {env.*} or {file.*}, or \\{ for a brace that begins no placeholder")
	}
}

// resolve replaces the placeholders in a value that is no secret, all of which
// have to yield something.
func resolve(repl *caddy.Replacer, value *string) error {
	resolved, err := repl.ReplaceOrErr(*value, true, true)
	if err != nil {
		return fmt.Errorf("%w: set it, or write \\{ for a brace that begins no placeholder", err)
	}
	*value = resolved
	return nil
}
