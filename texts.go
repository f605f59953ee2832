package shardlimit

import "encoding/json"

// Texts is a list of texts with placeholders. In JSON a list of one may be
// written as that one.
type Texts []string

// UnmarshalJSON implements [json.Unmarshaler].
func (t *Texts) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		*t = Texts{""}
		return json.Unmarshal(b, &(*t)[0])
	}
	return json.Unmarshal(b, (*[]string)(t))
}

var _ json.Unmarshaler = (*Texts)(nil)
