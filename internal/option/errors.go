// Package option helps to read options: errors that name an option ([Error]), the
// nearest known name of a misspelt one ([Nearest]), and a [Parser] of blocks of a
// Caddyfile, whose options have a [Setter] each.
//
// It imports Caddy's Caddyfile parser and nothing of this module, so that every
// module of Caddy here can use it.
package option

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Error is an error in one option of the configuration. It lets [Parser.At] find the
// line of the option.
type Error struct {
	option string
	err    error
}

// Errorf returns an [Error] in an option. The text follows the option's name.
func Errorf(option, format string, args ...any) error {
	return &Error{option, fmt.Errorf(format, args...)}
}

// Error implements the interface error.
func (e *Error) Error() string { return e.option + " " + e.err.Error() }

// Unwrap returns what is wrong with the option.
func (e *Error) Unwrap() error { return e.err }

// OneOf returns an error unless a value is known or empty, which means the default.
func OneOf(option, value string, known ...string) error {
	if value == "" || slices.Contains(known, value) {
		return nil
	}
	last := len(known) - 1
	return Errorf(option, "%q: it must be %s or %s", value, strings.Join(known[:last], ", "), known[last])
}

// name matches the names of zones, stores and shards.
var name = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// ValidName reports whether text is fit for the name of a zone, a store or a shard.
func ValidName(text string) bool { return name.MatchString(text) }
