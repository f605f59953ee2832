package redisstore

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// missingError says that a config names a variable or a file that this machine lacks. The config may be valid on
// another one, so it is an error only when the config starts.
type missingError struct{ error }

func (e missingError) Unwrap() error { return e.error }

// missingFile returns the error of reading a file, which is a missingError unless the file's content is wrong.
func missingFile(err error) error {
	if errors.As(err, new(*fs.PathError)) {
		return missingError{fmt.Errorf("%w: see that Caddy can read the file", err)}
	}
	return err
}

// loader resolves the variables and files that a config names, and collects missing ones.
type loader struct {
	repl *caddy.Replacer
	// place begins the errors, such as "shard a: ".
	place   string
	missing []string
}

// check returns an error about an option with its place, unless it says that something is missing, which it keeps.
func (l *loader) check(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.As(err, new(missingError)):
		l.missing = append(l.missing, fmt.Sprintf("%s%s: %v", l.place, name, err))
		return nil
	}
	return fmt.Errorf("%s%s: %w", l.place, name, err)
}

// Missing returns an error that names the variables and files of the store's config that this machine lacks, or nil.
func (s *Store) Missing() error {
	if len(s.missing) == 0 {
		return nil
	}
	return errors.New(strings.Join(s.missing, "; "))
}
