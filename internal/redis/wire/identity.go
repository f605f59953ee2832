package wire

import (
	"fmt"
	"slices"
	"time"
)

// FollowAfter is how long most of the given sources have to name servers that share nothing with those that are
// followed, until these are followed. A lone foreign source is never followed, and a new machine soon.
const FollowAfter = 10 * time.Second

// answer is the word of a source: a sentinel, or a node of a cluster.
type answer struct {
	// source is its place among the given ones, or -1: then it has no vote.
	source int
	// marks show which servers it names: run ID and replication IDs of a primary, or the IDs of a cluster's nodes. They
	// are empty if that is not known.
	marks []string
	// servers are the addresses that it names, the primary's first. They count where marks are unknown, and after a
	// restart. In a Redis Cluster, whose nodes keep their IDs, there are none.
	servers []string
}

// isWith reports whether two answers are of one group.
func (a *answer) isWith(other *answer) bool {
	switch {
	case meet(a.marks, other.marks):
		return true
	case len(a.servers) == 0 || len(other.servers) == 0:
		return len(a.marks)+len(other.marks) == 0
	case a.servers[0] == other.servers[0]:
		return true
	case len(a.marks) == 0 && len(other.marks) == 0:
		return meet(a.servers, other.servers)
	default:
		return len(a.marks) == 0 && slices.Contains(other.servers, a.servers[0]) ||
			len(other.marks) == 0 && slices.Contains(a.servers, other.servers[0])
	}
}

func meet(some, others []string) bool {
	return slices.ContainsFunc(some, func(s string) bool { return slices.Contains(others, s) })
}

// belief is which servers are followed.
type belief struct {
	// followed is the answer that is believed; its source is -1. It has all marks that these servers have had.
	followed answer
	isSet    bool
	// rival is what most sources have named since an instant, if it is not what is followed; else nobody.
	rival answer
	since time.Time
}

// decision is which answers of a search are believed.
type decision struct {
	// group has the places of the answers that name the servers to follow. Epochs count among these alone. It is empty
	// if none does: the servers that are followed stay.
	group []int
	// foreign has the places of the answers that lead elsewhere.
	foreign []int
	// replaces is set if the group shares nothing with what was followed.
	replaces bool
}

// The ways in which a group is related to what is followed, the closest last.
const (
	unrelated = iota
	sameAddress
	sameServers
)

// relation returns how an answer is related to what is followed.
func (b *belief) relation(a *answer) int {
	f := &b.followed
	switch {
	case meet(a.marks, f.marks):
		return sameServers
	case len(a.servers) == 0 || len(f.servers) == 0:
		return unrelated
	case a.servers[0] == f.servers[0], len(a.marks) == 0 && slices.Contains(f.servers, a.servers[0]), len(f.marks) == 0 && meet(a.servers, f.servers):
		// It has restarted, or nothing shows who it is.
		return sameAddress
	default:
		return unrelated
	}
}

// nobody is with no other answer.
var nobody = answer{marks: []string{""}}

// judge decides which answers are believed at now, given the number of sources. It changes the rival alone: follow
// says which answer of the group is the one.
func (b *belief) judge(answers []answer, sources int, now time.Time) (d decision) {
	groups := grouped(answers)
	best, closest, most := -1, unrelated, -1
	for i, g := range groups {
		near := unrelated
		for _, place := range g.places {
			near = max(near, b.relation(&answers[place]))
		}
		switch {
		case b.isSet && near == unrelated:
		case best < 0 || near > closest || near == closest && g.votes > groups[best].votes:
			best, closest = i, near
		}
		if 2*g.votes > sources {
			most = i
		}
	}
	isNamed := slices.ContainsFunc(answers, func(a answer) bool { return a.isWith(&b.rival) })
	switch {
	case !b.isSet, most == best && best >= 0, most < 0 && !isNamed:
		b.rival = nobody
	case most < 0:
		// A source is silent for a moment.
	default:
		rival := answers[groups[most].places[0]]
		if !rival.isWith(&b.rival) {
			b.since = now
		}
		if b.rival = rival; now.Sub(b.since) >= FollowAfter {
			best, d.replaces, b.rival = most, true, nobody
		}
	}
	for i, g := range groups {
		if i == best {
			d.group = g.places
		} else {
			d.foreign = append(d.foreign, g.places...)
		}
	}
	slices.Sort(d.foreign)
	return d
}

// follow notes the answer that is believed, of the group of a decision. A cluster is the nodes that it has now; the
// servers behind sentinels are known by all that they have been.
func (b *belief) follow(a *answer, d *decision) {
	marks := b.followed.marks
	if d.replaces || len(a.servers) == 0 {
		marks = nil
	}
	b.followed = answer{source: -1, marks: appendNew(slices.Clone(marks), a.marks...), servers: a.servers}
	if excess := len(b.followed.marks) - mostMarks; excess > 0 && len(a.servers) > 0 {
		b.followed.marks = b.followed.marks[excess:]
	}
	b.isSet = true
}

// mostMarks bounds the marks of servers behind sentinels. Each failover and each restart adds one or two.
const mostMarks = 256

// answerGroup has the places of answers that lead to the same servers, and the number of given sources among them.
type answerGroup struct {
	places []int
	votes  int
}

// grouped groups answers by what they share, also through a third one. The first group has the first answer.
func grouped(answers []answer) (groups []answerGroup) {
	of := make([]int, len(answers))
	for i := range of {
		of[i] = i
	}
	for i := range answers {
		for j := range i {
			if from, to := max(of[i], of[j]), min(of[i], of[j]); from != to && answers[i].isWith(&answers[j]) {
				for n := range of {
					if of[n] == from {
						of[n] = to
					}
				}
			}
		}
	}
	for first := range answers {
		var g answerGroup
		for place, group := range of {
			if group == first {
				g.places = append(g.places, place)
				if answers[place].source >= 0 {
					g.votes++
				}
			}
		}
		if len(g.places) > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// Foreign is a source of a shard, a sentinel or a node, that leads to a server of others.
type Foreign struct{ Source, Leads string }

// foreignAt returns what is known of a source.
func foreignAt(all []Foreign, source string) []Foreign {
	if i := slices.IndexFunc(all, func(f Foreign) bool { return f.Source == source }); i >= 0 {
		return all[i : i+1]
	}
	return nil
}

// Fault returns what is wrong with the source.
func (f *Foreign) Fault() *Fault {
	return &Fault{
		Problem: fmt.Sprintf("it leads to %s, which has nothing in common with the servers that are followed", f.Leads),
		Remedy:  "remove its address from the shard, or make it name the shard's servers",
	}
}

// Standing says who is followed.
type Standing struct {
	// Since is when the servers that are followed, or those whose data they took over, were followed first.
	Since time.Time
	// Replaced is when they took the place of others, with which they have nothing in common; zero if they did not.
	Replaced time.Time
	Foreign  []Foreign
}

// Standing returns who is followed.
func (s *Shard) Standing() Standing {
	if standing := s.standing.Load(); standing != nil {
		return *standing
	}
	return Standing{}
}

// stand notes and tells who is followed after a search.
func (s *Shard) stand(found *Found) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.Standing()
	now := Standing{was.Since, was.Replaced, found.Foreign}
	if len(found.Roles) > 0 && (was.Since.IsZero() || found.Replaced) {
		now.Since = time.Now()
	}
	if found.Replaced {
		now.Replaced = now.Since
		s.Emit(Event{Kind: Replaced, Addr: firstPrimary(found.Roles)})
	}
	s.standing.Store(&now)
	for _, f := range found.Foreign {
		if !slices.Contains(was.Foreign, f) {
			s.Emit(Event{Kind: Misconfigured, Addr: f.Source, Err: f.Fault()})
		}
	}
	for _, f := range was.Foreign {
		if !slices.ContainsFunc(found.Foreign, func(other Foreign) bool { return other.Source == f.Source }) {
			s.Emit(Event{Kind: Mended, Addr: f.Source, Err: f.Fault()})
		}
	}
}
