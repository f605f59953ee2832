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

// mostNamed is how many zones, or differences of shards, are named on which a process does not agree.
const mostNamed = 20

// another is another process with one config, as it was met at the shards.
type another struct {
	*seenPresence
	who string
	// names maps the names of its shards to the names here, as far as it was met; "" is a shard at which it tells
	// of itself and is not met here.
	names map[string]string
	// apart are its shards that names maps to "".
	apart []string
	// weights are the weights of its shards; nil if they are not known.
	weights store.Details
	share   share
}

// share is the share of clients that are counted apart, if the weights mean something.
type share struct {
	of      float64
	isKnown bool
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
			continue // another process may have it at another time
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
	others, isReady := p.others(now), p.digests != nil
	p.mu.Unlock()
	if !isReady {
		return // a zone was added since: the next beat has it
	}
	p.measure(others)
	p.mu.Lock()
	defer p.mu.Unlock()
	found := map[string]bool{}
	for _, o := range others {
		for _, text := range slices.Concat(p.ofKeys(o), p.ofZones(o)) {
			found[text] = true
		}
		if text := p.ofShards(o); text != "" {
			found[text] = true
		}
	}
	p.disagreements = slices.Sorted(maps.Keys(found))
}

// measure sets the shares of clients, of which it computes a few each time: other programs may have written the weights.
// The lock is not held, because that takes long.
func (p *presence) measure(others map[string]*another) {
	shares, computed := map[string]share{}, 0
	for _, o := range others {
		if o.weights == nil {
			continue
		}
		key := fmt.Sprint(o.Digests[store.PartShards], o.names)
		known, isComputed := p.shares[key]
		if !isComputed {
			known, isComputed = shares[key]
		}
		if !isComputed && computed < mostDetails {
			known.of, known.isKnown = p.kept.Apart(o.weights, o.names)
			computed, isComputed = computed+1, true
		}
		if isComputed {
			shares[key], o.share = known, known
		}
	}
	p.shares = shares
}

// others returns the other processes, each once for each config that it tells of. mu is held.
func (p *presence) others(now time.Time) map[string]*another {
	all, at := map[string]*another{}, map[string]map[string]bool{}
	full := map[string]bool{}
	// The last beat decides which shard a name means.
	inOrder := slices.SortedFunc(maps.Values(p.seen), func(a, b seenPresence) int {
		return cmp.Or(cmp.Compare(a.Beat, b.Beat), cmp.Compare(a.Here, b.Here))
	})
	for _, s := range inOrder {
		// A process of this host with a single beat may be dead. In a container this process may have its number.
		if s.ID == ProcessID || !s.isAlive && !mayRun(s.Process) {
			continue
		}
		key := fmt.Sprint(s.ID, " ", s.Secret, " ", s.Layout, " ", s.Digests)
		o := all[key]
		if o == nil {
			o = &another{who: fmt.Sprintf("the Caddy on %.100s", s.Process), names: map[string]string{}}
			all[key] = o
		}
		o.seenPresence = &s
		if !p.twins[[2]string{s.Here, s.Shard}] {
			// The names of twins say nothing: they are a problem of their own.
			o.names[s.Shard] = s.Here
		}
		if at[s.ID] == nil {
			at[s.ID] = map[string]bool{}
		}
		at[s.ID][s.Here] = true
		full[s.Here] = s.Full
	}
	for _, o := range all {
		for _, name := range o.At {
			_, isMet := o.names[name]
			isLooked := p.looks[name].last.Equal(now) && !full[name]
			// Its beat after this one's look has reached all that it names.
			if !isMet && isLooked && o.isAlive && !at[o.ID][name] {
				o.names[name], o.apart = "", append(o.apart, name)
			}
		}
		digest := o.Digests[store.PartShards]
		if o.weights = p.details[digest]; digest == p.digests[store.PartShards] {
			o.weights = p.parts[store.PartShards]
		}
	}
	return all
}

// ofKeys returns the disagreements on how buckets are stored.
func (p *presence) ofKeys(o *another) (texts []string) {
	if len(o.Digests) == 0 {
		texts = append(texts, o.who+" is of another version, whose zones and weights are not compared: run the same version")
	}
	if p.own.ID == "" {
		return texts // nothing has arrived yet
	}
	if o.Secret != p.own.Secret {
		const remedy = "give both the same one"
		texts = append(texts, fmt.Sprintf("%s has another key_secret, so each counts the same clients by itself: %s", o.who, remedy))
	}
	if o.Layout != "" && o.Layout != p.own.Layout {
		const remedy = "run the same version"
		texts = append(texts, fmt.Sprintf("%s is of a version with layout %.100s of its buckets, not %s, so each counts the same clients by itself: %s", o.who, o.Layout, p.own.Layout, remedy))
	}
	return texts
}

// ofZones returns the disagreements on zones. mu is held.
func (p *presence) ofZones(o *another) (texts []string) {
	names := slices.Sorted(maps.Keys(p.details[o.Digests[store.PartZones]]))
	const remedy = "load the same definition, or give one zone another name"
	for _, name := range names[:min(len(names), mostNamed)] {
		texts = append(texts, fmt.Sprintf("zone %s is defined otherwise for %s, so their clients have two limits: %s", name, o.who, remedy))
	}
	if more := len(names) - mostNamed; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more zones are defined otherwise for %s, so their clients have two limits: %s", more, o.who, remedy))
	}
	return texts
}

// ofShards returns the disagreement on shards, or "" if each client has a shard that counts it for both. mu is held.
func (p *presence) ofShards(o *another) string {
	digest := o.Digests[store.PartShards]
	isAlike := digest == p.digests[store.PartShards] && o.namesAlike()
	if isAlike || o.share.isKnown && o.share.of == 0 {
		return ""
	}
	mine, clients, weights := p.parts[store.PartShards], "clients", store.Details(nil)
	if o.share.isKnown {
		clients, weights = percent(o.share.of)+" of the clients", o.weights
	}
	differences := textsOf(differencesOf(mine, weights, o.names))
	switch {
	case !o.share.isKnown && digest != "":
		differences = append(differences, "has other shards or weights")
	case len(differences) == 0:
		return ""
	}
	const remedy = "give all Caddys the same shards, by the same names and weights"
	return fmt.Sprintf("%s %s, so %s are counted on different servers: %s", o.who, strings.Join(differences, ", "), clients, remedy)
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

// difference is one of the shards of another config.
type difference struct {
	text string
	// remedy is how a config after the other one finds its counts. removed is the shard that it has no more, if that is
	// the difference.
	remedy, removed string
}

// textsOf returns the texts of differences, up to a number.
func textsOf(differences []difference) (texts []string) {
	for _, d := range differences[:min(len(differences), mostNamed)] {
		texts = append(texts, d.text)
	}
	if more := len(differences) - mostNamed; more > 0 {
		texts = append(texts, fmt.Sprintf("differs in %d more", more))
	}
	return texts
}

// differencesOf says what another config has or does otherwise. Its names mean the shards in names here, if they
// are not the same. Others may have written them, of any length.
func differencesOf(mine, theirs store.Details, names map[string]string) (all []difference) {
	add := func(remedy, format string, args ...any) {
		all = append(all, difference{text: fmt.Sprintf(format, args...), remedy: remedy})
	}
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
	taken := slices.Collect(maps.Values(names))
	const nameRemedy = "keep the names of shards"
	const atAnother = "has shard %.100s at another server"
	for _, name := range slices.Sorted(maps.Keys(known)) {
		here := known[name]
		has[cmp.Or(here, name)] = true
		weight, isHere := mine[here]
		other := theirs[name]
		was := strings.Replace(other, " was", "", 1)
		switch {
		case here == "" && mine[name] != "" && !slices.Contains(taken, name):
			add(fmt.Sprintf("keep the server of shard %s (weight 0 was %s) and add the new one as another shard (weight %s was 0)",
				name, was, currentOf(mine[name])), atAnother, name)
			all[len(all)-1].removed = name
		case here == "":
			add(nameRemedy, atAnother, name)
		case here != name:
			add(nameRemedy, "calls shard %.100s by the name %.100s", here, name)
		case !isHere:
			add(fmt.Sprintf("keep shard %s with weight 0 was %s", name, was), "also has shard %.100s", name)
			all[len(all)-1].removed = name
		case other != "" && other != weight:
			add(fmt.Sprintf("write weight %s was %s in shard %s", currentOf(weight), was, name), "has the weight %.100s for shard %.100s, not %s", other, name, weight)
		}
	}
	if theirs == nil {
		return all
	}
	for _, name := range slices.Sorted(maps.Keys(mine)) {
		if !has[name] {
			add(fmt.Sprintf("write weight %s was 0 in shard %s", currentOf(mine[name]), name), "lacks shard %s", name)
		}
	}
	return all
}

// currentOf returns the weight without the former ones.
func currentOf(weight string) string {
	current, _, _ := strings.Cut(weight, " was ")
	return current
}

// lossSince returns how many clients have lost their counts because the config before counted them on other shards, or
// "" if none have. A shard that was removed and does not answer gets no remedy: on_error would decide for its clients.
// Whether another server is a copy, or the former one after a restart, is not known.
func (p *presence) lossSince(before *placed, now []store.ShardFigures) string {
	names := renamed(before.shards, now)
	apart, ok := p.kept.Apart(before.weights, names)
	if !ok || apart == 0 {
		return ""
	}
	mine := p.parts[store.PartShards]
	differences := differencesOf(mine, before.weights, names)
	var (
		remedies, lost []string
		unless         string
	)
	for _, d := range differences[:min(len(differences), mostNamed)] {
		if mine[d.removed] != "" {
			unless = " unless a new server has the data of the former one"
		}
		switch {
		case d.removed != "" && isDown(before.shards, d.removed):
			lost = append(lost, d.removed)
		case !slices.Contains(remedies, d.remedy):
			remedies = append(remedies, d.remedy)
		}
	}
	text := fmt.Sprintf("this Caddy's config before the last reload %s, so %s of the clients begin anew%s", strings.Join(textsOf(differences), ", "), percent(apart), unless)
	if len(lost) > 0 {
		text += ": the counts of shard " + strings.Join(lost, ", ") + " are lost" + unless + ", because its servers do not answer"
	}
	if len(remedies) > 0 {
		text += ": to find former counts again, " + strings.Join(remedies, ", and ")
	}
	return text
}

// isDown reports whether calls of the primary of a shard fail.
func isDown(shards []store.ShardFigures, name string) bool {
	i := slices.IndexFunc(shards, func(s store.ShardFigures) bool { return s.Name == name })
	if i < 0 {
		return false
	}
	return !shards[i].Found && shards[i].SearchFault != nil || slices.ContainsFunc(shards[i].Servers, func(s store.ServerFigures) bool {
		return s.Role == store.RolePrimary && s.State == store.ServerLeftOut
	})
}

// renamed returns the present names of shards by their former names. A shard is recognized by an address that stays and
// belongs to no other shard, or, without one, by its name. "" means that the counts of the shard are not found.
func renamed(before, now []store.ShardFigures) map[string]string {
	then, owners := ownersOf(before), ownersOf(now)
	names, taken := map[string]string{}, map[string]bool{}
	for i := range before {
		name := before[i].Name
		for j := range before[i].Servers {
			address := before[i].Servers[j].Address
			switch shards := owners[address]; {
			case slices.Contains(shards, name):
				names[name] = name
			case names[name] == "" && len(shards) == 1 && len(then[address]) == 1:
				names[name] = shards[0]
			}
		}
		taken[names[name]] = true
	}
	for i := range before {
		name := before[i].Name
		if _, stays := names[name]; stays {
			continue
		}
		if isReplaced, _ := replacedBy(&before[i], now); isReplaced || taken[name] {
			names[name] = ""
		}
	}
	return names
}

// replacedBy reports whether the shard has other servers now, and whether that is known: until a server is met it may be
// the old one at a new address, or a former replica.
func replacedBy(before *store.ShardFigures, all []store.ShardFigures) (isReplaced, isKnown bool) {
	i := slices.IndexFunc(all, func(s store.ShardFigures) bool { return s.Name == before.Name })
	if i < 0 {
		return false, true
	}
	now, isKnownBefore, isFound := &all[i], false, len(all[i].Servers) > 0
	for _, then := range before.Servers {
		isKnownBefore = isKnownBefore || then.ID != ""
		if slices.ContainsFunc(now.Servers, func(s store.ServerFigures) bool {
			return s.Address == then.Address || s.ID != "" && s.ID == then.ID
		}) {
			return false, true
		}
	}
	for _, server := range now.Servers {
		isFound = isFound && (server.ID != "" || server.Role == store.RoleReplica)
	}
	return isFound && isKnownBefore, isFound || !isKnownBefore
}

// areComparable reports whether [replacedBy] knows about each former shard.
func areComparable(before, now []store.ShardFigures) bool {
	for i := range before {
		if _, isKnown := replacedBy(&before[i], now); !isKnown {
			return false
		}
	}
	return true
}

// ownersOf returns the names of the shards at each address.
func ownersOf(shards []store.ShardFigures) map[string][]string {
	owners := map[string][]string{}
	for i := range shards {
		for j := range shards[i].Servers {
			if address, name := shards[i].Servers[j].Address, shards[i].Name; !slices.Contains(owners[address], name) {
				owners[address] = append(owners[address], name)
			}
		}
	}
	return owners
}
