package operate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// changesInCall bounds the changes in a call, for which the server does nothing else.
const changesInCall = 200

// The expected versions that are no IDs: any version, and none.
const (
	expectAny  = ""
	expectNone = "0"
)

// item is an argument of the script about one override: the known version with its log entry, a change to decide
// about, or both. Each may be missing.
type item struct {
	name   string
	known  *overrideVersion
	text   string
	change *decision
}

// decision is a change to decide about. One without a content removes.
type decision struct {
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
	known    *overrideState
	changes  []store.OverrideChange
	outcomes []store.OverrideOutcome
	writes   []*overrideWrite
	// shards are the shards to ask; away has the errors of the others.
	shards []*Shard
	away   []error
}

// overrideWrite is the write of a change under one name. The first shard of order that answers decides; the others take
// the version that it made.
type overrideWrite struct {
	decision
	name  string
	place int
	order []*Shard
	// isDecided is set once the first of order has answered. version is the version that it made, or nil, and text the
	// log entry.
	isDecided bool
	version   *overrideVersion
	text      string
	// has are the shards that have the version; errs are the errors of the others.
	has  []*Shard
	errs []error
}

// ChangeOverrides implements [store.Operable]. One shard decides about each change, and the others take the version that
// it made. Writers that reach different shards may both win: the later version stays. A mending writes it to shards
// that were away.
func (p *Operator) ChangeOverrides(ctx context.Context, changes []store.OverrideChange) []store.OverrideOutcome {
	l, unread := p.look(ctx)
	c := &changing{p: p, known: l.state, changes: changes, outcomes: make([]store.OverrideOutcome, len(changes))}
	for _, shard := range p.shards() {
		if err := l.failed[shard]; err != nil {
			c.away = append(c.away, fmt.Errorf("shard %s: %w", p.shardName(shard), err))
		} else {
			c.shards = append(c.shards, shard)
		}
	}
	room, now := p.most, p.now().UnixMicro() // without ended overrides, which count in mostKept
	for _, v := range l.state.all {
		if v.isLive(now) {
			room--
		}
	}
	for i := range changes {
		if err := c.plan(i, &room); err != nil {
			c.outcomes[i] = store.OverrideOutcome{Before: c.before(c.p.nameOf(changes[i].ID())), Err: err}
		}
	}
	c.decide(ctx)
	c.spread(ctx)
	made := learned{all: map[string]*overrideVersion{}}
	for _, w := range c.writes {
		if w.version != nil && w.version.isLater(made.all[w.name]) {
			made.all[w.name] = w.version
			made.log = append(made.log, w.text)
		}
	}
	p.learn(&made)
	c.settle(ctx)
	for i := range changes {
		// A shard that is away may have had it.
		if o := &c.outcomes[i]; changes[i].Removes && o.Before == nil && o.Err == nil {
			o.Err = unread
		}
	}
	return c.outcomes
}

// before returns the override of a name that is in force, as far as is known, or nil.
func (c *changing) before(name string) *store.Override {
	if v := c.known.all[name]; v.isLive(c.p.now().UnixMicro()) {
		return v.override
	}
	return nil
}

// plan adds the writes of a change.
func (c *changing) plan(i int, room *int) error {
	ch := &c.changes[i]
	name, now := c.p.nameOf(ch.ID()), c.p.now().UnixMicro()
	names := []string{name}
	// It may have been set before there was a key_secret.
	if plain := nameUnder(ask.Keys{}, ch.ID()); ch.Removes && c.known.all[plain] != nil && plain != name {
		names = append(names, plain)
	}
	if ch.Expected != store.AnyVersion && !slices.ContainsFunc(names, func(name string) bool {
		before := c.before(name)
		return before == nil && ch.Expected == "" || before != nil && before.Version == ch.Expected
	}) {
		return store.ErrChanged
	}
	d := decision{meta: metaOf(&ch.Override)}
	if !ch.Removes {
		if !c.known.all[name].isLive(now) {
			if *room < 1 {
				return fmt.Errorf("there are %d overrides, which is the most: remove some", c.p.most)
			}
			*room--
		}
		content, err := c.p.encode(&ch.Override)
		if err != nil {
			return err
		}
		d.content, d.lasts = content, max(left(ch.Until, c.p.now()), 1)
	}
	for _, name := range names {
		switch v := c.known.all[name]; {
		case ch.Expected == store.AnyVersion:
			d.expected = expectAny
		case v.isLive(now):
			d.expected = v.id
		default:
			d.expected = expectNone
		}
		c.writes = append(c.writes, &overrideWrite{decision: d, name: name, place: i, order: c.order(name), errs: slices.Clone(c.away)})
	}
	return nil
}

// order returns the shards in the order in which they decide about a name, which is that of all processes with
// these shards. During a resharding, the previous ones come first, because older configs know no others.
func (c *changing) order(name string) []*Shard {
	rank := func(shard *Shard) uint64 {
		hash := fnv.New64a()
		_, _ = hash.Write([]byte(name + "\n" + c.p.shardName(shard))) // it does not fail
		if len(c.p.previous) == 0 || slices.ContainsFunc(c.p.previous, func(m Member) bool { return m.Shard == shard }) {
			return hash.Sum64() / 2
		}
		return 1<<63 + hash.Sum64()/2
	}
	return slices.SortedFunc(slices.Values(c.shards), func(a, b *Shard) int { return cmp.Compare(rank(a), rank(b)) })
}

// decide asks the deciders. Where one does not answer, the next one decides.
func (c *changing) decide(ctx context.Context) {
	for {
		by := map[*Shard][]*overrideWrite{}
		for _, w := range c.writes {
			if !w.isDecided && len(w.order) > 0 {
				by[w.order[0]] = append(by[w.order[0]], w)
			}
		}
		if len(by) == 0 {
			return
		}
		c.sendAll(ctx, by, func(w *overrideWrite) item {
			return item{name: w.name, known: c.known.all[w.name], change: &w.decision}
		}, func(shard *Shard, w *overrideWrite, reply *frame, err error) {
			if w.isDecided = err == nil; w.isDecided {
				c.note(shard, w, reply)
			} else {
				w.errs, w.order = append(w.errs, err), w.order[1:]
			}
		})
	}
}

// spread writes the decided versions to the other shards.
func (c *changing) spread(ctx context.Context) {
	by := map[*Shard][]*overrideWrite{}
	for _, w := range c.writes {
		if w.version == nil {
			continue
		}
		for _, shard := range w.order[1:] {
			by[shard] = append(by[shard], w)
		}
	}
	c.sendAll(ctx, by, func(w *overrideWrite) item {
		return item{name: w.name, known: w.version, text: w.text}
	}, func(shard *Shard, w *overrideWrite, reply *frame, err error) {
		if err == nil && reply.word != "HAS" {
			err = fmt.Errorf("shard %s does not take it: %s", c.p.shardName(shard), map[string]string{"OVER": "by its clock it has ended", "FULL": "it has no room"}[reply.word])
		}
		if w.errs = append(w.errs, err); err == nil {
			w.has = append(w.has, shard)
		}
	})
}

// sendAll sends an item for each write to shards, at the same time, and calls note with each reply, or the error.
func (c *changing) sendAll(ctx context.Context, by map[*Shard][]*overrideWrite, itemOf func(w *overrideWrite) item, note func(shard *Shard, w *overrideWrite, reply *frame, err error)) {
	var mu sync.Mutex
	_ = c.p.atShards(slices.Collect(maps.Keys(by)), func(shard *Shard) error {
		items := make([]item, len(by[shard]))
		for i, w := range by[shard] {
			items[i] = itemOf(w)
		}
		var replies []frame
		err := contain.Run(func() (err error) {
			replies, err = c.p.send(ctx, shard, opChange, items)
			return err
		})
		if err != nil {
			err = fmt.Errorf("shard %s: %w", c.p.shardName(shard), err)
		}
		mu.Lock()
		defer mu.Unlock()
		for i, w := range by[shard] {
			if i < len(replies) {
				note(shard, w, &replies[i], nil)
			} else {
				note(shard, w, nil, err)
			}
		}
		return nil
	})
}

// note takes in the reply of the shard that decides.
func (c *changing) note(shard *Shard, w *overrideWrite, reply *frame) {
	o := &c.outcomes[w.place]
	content := ""
	var number, now, till, keep int64
	switch reply.word {
	case "FULL":
		o.Err = fmt.Errorf("shard %s remembers %d overrides, most of which have ended, and no more: wait until some would have ended by themselves", c.p.shardName(shard), c.p.mostKept())
	case "CHANGED":
		o.Err, content = store.ErrChanged, reply.texts[1]
	case "SET", "SAME", "REMOVED":
		if _, err := fmt.Sscan(reply.texts[0], &number, &now, &till, &keep); err != nil {
			o.Err = fmt.Errorf("%w: %w", errFrames, err)
			return
		}
		here := c.p.now()
		w.has, w.text = []*Shard{shard}, reply.texts[1]
		w.version = c.p.newVersion(w.name, number, instantHere(till, now, here), instantHere(keep, now, here), w.content)
		if w.content != "" {
			o.Version = w.version.id
		}
		if lines := strings.Split(w.text, "\n"); len(lines) == linesOfChange {
			content = lines[beforeInChange]
		}
	}
	if content != "" {
		o.Before, _ = c.p.decode(content)
	}
	if o.Before == nil && (content != "" || reply.word == "REMOVED") {
		id := c.changes[w.place].ID()
		o.Before, o.WasDamaged = &store.Override{Kind: id.Kind, Zone: id.Zone, ClientKey: id.ClientKey}, true
	}
}

// settle sets the outcomes: a change holds if one shard has it.
func (c *changing) settle(ctx context.Context) {
	replicas := map[*Shard]*store.Copies{}
	for _, w := range c.writes {
		for _, shard := range w.has {
			replicas[shard] = &store.Copies{}
		}
	}
	_ = c.p.atShards(slices.Collect(maps.Keys(replicas)), func(shard *Shard) error { // where INFO fails, no replica counts
		replicas[shard].Replicas, replicas[shard].OfReplicas = c.p.replicated(ctx, shard)
		return nil
	})
	for _, w := range c.writes {
		o := &c.outcomes[w.place]
		switch err := errors.Join(w.errs...); {
		case o.Err != nil:
		case w.version != nil:
			o.Warning = errors.Join(o.Warning, err)
			o.Copies = store.Copies{Shards: len(w.has), OfShards: len(c.p.shards())}
			for _, shard := range w.has {
				o.Copies.Replicas += replicas[shard].Replicas
				o.Copies.OfReplicas += replicas[shard].OfReplicas
			}
		case len(w.order) == 0:
			o.Err = err
		}
	}
}

// replicaPatience is the least time for which replicas are awaited that do not have a change yet.
const replicaPatience = 300 * time.Millisecond

// replicated returns how many of a shard's replicas have all that its primary has now.
func (p *Operator) replicated(ctx context.Context, shard *Shard) (has, of int) {
	at := shard.Owner(wire.SlotOf([]byte(p.asker.Keys.Overrides())))
	if at == nil || len(at.Replicas) == 0 {
		return 0, 0
	}
	ctx, cancel := context.WithTimeout(ctx, shard.Options.ReplyWithin(replicaPatience))
	defer cancel()
	primary, err := infoOf(ctx, at.Checks)
	var n atomic.Int64
	var all sync.WaitGroup
	for _, l := range at.Replicas {
		all.Go(func() {
			for err == nil {
				i, err := infoOf(ctx, l)
				if err == nil && i.offset() >= primary.offset() && primary.history().has(primary.offset()-1, i.history()) {
					n.Add(1)
					return
				}
				if err != nil || !wire.Pause(ctx, replicaPatience/10) {
					return
				}
			}
		})
	}
	all.Wait()
	return int(n.Load()), len(at.Replicas)
}

// mostKept is the number of overrides that a shard keeps, ended ones included.
func (p *Operator) mostKept() int { return 2 * p.most }

// ownFields is how many fields of the hash are none of overrides.
const ownFields = 5

// send sends items to a shard, by calls with the operation op and a last one that is a change. It returns a reply to
// each, or to the first ones and an error.
func (p *Operator) send(ctx context.Context, shard *Shard, op string, items []item) (replies []frame, err error) {
	for some := range slices.Chunk(items, changesInCall) {
		args := []any{p.mostKept() + ownFields}
		for _, it := range some {
			args = append(args, it.words(p.now())...)
		}
		if len(replies)+len(some) == len(items) {
			op = opChange
		}
		reply, err := p.runOverride(ctx, shard, op, args...)
		if err != nil {
			return replies, err
		}
		frames, err := framesOf(reply)
		if err == nil && len(frames) != len(some) {
			err = fmt.Errorf("%w: %d replies to %d items", wire.ErrReply, len(frames), len(some))
		}
		if err != nil {
			return replies, err
		}
		replies = append(replies, frames...)
	}
	return replies, nil
}

// words returns the arguments of the script.
func (it *item) words(now time.Time) []any {
	words := []any{it.name, "", "", it.text, "", "", "", ""}
	if v := it.known; v != nil {
		words[1], words[2] = wire.AppendPacked(nil, v.number, left(v.until, now), left(v.keep, now)), v.content
	}
	if d := it.change; d != nil {
		words[4], words[5], words[6], words[7] = wire.AppendPacked(nil, d.lasts), d.content, d.expected, d.meta
	}
	return words
}

// Audit implements [store.Operable]. It merges the logs of all shards with that of this process.
func (p *Operator) Audit(ctx context.Context) (all []store.Audited, err error) {
	var mu sync.Mutex
	var l learned
	err = p.atShards(p.shards(), func(shard *Shard) error {
		texts, err := p.logOf(ctx, shard)
		mu.Lock()
		defer mu.Unlock()
		l.log = append(l.log, texts...)
		return err
	})
	for _, change := range slices.Backward(p.learn(&l).log) {
		if a, ok := p.audited(change); ok {
			all = append(all, a)
		}
	}
	slices.SortStableFunc(all, func(a, b store.Audited) int { return cmp.Compare(b.At, a.At) })
	return all, err
}

// The lines of a change: version, instant, name, meta, and the content before and after.
const (
	linesOfChange  = 6
	nameInChange   = 2
	beforeInChange = 4
)

// audited reads a change, and reports whether it is one.
func (p *Operator) audited(text string) (a store.Audited, ok bool) {
	lines := strings.Split(text, "\n")
	if len(lines) != linesOfChange {
		return a, false
	}
	number, err := strconv.ParseInt(lines[0], 10, 64)
	millis, err2 := strconv.ParseInt(lines[1], 10, 64)
	var m meta
	if err = errors.Join(err, err2, json.Unmarshal([]byte(lines[3]), &m)); err != nil {
		return a, false
	}
	a = store.Audited{At: millis * 1000, By: m.By, Reason: m.Reason, ID: idOf(lines[nameInChange])}
	// One under another key_secret is left out.
	a.Before, _ = p.decode(lines[4])
	if a.After, _ = p.decode(lines[5]); a.After != nil {
		a.After.Version = p.newVersion(lines[nameInChange], number, store.NoEnd, 0, lines[5]).id
	}
	if o := cmp.Or(a.After, a.Before); o != nil {
		a.ID = o.ID() // The name may have a digest of a client key that is text.
	}
	return a, true
}
