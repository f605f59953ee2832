package operate

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// presenceLasts is for how long a shard remembers processes after the last one has left.
const presenceLasts = 10 * time.Minute

// Announce implements [store.Operable]. The processes are members of a sorted set, in the order in which they
// told of themselves. Each adds its own alone, and removes others by their whole text, beat included: one
// that tells of itself meanwhile stays.
func (p *Operator) Announce(ctx context.Context, mine store.Presence, gone []store.Met) (all []store.Met, err error) {
	mine.Secret = p.asker.Keys.SecretID()
	var mu sync.Mutex
	err = p.atShards(p.shards(), func(shard *Shard) error {
		here := mine
		here.Shard = p.shardName(shard)
		members, err := p.presentAt(ctx, shard)
		if err != nil {
			return err
		}
		b := beatAfter(members, &here, gone)
		err = p.tell(ctx, shard, b)
		mu.Lock()
		defer mu.Unlock()
		for _, m := range b.kept {
			all = append(all, store.Met{Presence: m.Presence, Here: here.Shard})
		}
		return err
	})
	return all, err
}

// presentAt returns the members at a shard, each with its number behind it, the first to tell first.
func (p *Operator) presentAt(ctx context.Context, shard *Shard) (members []string, err error) {
	key := p.asker.Keys.Presence()
	cmd, err := p.askOwner(ctx, shard, key, false, func(bool) *wire.Command {
		return wire.NewRead("zrange", key, 0, -1, "withscores")
	})
	if err != nil {
		return nil, err
	}
	return cmd.Texts()
}

// tell adds a beat to those at a shard.
func (p *Operator) tell(ctx context.Context, shard *Shard, b *beat) error {
	key := p.asker.Keys.Presence()
	cmds := []*wire.Command{
		wire.NewCommand("zadd", key, b.number, b.kept[len(b.kept)-1].text),
		wire.NewCommand("pexpire", key, presenceLasts.Milliseconds()),
	}
	if len(b.removed) > 0 {
		cmds = append(cmds, wire.NewCommand("zrem", key, b.removed...))
	}
	ctx, cancel := p.withinTimeout(ctx)
	defer cancel()
	at, err := ownerOf(ctx, shard, key)
	if err != nil {
		return err
	}
	return at.Checks.DoApart(ctx, cmds...)
}

// beat is how a process tells of itself: with a number that is larger than those of the others.
type beat struct {
	number int64
	// kept are the processes that stay, this one at the end; removed are the texts of the others.
	kept    []member
	removed []any
}

// member is a process as a shard has it.
type member struct {
	text string
	store.Presence
}

// beatAfter returns the beat of this process after others, of which those go that are gone, and those that
// told of themselves first if there are too many: no clock decides. A text that cannot be read is another
// program's.
func beatAfter(members []string, here *store.Presence, gone []store.Met) *beat {
	b, mine := &beat{number: 1}, memberOf(*here)
	if len(mine.text) > maxPresenceBytes {
		// The names of shards and the key_secret matter more than the zones.
		mine.Zones = nil
		mine = memberOf(mine.Presence)
	}
	for pair := range slices.Chunk(members, 2) {
		m := member{text: pair[0]}
		number, _ := strconv.ParseFloat(pair[len(pair)-1], 64)
		b.number = max(b.number, int64(number)+1)
		if err := json.Unmarshal([]byte(m.text), &m.Presence); err != nil || m.IsSame(&mine.Presence) ||
			slices.ContainsFunc(gone, func(g store.Met) bool { return m.IsSame(&g.Presence) && m.Beat == g.Beat }) {
			b.removed = append(b.removed, m.text)
		} else {
			b.kept = append(b.kept, m)
		}
	}
	b.kept = append(b.kept, mine)
	b.bound()
	return b
}

func memberOf(p store.Presence) member {
	text, _ := json.Marshal(p) // texts can be encoded
	return member{string(text), p}
}

// maxPresenceBytes bounds the texts of all processes, which each reads.
const maxPresenceBytes = 256 << 10

// bound removes the first ones for which there is no room.
func (b *beat) bound() {
	first, room := len(b.kept), maxPresenceBytes
	for first > max(len(b.kept)-store.MaxPresent, 0) {
		if room -= len(b.kept[first-1].text); room < 0 {
			break
		}
		first--
	}
	for _, m := range b.kept[:first] {
		b.removed = append(b.removed, m.text)
	}
	b.kept = b.kept[first:]
}
