package shardlimit

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Amount is a whole number, or a text with placeholders that yields one for
// each request. In JSON it is a number or a string.
type Amount string

// number returns the amount if it is the same for every request.
func (a Amount) number() (int64, error) {
	n, err := strconv.ParseInt(string(a), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q: it must be a whole number", string(a))
	}
	return n, nil
}

// quantity returns what the amount is for requests; number is for those to which
// its text yields none.
func (a Amount) quantity(number int64) Quantity {
	if a.isDynamic() {
		return Quantity{Text: string(a), Number: number}
	}
	number, _ = a.number()
	return Quantity{Number: number}
}

// canonical writes the same number always alike.
func (a Amount) canonical() string {
	if n, err := a.number(); err == nil {
		return strconv.FormatInt(n, 10)
	}
	return string(a)
}

// isDynamic tells whether the amount depends on the request.
func (a Amount) isDynamic() bool { return strings.Contains(string(a), "{") }

// hasPlaceholder tells whether some placeholder is in the amount, and none
// without a name.
func (a Amount) hasPlaceholder() bool {
	names := placeholdersIn(string(a))
	return len(names) > 0 && !slices.Contains(names, "")
}

// UnmarshalJSON implements [json.Unmarshaler].
func (a *Amount) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		return json.Unmarshal(b, (*string)(a))
	}
	if len(b) == 0 || b[0] != '-' && (b[0] < '0' || b[0] > '9') {
		return fmt.Errorf("%s: it must be a whole number, or a text with a placeholder", b)
	}
	*a = Amount(b)
	return nil
}

// MarshalJSON implements [json.Marshaler].
func (a Amount) MarshalJSON() ([]byte, error) {
	if n, err := a.number(); err == nil {
		return strconv.AppendInt(nil, n, 10), nil
	}
	return json.Marshal(string(a))
}

// Interface guards.
var (
	_ json.Unmarshaler = (*Amount)(nil)
	_ json.Marshaler   = Amount("")
)
