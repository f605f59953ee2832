package stores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// mostZonesNamed is how many zones are named on which a process does not agree.
const mostZonesNamed = 20

// another is another process with one config, as it was met at the shards.
type another struct {
	*seenPresence
	who string
	// names are those that its shards have here, by the names that they have there, as far as it was met; "" is one
	// at which it tells of itself, where it is not met here.
	names map[string]string
	// apart are its shards of that kind.
	apart []string
}

// readDetails reads the parts of other configs that differ from this one, a few at a time.
func (p *presence) readDetails(ctx context.Context) error {
	type part struct {
		of         store.Part
		at, digest string
	}
	var missing []part
	p.mu.Lock()
	used := map[string]bool{}
	for _, s := range p.seen {
		for of, digest := range s.Digests {
			if s.ID == ProcessID || p.digests[of] == "" || p.digests[of] == digest || used[digest] {
				continue
			}
			used[digest] = true
			if _, isKnown := p.details[digest]; !isKnown {
				missing = append(missing, part{of, s.Here, digest})
			}
		}
	}
	maps.DeleteFunc(p.details, func(digest string, _ store.Details) bool { return !used[digest] })
	p.mu.Unlock()
	var errs error
	for _, m := range missing[:min(len(missing), mostDetails)] {
		details, err := p.kept.Details(ctx, m.at, m.digest)
		if errs = errors.Join(errs, err); details == nil {
			continue
		}
		p.mu.Lock()
		if zones := p.parts[store.PartZones]; m.of == store.PartZones {
			maps.DeleteFunc(details, func(name, definition string) bool {
				here, isHere := zones[name]
				return !isHere || here == definition
			})
		}
		p.details[m.digest] = details
		p.mu.Unlock()
	}
	return errs
}

// judge finds the disagreements.
func (p *presence) judge(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	found, shares := map[string]bool{}, map[string]float64{}
	for _, o := range p.others(now) {
		for _, text := range slices.Concat(p.ofKeys(o), p.ofZones(o)) {
			found[text] = true
		}
		if text := p.ofShards(o, shares); text != "" {
			found[text] = true
		}
	}
	p.disagreements = slices.Sorted(maps.Keys(found))
}

// others returns the other processes, each once for each config that it tells of. mu is held.
func (p *presence) others(now time.Time) map[string]*another {
	all, at := map[string]*another{}, map[string]map[string]bool{}
	full := map[string]int{}
	for _, s := range p.seen {
		if s.ID == ProcessID {
			continue
		}
		key := fmt.Sprint(s.ID, " ", s.Secret, " ", s.Layout, " ", s.Digests)
		o := all[key]
		if o == nil {
			o = &another{who: "the Caddy on " + s.Process, names: map[string]string{}}
			all[key] = o
		}
		if o.seenPresence == nil || o.Beat < s.Beat {
			o.seenPresence = &s
		}
		if !p.twins[[2]string{s.Here, s.Shard}] {
			// The names of twins say nothing: they are a problem of their own.
			o.names[s.Shard] = s.Here
		}
		if at[s.ID] == nil {
			at[s.ID] = map[string]bool{}
		}
		at[s.ID][s.Here] = true
		full[s.Here]++
	}
	for _, o := range all {
		for _, name := range o.At {
			_, isMet := o.names[name]
			isLooked := p.looks[name].last.Equal(now) && full[name] < store.MaxPresent
			// Its beat after this one's look has reached all that it names.
			if !isMet && isLooked && o.isAlive && !at[o.ID][name] {
				o.names[name], o.apart = "", append(o.apart, name)
			}
		}
	}
	return all
}

// ofKeys returns the disagreements on how buckets are stored.
func (p *presence) ofKeys(o *another) (texts []string) {
	if p.own.ID == "" {
		return nil // nothing has arrived yet
	}
	if o.Secret != p.own.Secret {
		texts = append(texts, fmt.Sprintf("%s has another key_secret, so each counts the same clients by itself: give both the same one", o.who))
	}
	if o.Layout != "" && o.Layout != p.own.Layout {
		texts = append(texts, fmt.Sprintf("%s is of a version with layout %s of its buckets, not %s, so each counts the same clients by itself: run the same version", o.who, o.Layout, p.own.Layout))
	}
	return texts
}

// ofZones returns the disagreements on zones. mu is held.
func (p *presence) ofZones(o *another) (texts []string) {
	names := slices.Sorted(maps.Keys(p.details[o.Digests[store.PartZones]]))
	const remedy = "so their clients have two limits: load the same definition, or give one zone another name"
	for _, name := range names[:min(len(names), mostZonesNamed)] {
		texts = append(texts, fmt.Sprintf("zone %s is defined otherwise for %s, %s", name, o.who, remedy))
	}
	if more := len(names) - mostZonesNamed; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more zones are defined otherwise for %s, %s", more, o.who, remedy))
	}
	return texts
}

// ofShards returns the disagreement on shards, or "" if each client has a shard that counts it for both. shares has
// those that are computed already, because many processes may differ alike. mu is held.
func (p *presence) ofShards(o *another, shares map[string]float64) string {
	digest := o.Digests[store.PartShards]
	theirs, isKnown := p.details[digest]
	if digest == p.digests[store.PartShards] {
		if theirs, isKnown = p.parts[store.PartShards], true; o.namesAlike() {
			return ""
		}
	}
	share := "clients"
	if isKnown {
		key := fmt.Sprint(digest, o.names)
		apart, isComputed := shares[key]
		if !isComputed {
			if apart, isKnown = p.kept.Apart(theirs, o.names); isKnown {
				shares[key] = apart
			}
		}
		switch {
		case isKnown && apart == 0:
			return ""
		case isKnown:
			share = percent(apart) + " of the clients"
		}
	}
	differences := differencesOf(p.parts[store.PartShards], theirs, o.names)
	switch {
	case !isKnown && digest != "":
		differences = append(differences, "has other shards or weights")
	case len(differences) == 0:
		return ""
	}
	return fmt.Sprintf("%s %s, so %s are counted on different servers: give all Caddys the same shards, by the same names and weights", o.who, strings.Join(differences, ", "), share)
}

// namesAlike reports whether its shards, as far as they were met, have the names that they have here.
func (o *another) namesAlike() bool {
	for name, here := range o.names {
		if name != here {
			return false
		}
	}
	return true
}

// percent returns a share that is not 0.
func percent(share float64) string { return fmt.Sprintf("%d %%", max(int(math.Round(100*share)), 1)) }

// differencesOf says what another config has or does otherwise. Its names mean the shards in names here, if they
// are not the same.
func differencesOf(mine, theirs store.Details, names map[string]string) (all []string) {
	has := map[string]bool{}
	known := maps.Clone(names)
	if known == nil {
		known = map[string]string{}
	}
	for name := range theirs {
		if _, isMet := known[name]; !isMet {
			known[name] = name
		}
	}
	for _, name := range slices.Sorted(maps.Keys(known)) {
		here := known[name]
		has[cmp.Or(here, name)] = true
		weight, isHere := mine[here]
		switch other := theirs[name]; {
		case here == "":
			all = append(all, fmt.Sprintf("has shard %s at another server", name))
		case here != name:
			all = append(all, fmt.Sprintf("calls shard %s %s", here, name))
		case !isHere:
			all = append(all, fmt.Sprintf("also has shard %s", name))
		case other != "" && other != weight:
			all = append(all, fmt.Sprintf("has the weight %s for shard %s, not %s", other, name, weight))
		}
	}
	if theirs == nil {
		return all
	}
	for _, name := range slices.Sorted(maps.Keys(mine)) {
		if !has[name] {
			all = append(all, "lacks shard "+name)
		}
	}
	return all
}

// lossSince returns how many clients have lost their counts because the config before counted them on other shards, or
// "" if none have.
func (p *presence) lossSince(before *placed) string {
	names := renamed(before.shards, p.kept.Shards())
	share, ok := p.kept.Apart(before.weights, names)
	if !ok || share == 0 {
		return ""
	}
	return fmt.Sprintf("this Caddy's config before the last reload %s, so %s of the clients begin anew: keep the names of shards, and write what their weights were, as in weight 1 was 0: then former counts are found",
		strings.Join(differencesOf(p.parts[store.PartShards], before.weights, names), ", "), percent(share))
}

// renamed returns the names that shards have now, by those before, where they differ: a shard is known by an address
// that stays or, if it has none, by its name.
func renamed(before, now []store.ShardFigures) map[string]string {
	owners := map[string]string{}
	for i := range now {
		for j := range now[i].Servers {
			owners[now[i].Servers[j].Address] = now[i].Name
		}
	}
	names, taken := map[string]string{}, map[string]bool{}
	for i := range before {
		for j := range before[i].Servers {
			if name := owners[before[i].Servers[j].Address]; name != "" {
				names[before[i].Name], taken[name] = name, true
			}
		}
	}
	for i := range before {
		name := before[i].Name
		if _, stays := names[name]; !stays && taken[name] {
			// Another one has its name now.
			names[name] = ""
		}
	}
	return names
}
