package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// stateFaults are those of a server that runs and is reached.
var stateFaults = []*fault{
	{
		name: "primary out of memory (noeviction)", launch: static(2), primary: away,
		bring: lasts(onPrimary("CONFIG", "SET", "maxmemory", 1), onPrimary("CONFIG", "SET", "maxmemory", 0)),
	},
	{
		name: "primary's disk full (MISCONF)", launch: static(2, "--save", "3600 1"), primary: away,
		bring: lasts(obstructDisk, clearDisk),
	},
	{
		name: "CLIENT PAUSE at the primary", launch: static(2), primary: away,
		bring: func(ctx context.Context, s *shard, lasting time.Duration) error {
			// Nobody can end it before it ends by itself.
			if err := onPrimary("CLIENT", "PAUSE", lasting.Milliseconds(), "ALL")(ctx, s); err != nil {
				return err
			}
			return pause(ctx, lasting)
		},
	},
	{
		name: "DEBUG SLEEP at the primary", launch: static(2, "--enable-debug-command", "yes"), primary: away,
		bring: func(ctx context.Context, s *shard, lasting time.Duration) error {
			return onPrimary("DEBUG", "SLEEP", lasting.Seconds())(ctx, s)
		},
	},
	{
		name: "busy script at the primary, then SCRIPT KILL", launch: static(2, "--busy-reply-threshold", "50"), primary: away,
		bring: runBusyScript,
	},
	{
		name: "SCRIPT FLUSH on all servers, again and again", launch: static(2),
		bring: repeats(250*time.Millisecond, func(ctx context.Context, s *shard) error {
			var errs []error
			for _, server := range s.servers {
				errs = append(errs, server.Client().ScriptFlush(ctx).Err())
			}
			return errors.Join(errs...)
		}),
	},
	{
		name: "FLUSHALL", launch: static(2), loses: everything,
		bring: onceInTheMiddle(onPrimary("FLUSHALL")),
	},
	{
		name: "password changed", launch: guarded, checks: away, primary: away,
		bring: lasts(changePassword, func(_ context.Context, s *shard) error { return s.tell(secondPassword) }),
	},
}

// onPrimary is a step that is a command for the primary.
func onPrimary(command ...any) func(context.Context, *shard) error {
	return func(ctx context.Context, s *shard) error {
		if err := s.primary().Client().Do(ctx, command...).Err(); err != nil {
			return fmt.Errorf("%v: %w", command, err)
		}
		return nil
	}
}

// onceInTheMiddle is a fault that is one moment, which requests are looked at
// before and after.
func onceInTheMiddle(step func(context.Context, *shard) error) func(context.Context, *shard, time.Duration) error {
	return lasts(step, func(context.Context, *shard) error { return nil })
}

// snapshotPatience bounds the writing of a snapshot of a few keys.
const snapshotPatience = time.Minute

// obstructDisk makes snapshots fail, after which Redis takes no writes: where the
// file should be, there is a folder.
func obstructDisk(ctx context.Context, s *shard) error {
	file, err := s.snapshotFile(ctx)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(file); err != nil {
		return fmt.Errorf("obstruct the disk: %w", err)
	}
	if err := os.Mkdir(file, 0o700); err != nil {
		return fmt.Errorf("obstruct the disk: %w", err)
	}
	return s.snapshot(ctx, "err")
}

func clearDisk(ctx context.Context, s *shard) error {
	file, err := s.snapshotFile(ctx)
	if err != nil {
		return err
	}
	if err := os.Remove(file); err != nil {
		return fmt.Errorf("clear the disk: %w", err)
	}
	return s.snapshot(ctx, "ok")
}

func (s *shard) snapshotFile(ctx context.Context) (string, error) {
	config, err := s.primary().Client().ConfigGet(ctx, "dir").Result()
	if err != nil {
		return "", fmt.Errorf("find the primary's folder: %w", err)
	}
	return filepath.Join(config["dir"], "dump.rdb"), nil
}

// snapshot makes the primary write one, which shall end like that.
func (s *shard) snapshot(ctx context.Context, want string) error {
	return poll(ctx, snapshotPatience, func() error {
		info, err := s.primary().Info("persistence")
		switch {
		case err != nil:
			return err
		case info["rdb_bgsave_in_progress"] != "0":
			return errors.New("the snapshot is being written")
		case info["rdb_last_bgsave_status"] == want:
			return nil
		}
		// Another child may be at work, as one that rewrites the log.
		_ = s.primary().Client().BgSave(ctx).Err()
		return fmt.Errorf("the snapshot ended as %s, want %s", info["rdb_last_bgsave_status"], want)
	})
}

// runBusyScript runs a script that does not end, and kills it.
func runBusyScript(ctx context.Context, s *shard, lasting time.Duration) error {
	ended := make(chan error, 1)
	go func() { ended <- s.primary().Client().Eval(ctx, "while true do end", nil).Err() }()
	if err := pause(ctx, lasting); err != nil {
		return err
	}
	if err := s.primary().Client().ScriptKill(ctx).Err(); err != nil {
		return fmt.Errorf("kill the script: %w", err)
	}
	if err := <-ended; err == nil {
		return errors.New("the script ended before it was killed")
	}
	return nil
}

const secondPassword = "second"

// changePassword changes it at the primary, which goes on serving connections
// that exist, and ends these.
func changePassword(ctx context.Context, s *shard) error {
	if err := s.allow(ctx, secondPassword); err != nil {
		return err
	}
	return onPrimary("CLIENT", "KILL", "USER", login)(ctx, s)
}
