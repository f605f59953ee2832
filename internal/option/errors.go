// Package option helps to read options: each is a [Row], from which come the line of a
// Caddyfile, the check of its field and its documentation. A [Parser] reads the lines
// of a block, an [Error] names the option that is wrong, and [Nearest] is the known
// name of a misspelt one.
package option

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Error is an error in one option of the configuration. It lets [Parser.At] find the
// line of the option, and [InJSON] the field.
type Error struct {
	option string
	err    error
	// field and problem are what JSON has for option and err.
	field   string
	problem error
}

// Errorf returns an [Error] in an option. The text follows the option's name.
func Errorf(option, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{option, err, option, err}
}

// Field is the error with the field of JSON that is wrong, where that has another name.
func (e *Error) Field(name string) *Error {
	e.field = name
	return e
}

// JSONf is the error with the text that follows the name of the field in JSON, where that
// differs from what a Caddyfile needs.
func (e *Error) JSONf(format string, args ...any) *Error {
	e.problem = fmt.Errorf(format, args...)
	return e
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

// DidYouMean returns the end of an error about an unknown word: the known word that
// was probably meant, or "" if there is none.
func DidYouMean(word string, known []string) string {
	if near := Nearest(word, known); near != "" {
		return ", did you mean " + near + "?"
	}
	return ""
}

// Nearest returns the known word of which word is probably a misspelling or another
// form, and "" if none is near. Case, - and _ make no difference.
func Nearest(word string, known []string) string {
	plain := plainWord(word)
	best, least := "", len(plain)
	for _, candidate := range known {
		if d := Slips(plain, plainWord(candidate)); d < least {
			best, least = candidate, d
		}
	}
	// One slip in three letters: with more of them it is another word.
	if least <= max(len(plain)/3, 1) {
		return best
	}
	if near := only(known, func(candidate string) bool {
		other := plainWord(candidate)
		return len(plain) > 1 && strings.HasPrefix(other, plain) || strings.HasPrefix(plain, other)
	}); near != "" {
		return near
	}
	parts := strings.FieldsFunc(strings.ToLower(word), func(r rune) bool { return r == '_' || r == '-' })
	return only(known, func(candidate string) bool { return slices.Contains(parts, candidate) })
}

// only returns the only word that is wanted, and "" if none is or several are.
func only(words []string, wanted func(string) bool) string {
	words = slices.DeleteFunc(slices.Clone(words), func(word string) bool { return !wanted(word) })
	if len(words) != 1 {
		return ""
	}
	return words[0]
}

func plainWord(word string) string {
	return strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(word))
}

// Slips returns the number of letters to add, leave out, replace, or swap with the
// next one in order to make b of a.
func Slips(a, b string) int {
	// The rows of the table for the last two letters of a and for this one; a
	// column for each length of b's beginning.
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, last, row = last, row, before
		row[0] = i + 1
		for j := range len(b) {
			replaced := last[j]
			if a[i] != b[j] {
				replaced++
			}
			row[j+1] = min(last[j+1]+1, row[j]+1, replaced)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
