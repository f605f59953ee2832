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
	// absentAfter is how long a server is not in use until that is said: after a failover, sentinels are not connected to
	// its replicas for a moment.
	absentAfter = time.Second
	// silentAfter is how long a source has not answered until that is said.
	silentAfter = 2 * time.Second
	// silentPause is the time between two searches that wait longer for sources that are silent: these may be far away.
	silentPause = time.Minute
	// mostPatience bounds that wait, which a failover may have to outlast.
	mostPatience = 2 * time.Second
	// mostExpected bounds the servers that are expected besides those in use: sources may name ever new ones.
	mostExpected = 1000
)

// Source is a sentinel or a node that was given, and its last answer.
type Source struct {
	Addr string
	// IsForeign is set if its last answer led to unrelated servers. Leads is their primary, or empty if nothing identifies
	// it.
	IsForeign bool
	Leads     string
	// Err is why it did not answer, or nil, and missing since when. IsSilent is set once that lasts.
	Err      error
	missing  time.Time
	IsSilent bool
}

// miss returns the source after a question without an answer at now. Without the full time it may only be far away.
func (s Source) miss(err error, now time.Time, hadTime bool) Source {
	s.Err = err
	if s.missing.IsZero() {
		s.missing = now
	}
	s.IsSilent = s.IsSilent || hadTime && now.Sub(s.missing) >= silentAfter
	return s
}

// owesTime reports whether a search at now has to wait longer for silent sources, given the last search that did.
func owesTime(sources []Source, waited, now time.Time) bool {
	return slices.ContainsFunc(sources, func(s Source) bool {
		return s.Err != nil && (now.Sub(waited) >= silentPause || !s.IsSilent && now.Sub(waited) >= silentAfter)
	})
}

// sourceAt returns the source with that address.
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

// QuorumFault returns the fault of a shard of which no majority of the sources leads to its servers because some do not
// answer, or nil.
func QuorumFault(sources []Source, inCluster bool) error {
	led := 0
	var away, remedies []string
	kind, consequence, remedy := "sentinels", "perhaps no replica can take the primary's place", "correct sentinel_username, sentinel_password or the name of the master"
	if inCluster {
		kind, consequence, remedy = "nodes", "a new cluster in its place would not be followed", "correct username or password"
	}
	for _, s := range sources {
		switch {
		case s.IsSilent && IsReply(s.Err):
			away = append(away, s.Addr+" refuses: "+oneLine(s.Err))
			remedies = appendNew(remedies, remedy)
		case s.IsSilent:
			away = append(away, s.Addr+": "+oneLine(s.Err))
			remedies = appendNew(remedies, "restart the silent ones, or correct the list and reload")
		case !s.IsForeign:
			led++
		}
	}
	if len(away) == 0 || 2*led > len(sources) {
		return nil
	}
	return &Fault{
		Problem: fmt.Sprintf("only %d of the %d given %s lead to its servers, so %s (%s)", led, len(sources), kind, consequence, strings.Join(away, "; ")),
		Remedy:  strings.Join(remedies, "; "),
	}
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// tellSources emits the changes of the sources since the search before. mu is held.
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

// expectation is the state of a server that an accepted answer has named.
type expectation struct {
	// named is when a source named it last, and lost since when it is not in use; zero while it is.
	named, lost time.Time
	// among is the number of servers in use when it was last in use, or 0 if it never was.
	among int
	// isNamed is set if the sources name it as one that is down.
	isNamed bool
	// hasSlots is set if nothing has taken its place as the primary of its slots.
	hasSlots bool
	// isSaid is set while its absence is said.
	isSaid bool
}

// expect notes the servers that an accepted answer names. One that is no longer named is missed while fewer are in use than
// with it. mu is held.
func (s *Shard) expect(found []Roles) {
	now, was := s.now(), s.expected
	next := map[string]expectation{}
	for _, r := range found {
		for _, addr := range append([]string{r.Primary}, r.Replicas...) {
			if addr != "" {
				next[addr] = expectation{named: now}
			}
		}
	}
	used, missed := len(next), 0
	for addr, e := range next {
		e.among = used
		if next[addr] = e; was[addr].isSaid {
			s.Emit(Event{Kind: ServerUp, Addr: addr, Purpose: PurposeChecks})
		}
	}
	note := func(addr string, e expectation, isMissed bool) {
		if isMissed && e.among > 0 {
			missed++
		}
		if e.lost.IsZero() {
			e.lost = now
		}
		l := s.lanes[laneKey{addr, false}]
		isOut := l != nil && !l.IsUp() // It was said to be left out until now.
		wasSaid := e.isSaid
		if e.isSaid = isMissed && (wasSaid || isOut || now.Sub(e.lost) >= absentAfter); e.isSaid && !wasSaid {
			s.Emit(Event{Kind: ServerDown, Addr: addr, Purpose: PurposeChecks, Err: s.absence(e)})
		}
		next[addr] = e
	}
	for _, r := range found {
		for i, addr := range r.Down {
			// A node that has lost its ID is named as it was too.
			if _, isNoted := next[addr]; !isNoted && len(next) < used+mostExpected {
				e := was[addr]
				e.named, e.isNamed, e.hasSlots = now, true, r.Primary == "" && len(r.Slots) > 0 && i == 0
				note(addr, e, true)
			}
		}
		for _, addr := range r.Elsewhere {
			if e, isKnown := was[addr]; isKnown {
				e.named = now
				was[addr] = e
			}
		}
	}
	gone := slices.DeleteFunc(slices.Collect(maps.Keys(was)), func(addr string) bool {
		_, isNoted := next[addr]
		return isNoted || was[addr].among == 0 || now.Sub(was[addr].named) >= forgetAfter
	})
	slices.SortFunc(gone, func(a, b string) int { return cmp.Or(was[b].named.Compare(was[a].named), cmp.Compare(a, b)) })
	for _, addr := range gone[:min(len(gone), used+mostExpected-len(next))] {
		e := was[addr]
		e.isNamed, e.hasSlots = false, false
		note(addr, e, used+missed < e.among)
	}
	s.expected = next
}

// Absent is a server that is expected and not in use.
type Absent struct {
	Addr string
	// HasSlots is set if it is the primary of slots.
	HasSlots bool
	Fault    error
}

// Absent returns the servers that are expected and were not in use for a moment, by address.
func (s *Shard) Absent() (all []Absent) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, addr := range slices.Sorted(maps.Keys(s.expected)) {
		if e := s.expected[addr]; e.isSaid {
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
		Remedy:  "add a server in its place, or wait: it is expected for an hour",
	}
}
