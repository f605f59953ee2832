package redis

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// KeyPrefix implements [store.Shared].
func (s *Store) KeyPrefix() string { return s.opts.KeyPrefix }

// Weights implements [store.Shared].
func (s *Store) Weights() store.Details {
	all := store.Details{}
	for name := range s.all {
		words := []string{weightOf(s.opts.Members, name)}
		for _, step := range s.opts.Previous {
			words = append(words, weightOf(step, name))
		}
		// The last one says what it was before, too.
		for n := len(words); n > 1 && words[n-1] == words[n-2]; n-- {
			words = words[:n-1]
		}
		if all[name] = words[0]; len(words) > 1 {
			all[name] += " was " + strings.Join(words[1:], " ")
		}
	}
	return all
}

func weightOf(members []Member, name string) string {
	if i := slices.IndexFunc(members, func(m Member) bool { return m.Name == name }); i >= 0 {
		return strconv.Itoa(max(members[i].Weight, 1))
	}
	return "0"
}

const (
	// sampledClients is how many made-up clients stand for all.
	sampledClients = 2000
	// mostWeights bounds the weights of all steps, because another program may have written them.
	mostWeights = 1024
)

// Apart implements [store.Shared].
func (s *Store) Apart(weights store.Details, names map[string]string) (share float64, ok bool) {
	steps, ok := stepsOf(weights, names)
	if !ok {
		return 0, false
	}
	apart := 0
	for i := range sampledClients {
		client := strconv.Itoa(i)
		owners := s.Owners(client)
		if !slices.ContainsFunc(steps, func(p placement) bool { return slices.Contains(owners, p.here[p.owner(client)]) }) {
			apart++
		}
	}
	return float64(apart) / sampledClients, true
}

// placement chooses among the shards of one step of a resharding. A shard that is not known here has no name.
type placement struct {
	*rendezvous
	here []string
}

// stepsOf returns the placements by these weights, the latest first.
func stepsOf(weights store.Details, names map[string]string) (steps []placement, ok bool) {
	parsed, most := map[string][]int{}, 0
	for name, text := range weights {
		now, was, _ := strings.Cut(text, " was ")
		for _, word := range append([]string{now}, strings.Fields(was)...) {
			weight, err := strconv.Atoi(word)
			if err != nil || weight < 0 {
				return nil, false
			}
			parsed[name] = append(parsed[name], weight)
		}
		most = max(most, len(parsed[name]))
	}
	if len(parsed)*most > mostWeights {
		return nil, false
	}
	for step := range most {
		var members []Member
		var here []string
		for _, name := range slices.Sorted(maps.Keys(parsed)) {
			weight := parsed[name][min(step, len(parsed[name])-1)]
			if weight == 0 {
				continue
			}
			known, isKnown := names[name]
			if !isKnown {
				known = name
			}
			members, here = append(members, Member{Name: name, Weight: weight}), append(here, known)
		}
		if len(members) == 0 {
			return nil, false
		}
		steps = append(steps, placement{newRendezvous(members), here})
	}
	return steps, len(steps) > 0
}
