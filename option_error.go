package shardlimit

import "fmt"

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
