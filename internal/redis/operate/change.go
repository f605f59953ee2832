package operate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	opChange = "change"
	// changesInCall bounds the changes in a call, for which the server does nothing else.
	changesInCall = 200
)

// The words for the script of what is expected: anything, or nothing; else a version, or several words.
const (
	expectAny  = ""
	expectNone = "0"
)

// item is a change for the script. One without a content removes; one without meta is not in the log.
type item struct {
	name     string
	lasts    int64
	content  string
	expected string
	meta     string
}

// meta is what the log says of a change.
type meta struct {
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
}

func metaOf(o *store.Override) string {
	text, _ := json.Marshal(meta{o.By, o.Reason}) // texts can be encoded
	return string(text)
}

// changing is a call of ChangeOverrides.
type changing struct {
	p        *Operator
	owners   func(clientKey string) (now, before *Shard)
	read     map[*Shard]*readOverrides
	changes  []store.OverrideChange
	outcomes []store.OverrideOutcome
	// refused are the changes that a shard does not make, by their places.
	refused []bool
	// steps are made one after the other: what decides whether a change is made comes first.
	steps [3]map[*Shard][]*planned
	// undone are items of the first step that the second has refused.
	undone map[*Shard][]*planned
}

// The steps of changes.
const (
	decide = iota
	follow
	cleanUp
)

func (p *Operator) newChanging(changes []store.OverrideChange, owners func(clientKey string) (now, before *Shard)) *changing {
	c := &changing{p: p, owners: owners, changes: changes, outcomes: make([]store.OverrideOutcome, len(changes)), refused: make([]bool, len(changes)), undone: map[*Shard][]*planned{}}
	for i := range c.steps {
		c.steps[i] = map[*Shard][]*planned{}
	}
	return c
}

// ChangeOverrides implements [store.Operable]. Overrides are set on the client's shard, and on the one
// before a resharding: Caddys with the config before this one read that one only, and write it first, so
// that it decides between two writers, unless it is away: then the client's shard does. They are removed on all shards, because the shard of a kept key is
// not known.
func (p *Operator) ChangeOverrides(ctx context.Context, changes []store.OverrideChange, owners func(clientKey string) (now, before *Shard)) []store.OverrideOutcome {
	c := p.newChanging(changes, owners)
	// What cannot be read is left to the script.
	c.read, _ = p.readAll(ctx)
	for i := range changes {
		if err := c.plan(i); err != nil {
			c.outcomes[i], c.refused[i] = store.OverrideOutcome{Before: c.latest(c.p.nameOf(changes[i].ID())), Err: err}, true
		}
	}
	for step, items := range c.steps {
		c.carryOut(ctx, items, func(it *planned) bool {
			return c.refused[it.place] || step == cleanUp && c.outcomes[it.place].Version == ""
		})
	}
	c.carryOut(ctx, c.undone, func(*planned) bool { return false })
	for i := range changes {
		c.settle(i)
	}
	return c.outcomes
}

// settle makes the error of a shard that is away a warning if another one has made the change, because it
// holds then: all shards are read.
func (c *changing) settle(i int) {
	o := &c.outcomes[i]
	isMade := o.Version != ""
	if c.changes[i].Removes {
		isMade = o.Before != nil
	}
	if o.Err != nil && isMade && !c.refused[i] {
		o.Warning, o.Err = o.Err, nil
	}
}

// planned is an item for a change, by its place.
type planned struct {
	item
	place int
	// role says what the reply means for the outcome.
	role role
	// undo is the item of the first step that is undone if this one is refused, on the shard first.
	undo  *planned
	first *Shard
	// was is the content that this item has replaced, which would have lasted for wasLasts.
	was      string
	wasLasts int64
	isMade   bool
}

// role is that of an item in its change.
type role uint8

const (
	// main items are the change; copied ones repeat it on another shard.
	main role = iota
	copied
	// silent items do not matter for the outcome, and undoing ones only if they fail.
	silent
	undoing
)

// plan adds what has to be done for a change.
func (c *changing) plan(i int) error {
	ch := &c.changes[i]
	name := c.p.nameOf(ch.ID())
	if ch.Removes {
		return c.planRemoval(i, name)
	}
	content, err := c.p.encode(&ch.Override)
	if err != nil {
		return err
	}
	now, before := c.owners(ch.ClientKey)
	if before == nil {
		before = now
	}
	set := item{name: name, lasts: c.p.lasts(&ch.Override), content: content, meta: metaOf(&ch.Override)}
	if set.expected, _, err = c.expected(ch, before, name); err != nil {
		return err
	}
	first := &planned{item: set, place: i, role: main}
	c.add(decide, before, first)
	if before != now {
		if set.expected, _, err = c.expected(ch, now, name); err != nil {
			return err
		}
		c.add(follow, now, &planned{item: set, place: i, role: copied, undo: first, first: before})
	}
	for shard, read := range c.read {
		// Another shard may have owned the client. What cannot be removed there is older.
		if there := read.all[name]; shard != now && shard != before && there != nil {
			c.add(cleanUp, shard, &planned{item: item{name: name, expected: c.p.expecting(there)}, place: i, role: silent})
		}
	}
	return nil
}

func (c *changing) add(step int, shard *Shard, it *planned) {
	c.steps[step][shard] = append(c.steps[step][shard], it)
}

// planRemoval adds the removal of a name, which may have been written before there was a key_secret.
func (c *changing) planRemoval(i int, name string) error {
	ch := &c.changes[i]
	names := []string{name}
	if len(c.p.asker.Keys.Secret) > 0 && ch.ClientKey != "" && !ask.IsSecret(ch.ClientKey) {
		names = append(names, nameUnder(ask.Keys{}, ch.ID()))
	}
	for shard := range c.read {
		step := follow
		if slices.ContainsFunc(c.p.previous, func(m Member) bool { return m.Shard == shard }) {
			step = decide
		}
		for _, name := range names {
			expected, isThere, err := c.expected(ch, shard, name)
			if err != nil {
				return err
			}
			if isThere {
				c.add(step, shard, &planned{item: item{name: name, expected: expected, meta: metaOf(&ch.Override)}, place: i, role: main})
			}
		}
	}
	return nil
}

// expected returns what the script on a shard has to expect of a name, and whether there may be something,
// or an error if what was read last is another version than the change expects.
func (c *changing) expected(ch *store.OverrideChange, shard *Shard, name string) (expected string, isThere bool, err error) {
	if ch.Expected == store.AnyVersion {
		return expectAny, true, nil
	}
	version := ""
	if latest := c.latest(name); latest != nil {
		version = latest.Version
	}
	if version != ch.Expected {
		return "", false, store.ErrChanged
	}
	read := c.read[shard]
	if there := read.all[name]; there != nil {
		return c.p.expecting(there), true, nil
	}
	if d, ok := read.damaged[name]; ok {
		return d.version, true, nil
	}
	return expectNone, false, nil
}

// expecting returns what the script on a shard has to expect where an override was read. By the server's
// clock, one whose end is near or past may be gone, or last.
func (p *Operator) expecting(there *store.Override) string {
	if there.Until > p.now().Add(sameClock).UnixMicro() {
		return there.Version
	}
	return expectNone + " " + there.Version
}

// latest returns the override of that name that is in force, as it was read last, or nil.
func (c *changing) latest(name string) (latest *store.Override) {
	now := c.p.now().UnixMicro()
	for _, read := range c.read {
		if o := read.all[name]; o != nil && o.Until > now && (latest == nil || o.Since > latest.Since) {
			latest = o
		}
	}
	return latest
}

// carryOut sends items to their shards at the same time, but for those to skip, and notes the outcomes.
func (c *changing) carryOut(ctx context.Context, items map[*Shard][]*planned, skips func(it *planned) bool) {
	// The first replies change what is to skip.
	for shard := range items {
		items[shard] = slices.DeleteFunc(items[shard], skips)
	}
	var mu sync.Mutex
	var calls sync.WaitGroup
	for shard, all := range items {
		calls.Go(func() {
			plain := make([]item, len(all))
			for i := range all {
				plain[i] = all[i].item
			}
			var replies []frame
			err := contain.Run(func() (err error) {
				replies, err = c.p.send(ctx, shard, plain)
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			for i, it := range all {
				switch {
				case i < len(replies):
					c.note(shard, it, replies[i])
				case it.role == undoing:
					c.fail(it.place, fmt.Errorf("shard %s has taken it and did not answer when it was to be undone, so it may hold: end it, or set what was there: %w", c.p.shardName(shard), err))
				case it.role != silent:
					c.fail(it.place, fmt.Errorf("shard %s: %w", c.p.shardName(shard), err))
				}
			}
		})
	}
	calls.Wait()
}

func (c *changing) fail(place int, err error) {
	c.outcomes[place].Err = errors.Join(c.outcomes[place].Err, err)
}

// note takes in the reply of a shard's script to an item.
func (c *changing) note(shard *Shard, it *planned, reply frame) {
	if it.role == silent || it.role == undoing {
		return // Whoever has changed what was to be undone has ended it.
	}
	content := reply.texts[1]
	switch reply.word {
	case "CHANGED":
		c.refuse(it, store.ErrChanged)
	case "FULL":
		c.refuse(it, fmt.Errorf("there are %d overrides on this shard, which is the most: remove some", c.p.most))
	case "SET":
		it.isMade, it.was = true, content
		it.wasLasts, _ = strconv.ParseInt(reply.texts[0], 10, 64)
		fallthrough
	case "SAME":
		c.outcomes[it.place].Version = versionOf(it.content)
	}
	// The other shard tells what was there if the first is away.
	if it.role == main || c.outcomes[it.place].Err != nil {
		c.noteBefore(it, c.read[shard].damaged[it.name].err != nil || reply.word == "REMOVED", content)
	}
}

// noteBefore takes in what was there before, and whether there was something of which nothing is known.
func (c *changing) noteBefore(it *planned, wasThere bool, content string) {
	outcome := &c.outcomes[it.place]
	if content != "" {
		outcome.Before, _ = c.p.decode(content)
		wasThere = true
	}
	if outcome.Before == nil && wasThere {
		id := c.changes[it.place].ID()
		outcome.Before, outcome.WasDamaged = &store.Override{Kind: id.Kind, Zone: id.Zone, ClientKey: id.ClientKey}, true
	}
}

// refuse notes that a shard does not make a change. What the one before has made is undone: it gets back the
// bytes that were there, which may be damaged or of another key_secret.
func (c *changing) refuse(it *planned, err error) {
	c.refused[it.place] = true
	c.fail(it.place, err)
	if it.undo == nil || !it.undo.isMade {
		return
	}
	c.undone[it.first] = append(c.undone[it.first], &planned{place: it.place, role: undoing, item: item{
		name: it.name, lasts: it.undo.wasLasts, content: it.undo.was, expected: versionOf(it.content),
		meta: metaOf(&store.Override{By: c.changes[it.place].By, Reason: "undone: the client's new shard did not take it"}),
	}})
}

func (p *Operator) shardName(shard *Shard) string {
	all := slices.Concat(p.members, p.previous)
	if i := slices.IndexFunc(all, func(m Member) bool { return m.Shard == shard }); i >= 0 {
		return all[i].Name
	}
	return ""
}

// send makes changes on a shard, and returns a reply to each, or to the first ones and an error.
func (p *Operator) send(ctx context.Context, shard *Shard, items []item) (replies []frame, err error) {
	for some := range slices.Chunk(items, changesInCall) {
		args := []any{strconv.Itoa(p.most)}
		for _, it := range some {
			args = append(args, it.name, wire.AppendPacked(nil, it.lasts), it.content, it.expected, it.meta)
		}
		reply, err := p.runOverride(ctx, shard, opChange, args...)
		if err != nil {
			return replies, err
		}
		frames, err := framesOf(reply)
		if err == nil && len(frames) != len(some) {
			err = fmt.Errorf("%w: %d replies to %d changes", wire.ErrReply, len(frames), len(some))
		}
		if err != nil {
			return replies, err
		}
		replies = append(replies, frames...)
	}
	return replies, nil
}

// Audit implements [store.Operable]. A change that was made on two shards is shown once.
func (p *Operator) Audit(ctx context.Context) (all []store.Audited, err error) {
	var mu sync.Mutex
	seen := map[string]bool{}
	err = p.atAllShards(func(shard *Shard) error {
		entries, err := p.logOf(ctx, shard)
		mu.Lock()
		defer mu.Unlock()
		for _, entry := range slices.Backward(entries) { // Those of one millisecond keep their order.
			a, ok := p.audited(entry)
			if !ok {
				continue
			}
			if change := strings.SplitN(entry, "\n", 3)[2]; !seen[change] {
				seen[change] = true
				all = append(all, a)
			}
		}
		return err
	})
	slices.SortStableFunc(all, func(a, b store.Audited) int { return cmp.Compare(b.At, a.At) })
	return all[:min(len(all), store.MaxAudited)], err
}

// linesOfEntry are the lines of an entry of the log: number, instant, name, meta, and the content before and after.
const linesOfEntry = 6

// audited reads an entry of the log, and reports whether it is a change.
func (p *Operator) audited(entry string) (a store.Audited, ok bool) {
	lines := strings.Split(entry, "\n")
	if len(lines) != linesOfEntry {
		return a, false
	}
	millis, err := strconv.ParseInt(lines[1], 10, 64)
	var m meta
	if err = errors.Join(err, json.Unmarshal([]byte(lines[3]), &m)); err != nil {
		return a, false
	}
	a = store.Audited{At: millis * 1000, By: m.By, Reason: m.Reason, ID: idOf(lines[2])}
	// One under another key_secret is left out.
	a.Before, _ = p.decode(lines[4])
	a.After, _ = p.decode(lines[5])
	if o := cmp.Or(a.After, a.Before); o != nil {
		a.ID = o.ID() // The name may have a digest of a client key that is text.
	}
	return a, true
}
