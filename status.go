package shardlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// StatusList names HTTP response statuses: codes such as 304, and classes such
// as 4xx. The word none, alone, names no status. In JSON codes may
// be numbers.
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

const statusNone = "none"

// compile returns the set that l names.
func (l StatusList) compile() (set StatusSet, err error) {
	if len(l) == 1 && l[0] == statusNone {
		return set, nil
	}
	if l != nil && len(l) == 0 {
		return set, errors.New("is empty: leave it out, or name statuses")
	}
	for _, text := range l {
		if len(text) == 3 && text[1:] == "xx" && text[0] >= '2' && text[0] <= '5' {
			for i := range 100 {
				set.add(int(text[0]-'0')*100 + i)
			}
			continue
		}
		code, err := strconv.Atoi(text)
		if err != nil || code < 200 || code > 599 {
			return set, fmt.Errorf("%q: it must be a code from 200 to 599 or a class from 2xx to 5xx", text)
		}
		set.add(code)
	}
	return set, nil
}

var _ json.Unmarshaler = (*StatusList)(nil)
