// Package result has the result of a replay, which commands print as text, HTML and JSON.
package result

import "github.com/shardlimit/caddy-shardlimit/internal/adminapi"

// Replay is what the zones of a config would have done with the requests of logs.
type Replay struct {
	// From and To are the first and the last arrival, in seconds since the epoch.
	From float64 `json:"from"`
	To   float64 `json:"to"`
	// Requests are those of the logs, and Lines all entries.
	Lines    int64 `json:"lines"`
	Requests int64 `json:"requests"`
	// Refused are the requests that no handler would have seen, and RefusedBefore those that a
	// limit had refused when they were logged.
	Refused       int64  `json:"refused"`
	RefusedBefore int64  `json:"refused_before"`
	Zones         []Zone `json:"zones"`
	// LeftOut are zones that logs cannot decide about.
	LeftOut []LeftOut `json:"left_out"`
	// Notes are what the replay does not follow, or has dropped.
	Notes []string `json:"notes"`
}

// Zone is what a zone would have done.
type Zone struct {
	Name      string  `json:"name"`
	Store     string  `json:"store"`
	Algorithm string  `json:"algorithm"`
	Events    string  `json:"events"`
	Window    float64 `json:"window"`
	Calendar  string  `json:"calendar,omitempty"`
	// Requests are those that the zone counts. Refused are those that it refuses, and WouldRefuse
	// those that it would refuse if it enforced its limit for their clients.
	Requests    int64 `json:"requests"`
	Refused     int64 `json:"refused"`
	WouldRefuse int64 `json:"would_refuse"`
	// Clients are its clients, ClientsRefused those of which a request was refused, and
	// ClientsWouldRefuse those of the others of which one would have been.
	Clients            int64 `json:"clients"`
	ClientsRefused     int64 `json:"clients_refused"`
	ClientsWouldRefuse int64 `json:"clients_would_refuse"`
	// Top are the clients that are, or would be, refused most, and Hours when.
	Top   []Client `json:"top"`
	Hours []Hour   `json:"hours"`
	// Suggestions are by window.
	Suggestions []Suggestion `json:"suggestions,omitempty"`
}

// LeftOut is a zone that logs cannot decide about.
type LeftOut struct {
	Zone   string `json:"zone"`
	Reason string `json:"reason"`
}

// Client is a client of a zone.
type Client struct {
	adminapi.Client
	Requests    int64 `json:"requests"`
	Refused     int64 `json:"refused"`
	WouldRefuse int64 `json:"would_refuse"`
}

// Hour is what a zone would have done in an hour, which begins at an instant in seconds since
// the epoch.
type Hour struct {
	Start       int64 `json:"start"`
	Requests    int64 `json:"requests"`
	Refused     int64 `json:"refused"`
	WouldRefuse int64 `json:"would_refuse"`
}

// Suggestion is the least limit that refuses at most a share of the clients.
type Suggestion struct {
	Window   float64 `json:"window"`
	Calendar string  `json:"calendar,omitempty"`
	Events   int64   `json:"events"`
	// Clients are those by which it was found, and Refused those of them that it ever refuses.
	Clients int64 `json:"clients"`
	Refused int64 `json:"refused"`
	// Most is what the busiest client needs.
	Most int64 `json:"most"`
	// How says how exact it is.
	How string `json:"how"`
	// IsOwn is set if the window is the zone's own.
	IsOwn bool `json:"own"`
}
