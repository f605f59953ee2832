package operate

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// presenceLasts is for how long a shard remembers processes after the last one has left.
	presenceLasts = 10 * time.Minute
	// detailsLast is for how long a shard keeps a part of a config after the last beat of a process that has it.
	detailsLast = time.Minute
	// maxPresenceBytes bounds the texts of all processes, which each reads.
	maxPresenceBytes = 256 << 10
	// maxDetails bounds the bytes of a part of a config: some ten thousand zones. Larger ones are not compared.
	maxDetails = 1 << 20
)

// Announce implements [store.Shared]. The processes are members of a sorted set, in the order in which they
// told of themselves. Each adds its own alone, and removes others by their whole text, beat included: one
// that tells of itself meanwhile stays. Parts are there before the process that has them.
func (p *Operator) Announce(ctx context.Context, mine store.Presence, text func(store.Part) []byte, gone []store.Met) (all []store.Met, err error) {
	mine.Secret, mine.Layout = p.asker.Keys.SecretID(), ask.LayoutVersion
	var mu sync.Mutex
	err = p.atShards(p.shards(), func(shard *Shard) error {
		here := mine
		here.Shard = p.shardName(shard)
		err := p.publish(ctx, shard, mine.Digests, text)
		members, readErr := p.presentAt(ctx, shard)
		if readErr != nil {
			return readErr
		}
		b := beatAfter(members, &here, gone)
		met, isFull := b.kept, b.isFull()
		if tellErr := p.tell(ctx, shard, b); tellErr != nil {
			met, err = met[:len(met)-1], tellErr
		}
		mu.Lock()
		defer mu.Unlock()
		for _, m := range met {
			all = append(all, store.Met{Presence: m.Presence, Here: here.Shard, Full: isFull})
		}
		return err
	})
	return all, err
}

// publish keeps the parts of a config at a shard. Most of the time they are there.
func (p *Operator) publish(ctx context.Context, shard *Shard, digests map[store.Part]string, text func(store.Part) []byte) (err error) {
	for part, digest := range digests {
		key := p.asker.Keys.Details(digest)
		isThere, askErr := p.ask(ctx, shard, key, false, func(bool) *wire.Command {
			return wire.NewCommand("pexpire", key, detailsLast.Milliseconds())
		})
		if askErr == nil && isThere.Cmder.(*goredis.Cmd).Val() == int64(0) {
			if content := text(part); len(content) <= maxDetails && store.DigestOf(content) == digest {
				_, askErr = p.ask(ctx, shard, key, false, func(bool) *wire.Command {
					return wire.NewCommand("set", key, content, "px", detailsLast.Milliseconds())
				})
			}
		}
		err = errors.Join(err, askErr)
	}
	return err
}

// Details implements [store.Shared]. Another program may have written something else there, of any size.
func (p *Operator) Details(ctx context.Context, shard, digest string) (details store.Details, err error) {
	for _, s := range p.shards() {
		if p.shardName(s) != shard {
			continue
		}
		key := p.asker.Keys.Details(digest)
		cmd, err := p.ask(ctx, s, key, false, func(bool) *wire.Command { return wire.NewCommand("getrange", key, 0, maxDetails) })
		if err != nil {
			return nil, err
		}
		text, _ := cmd.Result() // empty if it is not there
		switch {
		case text == "":
			return nil, nil
		case store.DigestOf([]byte(text)) != digest || json.Unmarshal([]byte(text), &details) != nil || details == nil:
			return store.Details{}, nil
		}
		return details, nil
	}
	return nil, nil
}

// Withdraw implements [store.Shared]. Shards that do not answer forget the process later.
func (p *Operator) Withdraw(ctx context.Context, mine store.Presence) {
	key := p.asker.Keys.Presence()
	_ = p.atShards(p.shards(), func(shard *Shard) error {
		here := mine
		if here.Shard = p.shardName(shard); !slices.Contains(mine.At, here.Shard) {
			return nil
		}
		members, err := p.presentAt(ctx, shard)
		if err != nil {
			return err
		}
		for pair := range slices.Chunk(members, 2) {
			var m store.Presence
			if json.Unmarshal([]byte(pair[0]), &m) == nil && m.IsSame(&here) && m.Beat <= mine.Beat {
				_, err = p.ask(ctx, shard, key, false, func(bool) *wire.Command { return wire.NewCommand("zrem", key, pair[0]) })
			}
		}
		return err
	})
}

// presentAt returns the members at a shard, each with its number behind it, the first to tell first.
func (p *Operator) presentAt(ctx context.Context, shard *Shard) (members []string, err error) {
	key := p.asker.Keys.Presence()
	cmd, err := p.ask(ctx, shard, key, false, func(bool) *wire.Command {
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
	text, _ := json.Marshal(here) // texts can be encoded
	b, mine := &beat{number: 1}, member{string(text), *here}
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

// isFull reports whether another process may have removed some for lack of room.
func (b *beat) isFull() bool {
	bytes := 0
	for _, m := range b.kept {
		bytes += len(m.text)
	}
	return len(b.kept) >= store.MaxPresent || bytes > maxPresenceBytes/2
}

// bound removes the first ones for which there is no room.
func (b *beat) bound() {
	first, room := len(b.kept)-1, maxPresenceBytes-len(b.kept[len(b.kept)-1].text)
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
