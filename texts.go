package shardlimit

import (
	"encoding/json"
	"fmt"
)

// Texts is a list of texts with placeholders. In JSON a list of one may be
// written as that one.
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

var _ json.Unmarshaler = (*Texts)(nil)
