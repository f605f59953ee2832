package shardlimit

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// optionError is an error in one option of the configuration, which lets the
// Caddyfile parser name its line.
type optionError struct {
	option string
	err    error
}

func badOption(option, format string, args ...any) error {
	return &optionError{option, fmt.Errorf(format, args...)}
}

// Error implements error.
func (e *optionError) Error() string { return e.option + " " + e.err.Error() }

// Unwrap returns what is wrong with the option.
func (e *optionError) Unwrap() error { return e.err }

// oneOf returns an error unless a value is empty, for the default, or known.
func oneOf(option, value string, known ...string) error {
	if value == "" || slices.Contains(known, value) {
		return nil
	}
	last := len(known) - 1
	return badOption(option, "%q: it must be %s or %s", value, strings.Join(known[:last], ", "), known[last])
}

// name matches the names of zones, stores and shards.
var name = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// validName reports whether text is fit for the name of a zone, a store or a shard.
func validName(text string) bool { return name.MatchString(text) }
