package algorithm

import (
	"cmp"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// member is one event that is kept by itself: the part-th of the request id.
type member struct {
	at   int64
	id   string
	part int64
}

// compare is the order in which members are kept.
func (m member) compare(other member) int {
	return cmp.Or(cmp.Compare(m.at, other.at), cmp.Compare(m.id, other.id), cmp.Compare(m.part, other.part))
}

// members are kept in order.
type members []member

// put adds the first n members of a request, or moves those that are there.
func (l *members) put(at int64, id string, n int64) {
	l.remove(id, n)
	for part := range n {
		m := member{at, id, part}
		i, _ := slices.BinarySearchFunc(*l, m, member.compare)
		*l = slices.Insert(*l, i, m)
	}
}

// remove takes out the first n members of a request.
func (l *members) remove(id string, n int64) {
	*l = slices.DeleteFunc(*l, func(m member) bool { return m.id == id && m.part < n })
}

// after returns the members after an instant.
func (l members) after(at int64) members {
	i, _ := slices.BinarySearchFunc(l, at, func(m member, at int64) int {
		if m.at <= at {
			return -1
		}
		return 1
	})
	return l[i:]
}

// keep cuts l down to its last members.
func (l *members) keep(last members) {
	if len(last) == len(*l) {
		return
	}
	n := copy(*l, last)
	clear((*l)[n:])
	*l = (*l)[:n]
}

// newest is the instant of the last member, or 0.
func (l members) newest() int64 {
	if len(l) == 0 {
		return 0
	}
	return l[len(l)-1].at
}

// without returns the members up to the last that is not of the request.
func (l members) without(id string) members {
	for len(l) > 0 && l[len(l)-1].id == id {
		l = l[:len(l)-1]
	}
	return l
}

// Kept is how many members of a request, or of a log, are kept at most: one
// more than fit, so that it shows that they do not.
func Kept(r *store.Request) int64 { return r.Events + 1 }

// count is how many members a request's cost makes.
func count(r *store.Request) int64 { return min(r.Cost, Kept(r), store.MaxMembers) }
