package wire

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// forgetAfter is how long no source has named a server that was only seen until it is no longer expected: else a
	// deployment that has shrunk would lack servers for ever.
	forgetAfter = time.Hour
	// mostMissed is how many answers of a source in a row have to be missing until that is said.
	mostMissed = 3
)

// Source is a sentinel or a node that was given, and its last answer.
type Source struct {
	Addr string
	// IsForeign is set if it leads, or last led, to others than the servers that are followed. Leads is their primary,
	// empty if nothing shows where it leads.
	IsForeign bool
	Leads     string
	// Err is why it did not answer, or nil. IsSilent is set once it has missed several questions in a row.
	Err      error
	missed   int
	IsSilent bool
}

// miss returns the source after a question that had no answer.
func (s Source) miss(err error) Source {
	s.Err, s.missed = err, s.missed+1
	s.IsSilent = s.missed >= mostMissed
	return s
}

// sourceAt returns what is known of a source.
func sourceAt(all []Source, addr string) Source {
	if i := slices.IndexFunc(all, func(s Source) bool { return s.Addr == addr }); i >= 0 {
		return all[i]
	}
	return Source{Addr: addr}
}

// Fault returns what is wrong with a source that leads elsewhere.
func (s *Source) Fault() *Fault {
	if s.Leads == "" {
		return &Fault{
			Problem: "the IDs of its cluster's nodes are missing or differ between two replies, so nothing shows where it leads",
			Remedy:  "give the address of a node in place of a proxy's",
		}
	}
	return &Fault{
		Problem: fmt.Sprintf("it leads to %s, which has nothing in common with the servers that are followed", s.Leads),
		Remedy:  "remove its address from the shard, or make it name the shard's servers",
	}
}

// QuorumFault returns the fault of a shard of which no majority of the sources leads to its servers because some are
// silent, or nil.
func QuorumFault(sources []Source, inCluster bool) error {
	led := 0
	var silent []string
	for _, s := range sources {
		switch {
		case s.IsSilent:
			silent = append(silent, fmt.Sprintf("%s: %s", s.Addr, strings.Join(strings.Fields(s.Err.Error()), " ")))
		case !s.IsForeign:
			led++
		}
	}
	if len(silent) == 0 || 2*led > len(sources) {
		return nil
	}
	kind, consequence := "sentinels", "no replica can take the primary's place"
	if inCluster {
		kind, consequence = "nodes", "a new cluster in its place would not be followed"
	}
	return &Fault{
		Problem: fmt.Sprintf("only %d of the %d given %s lead to its servers, so %s (%s)", led, len(sources), kind, consequence, strings.Join(silent, "; ")),
		Remedy:  "restart the silent ones, or correct the list and reload",
	}
}

// tellSources tells what has changed of the sources since a search before. mu is held.
func (s *Shard) tellSources(was, now []Source) {
	for i := range now {
		source, before := &now[i], sourceAt(was, now[i].Addr)
		switch {
		case source.IsForeign && (!before.IsForeign || source.Leads != before.Leads):
			s.Emit(Event{Kind: Misconfigured, Addr: source.Addr, Err: source.Fault()})
		case !source.IsForeign && before.IsForeign:
			s.Emit(Event{Kind: Mended, Addr: source.Addr, Err: before.Fault()})
		}
		switch {
		case source.IsSilent && !before.IsSilent:
			s.Emit(Event{Kind: ServerDown, Addr: source.Addr, Err: source.Err})
		case !source.IsSilent && before.IsSilent:
			s.Emit(Event{Kind: ServerUp, Addr: source.Addr})
		}
	}
}

// expectation is a server that an accepted answer has named.
type expectation struct {
	// named is when a source named it last.
	named time.Time
	// isAbsent is set while it is not in use: all sources take it for down, or none names it. wasUsed is set once it was.
	isAbsent, isNamed, wasUsed bool
	// hasSlots is set if nothing has taken its place as the primary of its slots.
	hasSlots bool
}

// expect notes the servers that an accepted answer names. A new one takes the place of one that is no longer named, as
// after a move to another address. mu is held.
func (s *Shard) expect(found []Roles) {
	now, was := s.now(), s.expected
	s.expected = map[string]expectation{}
	came := 0
	note := func(addr string, e expectation) {
		if before, isKnown := was[addr]; !isKnown && !e.isAbsent {
			came++
		} else if before.isAbsent && !e.isAbsent {
			s.Emit(Event{Kind: ServerUp, Addr: addr, Purpose: PurposeChecks})
		}
		e.named, e.isNamed, e.wasUsed = now, true, was[addr].wasUsed || !e.isAbsent
		s.expected[addr] = e
	}
	for _, r := range found {
		if r.Primary != "" {
			note(r.Primary, expectation{})
		}
		for _, addr := range r.Replicas {
			note(addr, expectation{})
		}
		for _, addr := range r.Down {
			note(addr, expectation{isAbsent: true, hasSlots: r.Primary == "" && len(r.Slots) > 0})
		}
	}
	gone := slices.SortedFunc(maps.Keys(was), func(a, b string) int { return cmp.Or(was[a].named.Compare(was[b].named), cmp.Compare(a, b)) })
	gone = slices.DeleteFunc(gone, func(addr string) bool { return s.expected[addr].isNamed || !was[addr].wasUsed })
	for _, addr := range gone[min(came, len(gone)):] {
		if at := was[addr].named; now.Sub(at) < forgetAfter {
			s.expected[addr] = expectation{named: at, isAbsent: true, wasUsed: true}
		}
	}
	for addr, e := range s.expected {
		if e.isAbsent && !was[addr].isAbsent {
			s.Emit(Event{Kind: ServerDown, Addr: addr, Purpose: PurposeChecks, Err: s.absence(e)})
		}
	}
}

// Absent is a server that is expected and not in use.
type Absent struct {
	Addr string
	// HasSlots is set if it is the primary of slots.
	HasSlots bool
	Fault    error
}

// Absent returns the servers that are expected and not in use, by address.
func (s *Shard) Absent() (all []Absent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, addr := range slices.Sorted(maps.Keys(s.expected)) {
		if e := s.expected[addr]; e.isAbsent {
			all = append(all, Absent{addr, e.hasSlots, s.absence(e)})
		}
	}
	return all
}

// absence returns why a server is not in use.
func (s *Shard) absence(e expectation) error {
	who, forget := "the cluster", "CLUSTER FORGET at each node"
	if !s.InCluster {
		who, forget = "the sentinels", "SENTINEL RESET "+s.Options.Sentinel.Master+" at each sentinel"
	}
	if e.isNamed {
		return &Fault{Problem: who + " cannot reach it", Remedy: "restart it, or replace it and run " + forget}
	}
	return &Fault{
		Problem: fmt.Sprintf("%s named it last at %s", who, e.named.UTC().Format(time.RFC3339)),
		Remedy:  fmt.Sprintf("add a server in its place, or wait: it is expected for %v", forgetAfter),
	}
}
