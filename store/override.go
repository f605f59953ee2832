package store

// Override is what an operator has changed for one client in one zone, until an instant.
type Override struct {
	// Kind is OverrideBlock or OverrideGrant.
	Kind OverrideKind `json:"kind"`
	Zone string       `json:"zone"`
	// ClientKey identifies the client. What [Operable.Overrides] returns may have the
	// form of [Operable.KeptKey].
	ClientKey string `json:"client_key"`
	// Since and Until are when it began and when it ends, in microseconds since the
	// epoch.
	Since int64 `json:"since"`
	Until int64 `json:"until"`
	// Events is how many more events a grant admits.
	Events int64 `json:"events,omitempty"`
	// Reason is the operator's, and By the address from which it was asked for.
	Reason string `json:"reason,omitempty"`
	By     string `json:"by,omitempty"`
}

// ID returns what identifies o.
func (o *Override) ID() OverrideID { return OverrideID{o.Kind, o.Zone, o.ClientKey} }

// OverrideID identifies an [Override]: there is one of each at most.
type OverrideID struct {
	Kind            OverrideKind
	Zone, ClientKey string
}

// OverrideKind says what an [Override] does.
type OverrideKind string

// The kinds of overrides.
const (
	// OverrideBlock refuses all requests of the client.
	OverrideBlock OverrideKind = "block"
	// OverrideGrant admits more events.
	OverrideGrant OverrideKind = "grant"
)

// MaxOverrides is how many overrides a store, or a shard of it, keeps at the same time.
const MaxOverrides = 1000
