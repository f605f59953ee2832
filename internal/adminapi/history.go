package adminapi

import (
	"encoding/json"
	"math"
	"strconv"
)

// History is what has happened in zones: GET /rate_limit/history?zone=<zone>&range=<range>.
type History struct {
	// Range is 1h, 24h or 1w, and Step how long a step of it is, in seconds.
	Range string `json:"range"`
	Step  int64  `json:"step"`
	// Start is when the first step begins, in seconds since the epoch.
	Start int64 `json:"start"`
	// Partial is of how many seconds of the last step something is known, if that is not over; 0 if it is.
	Partial int64 `json:"partial,omitempty"`
	// Zones are in alphabetical order.
	Zones []ZoneHistory `json:"zones"`
	// Unanswered are the Caddys that did not answer, if several were asked, and why.
	Unanswered []string `json:"unanswered,omitempty"`
}

// ZoneHistory is the history of a zone. Its series are as long as each other, the oldest step first. The
// first five count requests.
type ZoneHistory struct {
	Zone        string `json:"zone"`
	Allowed     Series `json:"allowed"`
	WouldRefuse Series `json:"would_refuse"`
	// Refused has the requests of blocked clients, and those that on_error refused.
	Refused Series `json:"refused"`
	// Unchecked are those that on_error let pass.
	Unchecked Series `json:"unchecked"`
	// Waited are those that were held by max_wait.
	Waited Series `json:"waited"`
	// StoreCalls are the calls of the zone's stores for which requests of any zone waited, and
	// StoreLatency is their mean duration in seconds. It is unknown where there was none.
	StoreCalls   Series `json:"store_calls"`
	StoreLatency Series `json:"store_latency"`
}

// Series are numbers of which some are unknown: those are NaN, and null in JSON.
type Series []float64

// MarshalJSON implements [json.Marshaler].
func (s Series) MarshalJSON() ([]byte, error) {
	text := []byte{'['}
	for i, n := range s {
		if i > 0 {
			text = append(text, ',')
		}
		if math.IsNaN(n) {
			text = append(text, "null"...)
		} else {
			text = strconv.AppendFloat(text, n, 'g', -1, 64)
		}
	}
	return append(text, ']'), nil
}

// UnmarshalJSON implements [json.Unmarshaler].
func (s *Series) UnmarshalJSON(text []byte) error {
	var numbers []*float64
	if err := json.Unmarshal(text, &numbers); err != nil {
		return err
	}
	*s = make(Series, len(numbers))
	for i, n := range numbers {
		if (*s)[i] = math.NaN(); n != nil {
			(*s)[i] = *n
		}
	}
	return nil
}
