package fleet

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// joined collects elements that several Caddys have, in the order in which they come, by a key.
type joined[K comparable, T any] struct {
	places map[K]int
	all    []T
}

// at returns the element of a key: one that is there already, or a copy of first, which is added.
func (j *joined[K, T]) at(key K, first T) (element *T, isNew bool) {
	if j.places == nil {
		j.places, j.all = map[K]int{}, []T{}
	}
	i, isKnown := j.places[key]
	if !isKnown {
		i = len(j.all)
		j.places[key] = i
		j.all = append(j.all, first)
	}
	return &j.all[i], !isKnown
}

// zoneKey is what one zone of several Caddys has in common.
type zoneKey struct{ zone, store string }

// mergeStatus adds up what Caddys say of their zones and stores. What they cannot share, such as the
// definition of a zone, is that of the first.
func mergeStatus(parts []part[adminapi.Status], a asked) adminapi.Status {
	parts, twins := withoutTwins(parts)
	merged := adminapi.Status{Instances: []adminapi.Instance{}}
	zones, shops := joined[zoneKey, adminapi.Zone]{}, joined[string, adminapi.Store]{}
	problems := joined[problemKey, adminapi.Problem]{}
	for _, p := range parts {
		for _, instance := range p.answer.Instances {
			instance.Address = p.address
			merged.Instances = append(merged.Instances, instance)
		}
		for i := range p.answer.Stores {
			addStore(&shops, &p.answer.Stores[i])
		}
		for _, problem := range p.answer.Problems {
			addProblem(&problems, problem, p.address)
		}
	}
	for _, p := range parts {
		for _, z := range p.answer.Zones {
			into, isNew := zones.at(zoneKey{z.Name, z.Store}, z)
			if isNew {
				into.Decisions = map[string]int64{}
			} else if text := disagreement(into, &z, isShared(shops.all, z.Store)); text != "" {
				addProblem(&problems, adminapi.Problem{Kind: adminapi.ProblemDisagreement, Store: z.Store, Zone: z.Name, Text: text}, p.address)
			}
			for outcome, n := range z.Decisions {
				into.Decisions[outcome] += n
			}
			into.LastRefused = max(into.LastRefused, z.LastRefused)
			if into.Rule == nil || z.Rule != nil && z.Rule.Since > into.Rule.Since {
				into.Rule = z.Rule
			}
			into.Shares = append(into.Shares, adminapi.ZoneShare{Address: p.address, Decisions: z.Decisions, Rule: z.Rule})
		}
	}
	for i := range zones.all {
		tellRules(&zones.all[i], isShared(shops.all, zones.all[i].Store))
	}
	merged.Instances = append(merged.Instances, twins...)
	for _, f := range a.failed {
		merged.Instances = append(merged.Instances, adminapi.Instance{Address: f.address, Error: f.text})
	}
	merged.Problems, merged.Zones, merged.Stores = append([]adminapi.Problem{}, problems.all...), append([]adminapi.Zone{}, zones.all...), append([]adminapi.Store{}, shops.all...)
	slices.SortStableFunc(merged.Problems, func(a, b adminapi.Problem) int { return cmp.Compare(a.Kind.Rank(), b.Kind.Rank()) })
	return merged
}

// withoutTwins returns the answers without those of Caddys that have answered at another address before, and
// these Caddys.
func withoutTwins(parts []part[adminapi.Status]) (rest []part[adminapi.Status], twins []adminapi.Instance) {
	known := map[string]string{}
	for _, p := range parts {
		id := ""
		if len(p.answer.Instances) > 0 {
			id = p.answer.Instances[0].ID
		}
		if first, isKnown := known[id]; isKnown && id != "" {
			twins = append(twins, adminapi.Instance{Address: p.address, Same: first})
			continue
		}
		known[id], rest = p.address, append(rest, p)
	}
	return rest, twins
}

// disagreement returns the text of the problem if z differs from the first Caddy's zone, or "". Caddys that share a
// store compare definitions themselves.
func disagreement(first, z *adminapi.Zone, isShared bool) string {
	switch {
	case !isShared && first.Definition != z.Definition:
		return fmt.Sprintf("zone %s is defined otherwise than for %s: load the same config, or give one zone another name", z.Name, first.Shares[0].Address)
	case first.Enforce != z.Enforce || !same(first.Rollout, z.Rollout):
		return fmt.Sprintf("zone %s has another enforce or rollout than for %s: load the same config", z.Name, first.Shares[0].Address)
	}
	return ""
}

// tellRules makes a zone have the rule that all Caddys have or, where each keeps its own and they differ, each
// share that of its Caddy.
func tellRules(z *adminapi.Zone, isShared bool) {
	first := z.Shares[0].Rule
	if !isShared && slices.ContainsFunc(z.Shares, func(s adminapi.ZoneShare) bool { return !sameSetting(s.Rule, first) }) {
		z.Rule = nil
		return
	}
	for i := range z.Shares {
		z.Shares[i].Rule = nil
	}
}

// isShared reports whether a store is known to be shared.
func isShared(stores []adminapi.Store, name string) bool {
	return slices.ContainsFunc(stores, func(s adminapi.Store) bool { return s.Name == name && s.Shared })
}

// problemKey is what one problem of several Caddys has in common. Numbers in texts tell problems
// apart, because they are those of one Caddy.
type problemKey struct {
	kind                             adminapi.ProblemKind
	store, shard, zone, server, text string
}

func addProblem(to *joined[problemKey, adminapi.Problem], p adminapi.Problem, address string) {
	into, _ := to.at(problemKey{p.Kind, p.Store, p.Shard, p.Zone, p.Server, p.Text}, p)
	into.Since = min(into.Since, p.Since)
	into.Addresses = append(into.Addresses, address)
}

// sameServers reports whether two stores of one name are known to be the same: they have a server in
// common in each shard of which both know servers, and in one at least.
func sameServers(a, b []adminapi.Shard) bool {
	isSame := false
	for i := range a {
		for j := range b {
			ours, theirs := counting(a[i].Servers), counting(b[j].Servers)
			if a[i].Name != b[j].Name || len(ours) == 0 || len(theirs) == 0 {
				continue
			}
			isSame = slices.ContainsFunc(ours, func(s adminapi.Server) bool {
				return slices.ContainsFunc(theirs, func(other adminapi.Server) bool { return other.Address == s.Address })
			})
			if !isSame {
				return false
			}
		}
	}
	return isSame
}

// counting returns the servers without sentinels and nodes: several stores may share sentinels, and a node may lead to
// another cluster.
func counting(all []adminapi.Server) []adminapi.Server {
	return slices.DeleteFunc(slices.Clone(all), func(s adminapi.Server) bool { return s.Role.IsSource() })
}

// addStore adds what a Caddy says of a store to what others say. It stays shared if all have it in the
// same servers: where Caddys only give their stores the same name, each has its own.
func addStore(to *joined[string, adminapi.Store], s *adminapi.Store) {
	into, isNew := to.at(s.Name, *s)
	if isNew {
		return
	}
	into.Shared = into.Shared && s.Shared && sameServers(into.Shards, s.Shards)
	if into.Buckets != nil && s.Buckets != nil {
		sum := *into.Buckets + *s.Buckets
		into.Buckets = &sum
	}
	into.Ledger = addLedgers(into.Ledger, s.Ledger)
	shards := joined[string, adminapi.Shard]{}
	for _, list := range [][]adminapi.Shard{into.Shards, s.Shards} {
		for _, shard := range list {
			if known, isNew := shards.at(shard.Name, shard); !isNew {
				known.Found, known.Retired = known.Found && shard.Found, known.Retired && shard.Retired
				known.Servers = addServers(known.Servers, shard.Servers)
			}
		}
	}
	into.Shards = shards.all
}

func addLedgers(a, b *adminapi.Ledger) *adminapi.Ledger {
	if a == nil || b == nil {
		return cmp.Or(a, b)
	}
	return &adminapi.Ledger{
		Buckets: a.Buckets + b.Buckets, InFlight: a.InFlight + b.InFlight, Unsent: a.Unsent + b.Unsent, Uncertain: a.Uncertain + b.Uncertain,
		LocalRefusals: a.LocalRefusals + b.LocalRefusals, UnaskedAdmissions: a.UnaskedAdmissions + b.UnaskedAdmissions,
		Batches: adminapi.Batches{
			Fetched: a.Batches.Fetched + b.Batches.Fetched, Tokens: a.Batches.Tokens + b.Batches.Tokens,
			Returned: a.Batches.Returned + b.Batches.Returned, Expired: a.Batches.Expired + b.Batches.Expired,
		},
	}
}

// addServers joins what Caddys see of the same servers: the worst of it, and sums of what each has
// for itself.
func addServers(a, b []adminapi.Server) []adminapi.Server {
	type place struct {
		address  string
		isSource bool // a node may be a source to one Caddy, and a server to another
	}
	servers := joined[place, adminapi.Server]{}
	for _, s := range slices.Concat(a, b) {
		into, isNew := servers.at(place{s.Address, s.Role.IsSource()}, s)
		if isNew {
			continue
		}
		if into.State == store.ServerUp {
			into.State = s.State
		}
		if s.Role == store.RolePrimary {
			// That Caddy charges it, whatever others know.
			into.Role = s.Role
		}
		into.Breakers = worse(into.Breakers, s.Breakers, func(x, y string) string {
			if x == "closed" {
				return y
			}
			return x
		})
		into.Latency = worse(into.Latency, s.Latency, func(x, y float64) float64 { return max(x, y) })
		into.Pools = worse(into.Pools, s.Pools, func(x, y adminapi.Pool) adminapi.Pool {
			return adminapi.Pool{
				Connections: x.Connections + y.Connections, Idle: x.Idle + y.Idle, Hits: x.Hits + y.Hits,
				Misses: x.Misses + y.Misses, Timeouts: x.Timeouts + y.Timeouts, Stale: x.Stale + y.Stale,
			}
		})
		if into.Lag == nil || s.Lag != nil && *s.Lag > *into.Lag {
			into.Lag = s.Lag
		}
		into.Queued += s.Queued
	}
	return servers.all
}

// worse joins two maps by purpose.
func worse[V any](a, b map[string]V, join func(x, y V) V) map[string]V {
	all := map[string]V{}
	for _, m := range []map[string]V{a, b} {
		for purpose, v := range m {
			if known, ok := all[purpose]; ok {
				v = join(known, v)
			}
			all[purpose] = v
		}
	}
	return all
}
