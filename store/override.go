package store

import (
	"errors"
	"fmt"
)

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

// ErrDamaged is the error of an override that the store keeps, and that cannot be read.
var ErrDamaged = errors.New("damaged")

// Check returns an error, which wraps ErrDamaged, unless o can have been set: what a store keeps may be damaged.
func (o *Override) Check() error {
	switch {
	case o.Zone == "" || o.ClientKey == "" || o.Until <= o.Since:
	case o.Kind == OverrideBlock:
		return nil
	case o.Kind == OverrideGrant && o.Events >= 1 && o.Events <= MaxEvents:
		return nil
	}
	return fmt.Errorf("%w: the override %.100q of client %.100q in zone %.100q, from %d to %d with %d events, is none that can be set", ErrDamaged, o.Kind, o.ClientKey, o.Zone, o.Since, o.Until, o.Events)
}

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
