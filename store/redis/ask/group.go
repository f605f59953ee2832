package ask

import (
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

// Group is some of the requests of a call, by their places.
type Group struct {
	Reqs []store.Request
	// States are those of all requests; nil for what Post sends.
	States []store.State
	// Members are the places of the requests in question.
	Members []int
}

// places holds 0, 1, 2 ... for groups of all requests, which most are.
var places = func() (n [16]int) {
	for i := range n {
		n[i] = i
	}
	return n
}()

// Whole returns the group of all requests.
func Whole(reqs []store.Request, states []store.State) Group {
	if len(reqs) <= len(places) {
		return Group{reqs, states, places[:len(reqs):len(reqs)]}
	}
	members := make([]int, len(reqs))
	for i := range members {
		members[i] = i
	}
	return Group{reqs, states, members}
}

// Fail sets the states of the members to an error.
func (g Group) Fail(err error) {
	for _, i := range g.Members {
		g.States[i] = store.State{Err: err}
	}
}

func (g Group) where(f func(i int) bool) (members []int) {
	for _, i := range g.Members {
		if f(i) {
			members = append(members, i)
		}
	}
	return members
}

// unanswered returns the members to ask the primary about: those that failed, whose
// window is not open, or that a replica may lack while a slot moves.
func (g Group) unanswered(of *wire.Servers) []int {
	return g.where(func(i int) bool {
		st := &g.States[i]
		return st.Err != nil || isUnopened(&g.Reqs[i], st) || of.MayMiss(st)
	})
}

func (g Group) wantsPrimary() bool {
	return slices.ContainsFunc(g.Members, func(i int) bool { return g.Reqs[i].Primary })
}

// areOpen reports whether the windows of all members are known to be open at now.
func (g Group) areOpen(now int64) bool {
	return !slices.ContainsFunc(g.Members, func(i int) bool {
		return g.Reqs[i].Until <= now || !algorithm.Of(g.Reqs[i].Limit.Algorithm).Windowed
	})
}

// ids returns the IDs of the members that have one.
func (g Group) ids() (ids []string) {
	for _, i := range g.Members {
		if id := g.Reqs[i].ID; id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}
