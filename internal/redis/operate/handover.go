package operate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const opLog = "log"

// handOver copies what a shard has that the store gives up to shards that it keeps: its overrides, each to
// any one, because all are read, and the log of changes. What was ended there since is ended here as well: who
// ends it may not know this shard. What was not taken is an error, and stays where it is. It notes in read
// what was handed over: the log is so once for a version, however often there is no room.
func (p *Operator) handOver(ctx context.Context, shard *Shard, read *readOverrides) error {
	if !read.isLogHandedOver {
		if err := p.handLogOver(ctx, shard); err != nil {
			return err
		}
		read.isLogHandedOver = true
	}
	h := handing{p: p, there: map[*Shard]*readOverrides{}, room: map[*Shard]int{}, items: map[*Shard][]item{}}
	now := p.now().UnixMicro()
	for _, m := range p.members {
		there, err := p.overridesOf(ctx, m.Shard)
		if err != nil {
			return fmt.Errorf("hand overrides over to shard %s: %w", m.Name, err)
		}
		h.there[m.Shard], h.room[m.Shard] = there, p.most-len(there.damaged)
		for _, o := range there.all {
			if o.Until > now {
				h.room[m.Shard]--
			}
		}
	}
	if err := h.learnEnds(ctx, read); err != nil {
		return err
	}
	for name, o := range read.all {
		if o.Until > now {
			if err := h.place(name, o); err != nil {
				return err
			}
		}
	}
	if err := h.send(ctx); err != nil {
		return err
	}
	if err := h.end(ctx, shard, read); err != nil {
		return err
	}
	if _, err := p.send(ctx, shard, h.ended); err != nil {
		return err
	}
	switch {
	case h.left > 0:
		return fmt.Errorf("%w: %d overrides of shard %s, which is given up, have no room on the others, each of which has %d at most: keep the shard in the config, and end some", store.ErrFinal, h.left, p.shardName(shard), p.most)
	case h.changed > 0:
		return fmt.Errorf("hand overrides over: %w", store.ErrChanged) // The next look does it.
	}
	read.handedTo = p.versionsOf(h.there)
	return nil
}

// ends are when those overrides had begun whose last change is their removal, by name.
type ends map[string]int64

// learnEnds reads what was removed on the shards that take overrides, if one of read is on none of them. It
// is what their logs say, of the last 1,000 changes.
func (h *handing) learnEnds(ctx context.Context, read *readOverrides) error {
	isMissing := false
	for name := range read.all {
		isMissing = isMissing || !slices.ContainsFunc(h.p.members, func(m Member) bool { return h.there[m.Shard].all[name] != nil })
	}
	versions := h.p.versionsOf(h.there)
	if !isMissing || read.ends != nil && read.endsAt == versions {
		h.ends = read.ends
		return nil
	}
	var changes [][]string
	for _, m := range h.p.members {
		entries, err := h.p.logOf(ctx, m.Shard)
		if err != nil {
			return err
		}
		for _, entry := range entries {
			if lines := strings.Split(entry, "\n"); len(lines) == linesOfEntry {
				changes = append(changes, lines)
			}
		}
	}
	// The numbers are those of instants, and as long as each other.
	slices.SortStableFunc(changes, func(a, b []string) int { return strings.Compare(a[0], b[0]) })
	h.ends = ends{}
	for _, lines := range changes {
		name, before, after := lines[2], lines[4], lines[5]
		if removed, err := h.p.decode(before); after == "" && err == nil {
			h.ends[name] = removed.Since
		} else {
			delete(h.ends, name)
		}
	}
	read.ends, read.endsAt = h.ends, versions
	return nil
}

// handing is a call of handOver.
type handing struct {
	p *Operator
	// there are what the shards have that take overrides, and room is for how many more they have room.
	there map[*Shard]*readOverrides
	room  map[*Shard]int
	items map[*Shard][]item
	// ends are what was removed on these shards, and ended removes it from the shard that is given up.
	ends  ends
	ended []item
	// left are those without room, and changed those that somebody has changed meanwhile.
	left, changed int
}

// place chooses the shard that takes an override: one with an older copy, or else one with room. None takes
// it if one has it, or a later one.
func (h *handing) place(name string, o *store.Override) error {
	var to *Shard
	expected := expectNone
	for _, m := range h.p.members {
		switch other := h.there[m.Shard].all[name]; {
		case other != nil && other.Since >= o.Since:
			return nil
		case other != nil:
			to, expected = m.Shard, h.p.expecting(other)
		case to == nil && h.room[m.Shard] > 0:
			to = m.Shard
		}
	}
	if since, isEnded := h.ends[name]; isEnded && since >= o.Since {
		h.ended = append(h.ended, item{name: name, expected: o.Version})
		return nil
	}
	if to == nil {
		h.left++
		return nil
	}
	content, err := h.p.encode(o)
	if err != nil {
		return err
	}
	if expected == expectNone {
		h.room[to]--
	}
	// It is nobody's change, and leaves the log to those of operators.
	h.items[to] = append(h.items[to], item{name: name, lasts: h.p.lasts(o), content: content, expected: expected})
	return nil
}

// send sends what was placed, and keeps in items what was taken.
func (h *handing) send(ctx context.Context) error {
	var errs []error
	for to, items := range h.items {
		replies, err := h.p.send(ctx, to, items)
		errs = append(errs, err)
		var taken []item
		for i, reply := range replies {
			switch reply.word {
			case "CHANGED":
				h.changed++
			case "FULL":
				h.left++
			default:
				taken = append(taken, items[i])
			}
		}
		h.items[to] = taken
	}
	return errors.Join(errs...)
}

// end removes the copies of what was ended at the shard meanwhile: it must not come back.
func (h *handing) end(ctx context.Context, shard *Shard, read *readOverrides) error {
	now, err := h.p.refresh(ctx, shard, read)
	if err != nil || now == read {
		return err
	}
	for to, items := range h.items {
		var ended []item
		for _, it := range items {
			if now.all[it.name] == nil {
				ended = append(ended, item{name: it.name, expected: versionOf(it.content)})
			}
		}
		if _, err := h.p.send(ctx, to, ended); err != nil {
			return err
		}
	}
	return nil
}

// handLogOver copies the log of changes to a shard that keeps it.
func (p *Operator) handLogOver(ctx context.Context, shard *Shard) error {
	entries, err := p.logOf(ctx, shard)
	if err != nil {
		return err
	}
	entries = slices.DeleteFunc(entries, func(entry string) bool {
		_, ok := p.audited(entry)
		return !ok
	})
	for some := range slices.Chunk(entries, changesInCall) {
		args := []any{""}
		for _, entry := range some {
			args = append(args, entry)
		}
		if _, err := p.runOverride(ctx, p.members[0].Shard, opLog, args...); err != nil {
			return fmt.Errorf("hand the log of changes over: %w", err)
		}
	}
	return nil
}

// logOf returns the entries of the log of a shard, the oldest first.
func (p *Operator) logOf(ctx context.Context, shard *Shard) ([]string, error) {
	cmd, err := p.askOwner(ctx, shard, p.asker.Keys.Overrides(), true, func(bool) *wire.Command {
		return wire.NewRead("zrange", p.asker.Keys.OverrideLog(), 0, -1)
	})
	if err != nil {
		return nil, err
	}
	return cmd.Texts()
}
