package fleet

import (
	"cmp"
	"math"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// mergeFound joins the buckets of one client in each zone and store.
func mergeFound(parts []part[adminapi.Found], a asked) adminapi.Found {
	zones := joined[zoneKey, []part[adminapi.Buckets]]{}
	merged := adminapi.Found{Zones: []adminapi.Buckets{}, Unanswered: a.unanswered()}
	for _, p := range parts {
		for _, b := range p.answer.Zones {
			into, _ := zones.at(zoneKey{b.Zone, b.Store}, nil)
			*into = append(*into, part[adminapi.Buckets]{p.address, b})
		}
		for _, text := range p.answer.Errors {
			merged.Errors = append(merged.Errors, failure{p.address, text}.String())
		}
	}
	a.failed = nil // said of the whole
	for _, zone := range zones.all {
		merged.Zones = append(merged.Zones, mergeBuckets(zone, a))
	}
	return merged
}

// mergeMatches joins the clients that begin with a text, in the order in which one Caddy lists them: of
// each what the Caddy knows that knows most.
func mergeMatches(parts []part[adminapi.Matches], a asked) adminapi.Matches {
	type id struct{ zone, store, key string }
	merged, clients := adminapi.Matches{Unanswered: a.unanswered()}, joined[id, adminapi.Match]{}
	for _, p := range parts {
		merged.More = merged.More || p.answer.More
		merged.Unlisted = append(merged.Unlisted, p.answer.Unlisted...)
		for _, c := range p.answer.Clients {
			into, _ := clients.at(id{c.Zone, c.Store, c.ClientKey}, c)
			client := clientOf(into.Client, c.Client)
			if c.Used > into.Used {
				*into = c
			}
			into.Client = client
		}
	}
	slices.Sort(merged.Unlisted)
	merged.Unlisted = slices.Compact(merged.Unlisted)
	slices.SortFunc(clients.all, func(a, b adminapi.Match) int { return a.Compare(&b) })
	merged.Clients = append([]adminapi.Match{}, clients.all...)
	return merged
}

// mergeBuckets joins the copies of buckets: of a shared store each server's once, of another those in
// the memory of each Caddy.
func mergeBuckets(parts []part[adminapi.Buckets], a asked) adminapi.Buckets {
	merged, buckets := adminapi.Buckets{Unanswered: a.unanswered()}, joined[string, adminapi.Bucket]{}
	// overrides are those of each bucket.
	var overrides []settings
	for _, p := range parts {
		merged.Zone, merged.Store = p.answer.Zone, p.answer.Store
		for _, b := range p.answer.Buckets {
			into, isNew := buckets.at(b.ClientKey, b)
			if isNew {
				into.Servers, into.Overrides = nil, nil
				overrides = append(overrides, settings{})
			} else {
				into.LastRefused = max(into.LastRefused, b.LastRefused)
				into.Ledger = addAccounts(into.Ledger, b.Ledger)
				into.Local = mostUsed(into.Local, b.Local)
				into.Client = clientOf(into.Client, b.Client)
			}
			into.Servers = addCopies(into.Servers, b.Servers, p.address)
			switch {
			case b.Previous == nil:
			case isNew || into.Previous == nil:
				into.Previous = &adminapi.Copies{Shard: b.Previous.Shard, Servers: addCopies(nil, b.Previous.Servers, p.address)}
			default:
				into.Previous.Servers = addCopies(into.Previous.Servers, b.Previous.Servers, p.address)
			}
			for _, o := range b.Overrides {
				overrides[buckets.places[b.ClientKey]].add(o, p.address)
			}
		}
	}
	for i := range buckets.all {
		buckets.all[i].Overrides = overrides[i].listed(len(parts), a)
	}
	merged.Buckets = append([]adminapi.Bucket{}, buckets.all...)
	return merged
}

// addCopies adds what the Caddy at an address says of servers: of each server that is kept which says
// most.
func addCopies(to, from []adminapi.Copy, address string) []adminapi.Copy {
	for _, c := range from {
		c.Address = cmp.Or(c.Address, address)
		i := slices.IndexFunc(to, func(known adminapi.Copy) bool { return known.Address == c.Address })
		switch {
		case i < 0:
			to = append(to, c)
		case says(&c) > says(&to[i]):
			to[i] = c
		}
	}
	return to
}

// says ranks a copy: an error says least, and a state without its limit less than others.
func says(c *adminapi.Copy) int {
	switch {
	case c.Error != "":
		return 0
	case c.State != nil && c.State.Limit == nil:
		return 1
	default:
		return 2
	}
}

// mostUsed returns the local count of the Caddy that has counted most.
func mostUsed(a, b *adminapi.State) *adminapi.State {
	used := func(s *adminapi.State) int64 {
		if s == nil || s.Used == nil {
			return -1
		}
		return *s.Used
	}
	if used(b) > used(a) {
		return b
	}
	return cmp.Or(a, b)
}

// addAccounts joins what Caddys know of a bucket beyond the store's count.
func addAccounts(a, b *adminapi.Account) *adminapi.Account {
	if a == nil || b == nil {
		return cmp.Or(a, b)
	}
	return &adminapi.Account{
		Used: max(a.Used, b.Used), InFlight: a.InFlight + b.InFlight, Unsent: a.Unsent + b.Unsent,
		Reserved: a.Reserved + b.Reserved, Full: a.Full || b.Full, IsAlone: a.IsAlone || b.IsAlone,
	}
}

// mergeResets joins what was emptied.
func mergeResets(parts []part[adminapi.Resets], a asked) adminapi.Resets {
	merged, buckets := adminapi.Resets{Unanswered: a.unanswered()}, joined[string, adminapi.Reset]{}
	for _, p := range parts {
		merged.Zone, merged.Store = p.answer.Zone, p.answer.Store
		for _, b := range p.answer.Buckets {
			into, _ := buckets.at(b.ClientKey, b)
			into.Deleted, into.Client = into.Deleted || b.Deleted, clientOf(into.Client, b.Client)
		}
	}
	merged.Buckets = append([]adminapi.Reset{}, buckets.all...)
	return merged
}

// overrideID identifies an override of a zone or a client.
type overrideID struct {
	kind             store.OverrideKind
	zone, store, key string
}

// settings are what operators have set of zones and clients: of each, what Caddys have alike.
type settings struct {
	joined[overrideID, []adminapi.Override]
}

// add adds what the Caddy at an address has. Of what several have alike, the last one set is listed.
func (s *settings) add(o adminapi.Override, address string) {
	alike, _ := s.at(overrideID{o.Kind, o.Zone, o.Store, o.ClientKey}, nil)
	i := slices.IndexFunc(*alike, func(known adminapi.Override) bool { return sameSetting(&known, &o) })
	if i < 0 {
		o.Addresses = []string{address}
		*alike = append(*alike, o)
		return
	}
	into := &(*alike)[i]
	have := append(into.Addresses, address)
	if o.Since > into.Since {
		*into = o
	}
	into.Addresses = have
}

// listed returns all of them. Where not all Caddys have the same in their own memory, it says who has what.
func (s *settings) listed(caddys int, a asked) (all []adminapi.Override) {
	for _, alike := range s.all {
		if a.areShared(alike[0].Store) {
			// They have read it at different instants.
			alike = []adminapi.Override{slices.MaxFunc(alike, func(a, b adminapi.Override) int { return cmp.Compare(a.Since, b.Since) })}
		}
		for _, o := range alike {
			if len(o.Addresses) == caddys || a.areShared(o.Store) {
				o.Addresses = nil
			}
			all = append(all, o)
		}
	}
	return all
}

// sameEnd is by how many seconds the ends may differ of what one command has set in several Caddys.
const sameEnd = 60

// sameSetting reports whether two Caddys have the same of a zone or a client.
func sameSetting(a, b *adminapi.Override) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Events == b.Events && a.Burst == b.Burst && same(a.Enforce, b.Enforce) && same(a.Rollout, b.Rollout) &&
		(a.Until == 0) == (b.Until == 0) && math.Abs(a.Until-b.Until) <= sameEnd
}

// same reports whether both are missing, or are there with one value.
func same[T comparable](a, b *T) bool { return (a == nil) == (b == nil) && (a == nil || *a == *b) }

// mergeOverrides joins what operators have set.
func mergeOverrides(parts []part[adminapi.Overrides], a asked) adminapi.Overrides {
	merged, all := adminapi.Overrides{Unanswered: a.unanswered()}, settings{}
	for _, p := range parts {
		for _, o := range p.answer.Overrides {
			all.add(o, p.address)
		}
		for _, text := range p.answer.Errors {
			merged.Errors = append(merged.Errors, failure{p.address, text}.String())
		}
	}
	merged.Overrides = append([]adminapi.Override{}, all.listed(len(parts), a)...)
	return merged
}

// mergeAudit joins the changes, the latest first.
func mergeAudit(parts []part[adminapi.Audit], a asked) adminapi.Audit {
	type id struct {
		overrideID
		at float64
	}
	merged, all := adminapi.Audit{Unanswered: a.unanswered()}, joined[id, adminapi.AuditedChange]{}
	for _, p := range parts {
		for _, c := range p.answer.Changes {
			all.at(id{overrideID{c.Kind, c.Zone, c.Store, c.Client.ClientKey}, c.At}, c)
		}
		for _, text := range p.answer.Errors {
			merged.Errors = append(merged.Errors, failure{p.address, text}.String())
		}
	}
	merged.Changes = append([]adminapi.AuditedChange{}, all.all...)
	slices.SortStableFunc(merged.Changes, func(a, b adminapi.AuditedChange) int { return cmp.Compare(b.At, a.At) })
	return merged
}
