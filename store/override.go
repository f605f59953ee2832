package store

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// Override is what operators have changed for one client in a zone, or for the zone, in place of what
// the config says.
type Override struct {
	Kind OverrideKind `json:"kind"`
	Zone string       `json:"zone"`
	// ClientKey identifies the client. What [Operable.Overrides] returns may have the
	// form of [Operable.KeptKey]. It is empty for OverrideZone.
	ClientKey string `json:"client_key"`
	// Since and Until are when it began and when it ends, in microseconds since the
	// epoch; Until may be NoEnd.
	Since int64 `json:"since"`
	Until int64 `json:"until"`
	// Events is how many more events a grant admits, or how many events there are in place of the
	// zone's, which may be Unlimited; 0 leaves them.
	Events int64 `json:"events,omitempty"`
	// Burst comes with Events, where the algorithm has a burst; 0 is that of Events.
	Burst int64 `json:"burst,omitempty"`
	// Enforce and Rollout are percentages of the clients, from 0 to 100; nil leaves what the
	// config says. Rollout has an effect in the first zone of a handler.
	Enforce *float64 `json:"enforce,omitempty"`
	Rollout *float64 `json:"rollout,omitempty"`
	// Reason is the operator's, and By the address from which it was asked for.
	Reason string `json:"reason,omitempty"`
	By     string `json:"by,omitempty"`
	// Version differs between all changes of an ID; it is empty before the override is kept.
	Version string `json:"-"`
}

const (
	// NoEnd is the Until of an override that lasts until it is removed.
	NoEnd = MaxInteger
	// Unlimited are the Events of clients without a limit.
	Unlimited = -1
)

// ID returns what identifies o.
func (o *Override) ID() OverrideID { return OverrideID{o.Kind, o.Zone, o.ClientKey} }

// ErrDamaged is the error of an override that the store keeps, and that cannot be read.
var ErrDamaged = errors.New("damaged")

// Check returns an error, which wraps ErrDamaged, unless o can have been set: what a store keeps may be damaged.
func (o *Override) Check() error {
	if o.Zone != "" && (o.ClientKey == "") == (o.Kind == OverrideZone) && o.Until > o.Since && o.Until <= NoEnd && o.isOfItsKind() {
		return nil
	}
	return fmt.Errorf("%w: the override %.100q of client %.100q in zone %.100q, from %d to %d with %d events, is none that can be set", ErrDamaged, o.Kind, o.ClientKey, o.Zone, o.Since, o.Until, o.Events)
}

func (o *Override) isOfItsKind() bool {
	isLimit := (o.Events == Unlimited || o.Events >= 0 && o.Events <= MaxEvents) && o.Burst >= 0 && o.Burst <= MaxEvents
	switch o.Kind {
	case OverrideBlock:
		return true
	case OverrideGrant:
		return o.Events >= 1 && o.Events <= MaxEvents
	case OverrideLimit:
		return isLimit && o.Events != 0
	case OverrideZone:
		return isLimit && isPercent(o.Enforce) && isPercent(o.Rollout) && (o.Events != 0 || o.Enforce != nil || o.Rollout != nil)
	}
	return false
}

func isPercent(p *float64) bool { return p == nil || !math.IsNaN(*p) && *p >= 0 && *p <= 100 }

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
	// OverrideLimit gives the client a limit of its own.
	OverrideLimit OverrideKind = "limit"
	// OverrideZone changes settings of the zone.
	OverrideZone OverrideKind = "zone"
)

// MaxOverrides is how many overrides a store keeps at the same time, and how many that have ended it
// remembers; MaxAudited, how many changes of them it remembers.
const (
	MaxOverrides = 100_000
	MaxAudited   = 1000
)

// OverrideSet are overrides, as one look has shown them, each for the client as the store knows it
// ([Operable.KeptKey]). It never changes, and is safe for concurrent use.
type OverrideSet struct {
	all map[OverrideID]*Override
	// damaged says why the store keeps something that cannot be read.
	damaged map[OverrideID]error
	// has tells the kinds of which there are any, so that requests look for no other.
	has map[OverrideKind]bool
}

// NewOverrideSet returns a set of those, and of errors, which wrap ErrDamaged, for those that cannot be read.
func NewOverrideSet(all map[OverrideID]*Override, damaged map[OverrideID]error) *OverrideSet {
	s := &OverrideSet{all, damaged, map[OverrideKind]bool{}}
	for id := range all {
		s.has[id.Kind] = true
	}
	return s
}

// Has reports whether there may be any of that kind.
func (s *OverrideSet) Has(kind OverrideKind) bool { return s != nil && s.has[kind] }

// Len returns how many there are. The methods of a nil set are those of an empty one.
func (s *OverrideSet) Len() int {
	if s == nil {
		return 0
	}
	return len(s.all)
}

// Of returns an override that is in force at now, in microseconds since the epoch, or nil. The client
// key is a kept one.
func (s *OverrideSet) Of(id OverrideID, now int64) *Override {
	if !s.Has(id.Kind) {
		return nil
	}
	if o := s.all[id]; o != nil && o.Until > now {
		return o
	}
	return nil
}

// IsDamaged reports whether the store keeps one of that ID that cannot be read, and so holds nowhere.
func (s *OverrideSet) IsDamaged(id OverrideID) bool { return s != nil && s.damaged[id] != nil }

// Damaged returns why some cannot be read, each by an error that wraps ErrDamaged, or nil.
func (s *OverrideSet) Damaged() error {
	if s == nil {
		return nil
	}
	errs := slices.Collect(maps.Values(s.damaged))
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// All calls f with each, in no order, until it returns false.
func (s *OverrideSet) All(f func(o *Override) bool) {
	if s == nil {
		return
	}
	for _, o := range s.all {
		if !f(o) {
			return
		}
	}
}

// OverrideChange sets or removes an override.
type OverrideChange struct {
	Override
	// Removes is set if the override is removed, of which only the ID, By and Reason matter.
	Removes bool
	// Expected is the version of the override that is changed: empty if there is none, or a damaged
	// one, AnyVersion if that does not matter.
	Expected string
}

// AnyVersion as the expected version of a change makes it whatever there is.
const AnyVersion = "*"

// OverrideOutcome is what became of a change.
type OverrideOutcome struct {
	// Before is what it has replaced or removed, or what keeps it from being made; nil if there was
	// nothing. It has only the ID if WasDamaged is set: what was there cannot be read.
	Before     *Override
	WasDamaged bool
	// Version is that of the override that was set.
	Version string
	// Err is ErrChanged if the version is another one than expected, or why the change was not made.
	Err error
	// Warning names the shards that may lack the change, although it was made; nil if all have it.
	Warning error
	// Copies counts the shards and replicas that have the change; zero if the store has no shards.
	Copies Copies
}

// Copies counts the shards that have an override, of all shards, and the replicas that have it, of the replicas of
// these shards.
type Copies struct {
	Shards     int `json:"shards"`
	OfShards   int `json:"of_shards"`
	Replicas   int `json:"replicas"`
	OfReplicas int `json:"of_replicas"`
}

// ErrChanged is the error, possibly wrapped, of a change that expected another version.
var ErrChanged = errors.New("somebody has changed it meanwhile")

// Audited is a change of an override that was made.
type Audited struct {
	// At is when it was made, by the store's clock, in microseconds since the epoch.
	At int64
	// By and Reason are those of the change.
	By, Reason string
	ID         OverrideID
	// Before and After are the override before and after; nil if there was none.
	Before, After *Override
}
