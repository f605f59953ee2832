package main

import (
	"context"
	"os/exec"
	"runtime"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/bench/libraries"
	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/machine"
)

// versions are those of the limiter, if it is known, of what it runs in and with,
// and of those that it is compared with.
func versions(ctx context.Context) (texts []string, err error) {
	root, err := caddyproc.Root()
	if err != nil {
		return nil, err
	}
	caddy, err := caddyproc.Version()
	if err != nil {
		return nil, err
	}
	if name := commit(ctx, root); name != "" {
		texts = append(texts, "caddy-shardlimit "+name)
	}
	texts = append(texts, runtime.Version(), "Caddy "+caddy, machine.Redis(), machine.Wrk())
	return append(texts, libraries.Versions()...), nil
}

// commit is the name of the commit of the repository in a folder, and whether the
// files differ from it; empty if there is none. A repository around the folder
// says nothing of it.
func commit(ctx context.Context, folder string) string {
	git := func(args ...string) (string, error) {
		// Without locks it is in nobody's way.
		out, err := exec.CommandContext(ctx, "git", append([]string{"--no-optional-locks", "-C", folder}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	if prefix, err := git("rev-parse", "--show-prefix"); err != nil || prefix != "" {
		return ""
	}
	name, err := git("describe", "--tags", "--always")
	if err != nil {
		return ""
	}
	changes, err := git("status", "--porcelain")
	if err != nil {
		return ""
	}
	if changes != "" {
		name += " and changes"
	}
	return name
}
