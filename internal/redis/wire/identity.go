package wire

import (
	"slices"
	"time"
)

// FollowAfter is how long most of the given sources must name unrelated servers until these are followed. So a lone
// foreign source is never followed, and a new machine soon.
const FollowAfter = 10 * time.Second

// answer is the answer of a source: a sentinel, or a node of a cluster.
type answer struct {
	// source is its index among the given sources, or -1 if it has no vote.
	source int
	// marks identify the servers that it names: run ID and replication IDs of a primary, or the IDs of a cluster's nodes.
	// They are empty if they are unknown.
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

// belief says which servers are followed.
type belief struct {
	// followed is the accepted answer, with source -1 and all marks that its servers have had.
	followed answer
	isSet    bool
	// rival is the answer of most sources since an instant, if it differs from followed; else nobody.
	rival answer
	since time.Time
}

// decision says which answers of a search are believed.
type decision struct {
	// group has the places of the answers that name the servers to follow. Epochs count among these alone. It is empty
	// if none does: the servers that are followed stay.
	group []int
	// foreign has the places of the answers that lead elsewhere.
	foreign []int
	// replaces is set if the group is unrelated to the servers followed before.
	replaces bool
}

// The relations of an answer to the servers followed, the closest last.
const (
	unrelated = iota
	sameAddress
	sameServers
)

// relation returns the relation of an answer to the servers followed.
func (b *belief) relation(a *answer) int {
	f := &b.followed
	switch {
	case meet(a.marks, f.marks):
		return sameServers
	case len(a.servers) == 0 || len(f.servers) == 0:
		return unrelated
	case a.servers[0] == f.servers[0], len(a.marks) == 0 && slices.Contains(f.servers, a.servers[0]), len(f.marks) == 0 && meet(a.servers, f.servers):
		// It has restarted, or nothing identifies it.
		return sameAddress
	default:
		return unrelated
	}
}

// nobody is related to no answer.
var nobody = answer{marks: []string{""}}

// judge decides which answers are believed at now, given the number of sources. It changes only the rival: the caller
// chooses an answer of the group, and calls follow.
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

// follow notes the answer chosen from the group of a decision. A cluster is identified by its present nodes, servers
// behind sentinels by all marks that they have had.
func (b *belief) follow(a *answer, d *decision) {
	marks := b.followed.marks
	if d.replaces || len(a.servers) == 0 {
		marks = nil
	}
	b.followed = answer{source: -1, marks: appendNew(slices.Clone(marks), a.marks...), servers: a.servers}
	if excess := len(b.followed.marks) - mostMarks; excess > 0 && len(a.servers) > 0 {
		b.followed.marks = b.followed.marks[excess:]
	}
	// Nothing identifies servers without marks and addresses, so the next answers are judged as the first ones.
	b.isSet = len(b.followed.marks)+len(b.followed.servers) > 0
}

// mostMarks bounds the marks of servers behind sentinels. Each failover and each restart adds one or two.
const mostMarks = 256

// answerGroup has the places of answers that lead to the same servers, and the number of given sources among them.
type answerGroup struct {
	places []int
	votes  int
}

// grouped groups related answers, also by way of a third one. The first group has the first answer.
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

// Standing says which servers are followed.
type Standing struct {
	// Since is when the servers followed, or predecessors whose data they took over, were followed first.
	Since time.Time
	// Replaced is when they took the place of unrelated servers; zero if they did not.
	Replaced time.Time
	Sources  []Source
}

// Standing returns which servers are followed.
func (s *Shard) Standing() Standing {
	if standing := s.standing.Load(); standing != nil {
		return *standing
	}
	return Standing{}
}

// stand notes which servers are followed after a search, and emits the changes.
func (s *Shard) stand(found *Found) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.Standing()
	now := Standing{was.Since, was.Replaced, found.Sources}
	if len(found.Roles) > 0 && (was.Since.IsZero() || found.Replaced) {
		now.Since = time.Now()
	}
	if found.Replaced {
		// A name may be the same, and lead to the new servers.
		for key, l := range s.lanes {
			s.Options.names.forget(key.addr, "")
			l.renew()
		}
		now.Replaced = now.Since
		clear(s.expected)
		s.Emit(Event{Kind: Replaced, Addr: FirstPrimary(found.Roles)})
	}
	s.tellSources(was.Sources, now.Sources)
	s.standing.Store(&now)
}
