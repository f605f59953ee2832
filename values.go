package shardlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/store"
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

// rate matches what other programs call a rate, such as 10r/m or 5/second.
var rate = regexp.MustCompile(`^(\d+) ?(?:r|req|requests)?/(s|m|h|d)(?:ec|econd|in|inute|our|r|ay)?$`)

// rateIn returns the events and the window of a rate.
func rateIn(text string) (events, window string, ok bool) {
	if parts := rate.FindStringSubmatch(text); parts != nil {
		return parts[1], "1" + parts[2], true
	}
	return "", "", false
}

// quantity returns the amount for requests. number counts for a request for which
// the text yields none.
func (a Amount) quantity(number int64) limiter.Quantity {
	if a.isDynamic() {
		return limiter.Quantity{Text: string(a), Number: number}
	}
	number, _ = a.number()
	return limiter.Quantity{Number: number}
}

// canonical returns one text for each number, however it is written.
func (a Amount) canonical() string {
	if n, err := a.number(); err == nil {
		return strconv.FormatInt(n, 10)
	}
	return string(a)
}

// line returns the amount and its fallback, 0 for none, as a line has them.
func (a Amount) line(fallback int64) string {
	if fallback == 0 {
		return a.canonical()
	}
	return a.canonical() + " " + strconv.FormatInt(fallback, 10)
}

// isDynamic reports whether the amount depends on the request.
func (a Amount) isDynamic() bool { return strings.Contains(string(a), "{") }

// hasPlaceholder reports whether the amount has a placeholder, and none without a
// name.
func (a Amount) hasPlaceholder() bool {
	names := limiter.PlaceholdersIn(string(a))
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

// Texts is a list of texts with placeholders. In JSON a list of one text may be that
// text.
type Texts []string

// UnmarshalJSON implements [json.Unmarshaler].
func (t *Texts) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		*t = Texts{""}
		return json.Unmarshal(b, &(*t)[0])
	}
	if err := json.Unmarshal(b, (*[]string)(t)); err != nil {
		return fmt.Errorf("%s: it must be a text or a list of texts", b)
	}
	return nil
}

// StatusList names response statuses: codes such as 304, classes such as 4xx, and
// statuses of gRPC, such as grpc:16. In JSON codes may be numbers.
type StatusList []string

// UnmarshalJSON implements [json.Unmarshaler].
func (l *StatusList) UnmarshalJSON(b []byte) error {
	var items []any
	if err := json.Unmarshal(b, &items); err != nil {
		return fmt.Errorf("%s: it must be a list of statuses, such as [304]", b)
	}
	if *l = nil; items == nil {
		return nil
	}
	*l = make(StatusList, 0, len(items))
	for _, item := range items {
		switch v := item.(type) {
		case string:
			*l = append(*l, v)
		case float64:
			*l = append(*l, strconv.FormatFloat(v, 'f', -1, 64))
		default:
			return fmt.Errorf("status %v: it must be a code, such as 304, or a class, such as 5xx", item)
		}
	}
	return nil
}

// grpcPrefix begins the statuses of gRPC.
const grpcPrefix = "grpc:"

func isGRPCStatus(text string) bool { return strings.HasPrefix(text, grpcPrefix) }

// isAll reports whether l is the word for all statuses.
func (l StatusList) isAll() bool { return len(l) == 1 && l[0] == "all" }

// sorted returns the same text for all lists of the same statuses.
func (l StatusList) sorted() string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(l))), " ")
}

// compile returns the set that l names.
func (l StatusList) compile() (set limiter.StatusSet, err error) {
	if l != nil && len(l) == 0 {
		return set, errors.New("is empty: leave it out, or name statuses")
	}
	for _, text := range l {
		if len(text) == 3 && text[1:] == "xx" && text[0] >= '2' && text[0] <= '5' {
			for i := range 100 {
				set.Add(int(text[0]-'0')*100 + i)
			}
			continue
		}
		if isGRPCStatus(text) {
			code, err := strconv.ParseUint(text[len(grpcPrefix):], 10, 8)
			if err != nil || code > 16 {
				return set, fmt.Errorf("%q: a status of gRPC must be a number from 0 to 16, such as grpc:16", text)
			}
			set.Add(limiter.StatusGRPC + int(code))
			continue
		}
		code, err := strconv.Atoi(text)
		if err != nil || code < 200 || code > 599 {
			return set, fmt.Errorf("%q: it must be a code from 200 to 599 or a class from 2xx to 5xx", text)
		}
		set.Add(code)
	}
	return set, nil
}

// Batch is the number of events that are taken from the store at once: `off`,
// `auto` or a whole number. In JSON it is a string or a number.
type Batch string

// parse returns the number of events of a batch, 0 for none, or [store.BatchAuto].
func (b Batch) parse() (int64, error) {
	switch b {
	case "", "off":
		return 0, nil
	case "auto":
		return store.BatchAuto, nil
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil || n < 1 || n > store.MaxInteger {
		return 0, option.Errorf("batch", "%q: it must be off, auto or a whole number from 1 to 2^53-1", string(b))
	}
	return n, nil
}

// UnmarshalJSON implements [json.Unmarshaler].
func (b *Batch) UnmarshalJSON(text []byte) error {
	if err := (*Amount)(b).UnmarshalJSON(text); err != nil {
		return fmt.Errorf("%s: it must be off, auto or a whole number", text)
	}
	return nil
}

// MarshalJSON implements [json.Marshaler].
func (b Batch) MarshalJSON() ([]byte, error) { return Amount(b).MarshalJSON() }
