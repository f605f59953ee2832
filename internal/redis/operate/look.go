package operate

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
)

// The operations of the script.
const (
	opPage    = "page"
	opChanges = "changes"
	opChange  = "change"
	opLog     = "log"
	opSeen    = "seen"
	opSum     = "sum"
	opClear   = "clear"
)

const (
	// outOfTouch is how far a shard may be behind another one. Before that, no tombstone was forgotten.
	outOfTouch = 90 * 24 * time.Hour
	// touchPeriod is how often shards are told that they are in touch.
	touchPeriod = time.Hour
	// mendPeriod is the time between two mendings of a shard, whoever mends.
	mendPeriod = time.Minute
	// mendBytes bounds what a mending writes, because a server may evict it at once.
	mendBytes = 4 << 20
	// nearEnd is how much longer a version has to be remembered to be missed: clocks differ.
	nearEnd = time.Minute
)

// look is a look at all shards.
type look struct {
	p    *Operator
	base *overrideState
	mu   sync.Mutex
	// of has the shards that have answered; reads are sums of which a hash is read.
	of    map[*Shard]*reading
	reads map[uint64]bool
	// failed is why others have not answered.
	failed map[*Shard]error
	// state is what is known afterwards.
	state *overrideState
}

// reading is what a look has found at a shard.
type reading struct {
	head    overrideHead
	learned learned
	// isRead is set if all up to the change of that number is known.
	isRead bool
	number int64
	// unsound are the names with a value that is none of ours, if isWhole is set: the whole hash was read.
	isWhole bool
	unsound map[string]bool
	// now is the server's time at the last reading, in milliseconds.
	now int64
}

// overrideHead are the fields of a hash that tell whether it has changed.
type overrideHead struct {
	sum    uint64
	number int64
	// seen is when a process was last in touch, in milliseconds, or 0.
	seen    int64
	isThere bool
	// isOfReplica is set if a replica has answered, because the primary is away.
	isOfReplica bool
}

// look reads what shards have that this process does not know. Where one does not answer, what was known stays.
func (p *Operator) look(ctx context.Context) (*look, error) {
	l := &look{p: p, base: p.learn(&learned{}), of: map[*Shard]*reading{}, reads: map[uint64]bool{}, failed: map[*Shard]error{}}
	err := p.atAllShards(func(shard *Shard) error {
		var r *reading
		err := contain.Run(func() (err error) {
			r, err = l.read(ctx, shard)
			return err
		})
		l.mu.Lock()
		defer l.mu.Unlock()
		if err != nil {
			l.failed[shard] = err
			return err
		}
		l.of[shard] = r
		return nil
	})
	latest := l.base.seen
	for _, r := range l.of {
		latest = max(latest, r.head.seen)
	}
	all := learned{all: map[string]*overrideVersion{}, seen: latest}
	for shard, r := range l.of {
		if r.head.isOutOfTouch(latest) {
			l.of[shard] = &reading{head: r.head}
			continue
		}
		all.add(&r.learned)
		p.remember(shard, func(s *shardOverrides) {
			if r.isRead {
				s.isRead, s.number = true, cmp.Or(r.number, s.number)
			}
			if r.isWhole {
				s.unsound = r.unsound
			}
		})
	}
	l.state = p.learn(&all)
	return l, err
}

// add adds what was learned elsewhere.
func (l *learned) add(other *learned) {
	for name, v := range other.all {
		if v.isLater(l.all[name]) {
			l.all[name] = v
		}
	}
	l.log = append(l.log, other.log...)
}

// isOutOfTouch reports whether a shard is so far behind another one that nothing there is believed: others may
// have forgotten tombstones of what it has. Compared with the clock, an installation that was off would lose all.
func (h *overrideHead) isOutOfTouch(latest int64) bool {
	return h.seen > 0 && latest-h.seen > outOfTouch.Milliseconds()
}

// read reads of a shard what has changed. Where the sum is that of what is known, nothing else is read.
func (l *look) read(ctx context.Context, shard *Shard) (r *reading, err error) {
	r = &reading{}
	if r.head, err = l.p.headOf(ctx, shard); err != nil {
		return nil, err
	}
	var known shardOverrides
	l.p.remember(shard, func(s *shardOverrides) { known = *s })
	switch {
	case r.head.isOutOfTouch(l.base.seen):
		return r, nil
	case !r.head.isThere, r.head.sum == l.base.sum && (known.isRead || len(l.base.all) > 0):
		r.isRead, r.number = true, r.head.number
		return r, nil
	case known.isRead && cmp.Or(r.head.number, known.number) == known.number:
		return r, nil
	case known.isRead:
		if isKnown, err := l.p.readChanges(ctx, shard, r, known.number); isKnown || err != nil {
			return r, err
		}
	case !l.begins(r.head.sum):
		return r, nil // The next look finds that it has the same.
	}
	return r, l.p.readWhole(ctx, shard, r)
}

// begins reports whether this look reads no hash of that sum yet.
func (l *look) begins(sum uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	begins := !l.reads[sum]
	l.reads[sum] = true
	return begins
}

// headOf asks without a script, so that it needs no right of its own while there are no overrides.
func (p *Operator) headOf(ctx context.Context, shard *Shard) (h overrideHead, err error) {
	key := p.asker.Keys.Overrides()
	isOfReplica := false
	cmd, err := p.ask(ctx, shard, key, true, func(isReplica bool) *wire.Command {
		isOfReplica = isReplica
		return wire.NewRead("hmget", key, "d", "v", "s")
	})
	if err != nil {
		return h, err
	}
	texts, err := cmd.Texts()
	if err != nil || len(texts) != 3 {
		return h, cmp.Or(err, errFrames)
	}
	sum, _ := strconv.ParseUint(texts[0], 10, 52)
	h = overrideHead{sum: sum, number: believed(texts[1]), seen: believed(texts[2]), isThere: texts[0]+texts[1] != "", isOfReplica: isOfReplica}
	return h, nil
}

// believed returns a number of the script, or 0 if it is none.
func believed(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > highestVersion {
		return 0
	}
	return n
}

// readChanges reads what has changed since a change, and reports whether the shard knows that.
func (p *Operator) readChanges(ctx context.Context, shard *Shard, r *reading, since int64) (isKnown bool, err error) {
	reply, err := p.runOverride(ctx, shard, opChanges, strconv.FormatInt(since, 10))
	if err != nil || reply == "LOST" {
		return false, err
	}
	_, err = r.take(p, reply)
	return true, err
}

// readWhole reads all overrides of a shard, in parts that cost it little, and the last changes. What changes
// meanwhile, the next look reads.
func (p *Operator) readWhole(ctx context.Context, shard *Shard, r *reading) error {
	*r = reading{head: r.head, isWhole: true, unsound: map[string]bool{}}
	number := int64(0)
	for cursor := "0"; ; {
		reply, err := p.runOverride(ctx, shard, opPage, cursor)
		if err != nil {
			return err
		}
		isFirst := cursor == "0"
		if cursor, err = r.take(p, reply); err != nil {
			return err
		}
		if isFirst {
			number = r.number
		}
		if cursor == "0" {
			break
		}
	}
	r.number = number
	texts, err := p.logOf(ctx, shard)
	r.learned.log = append(r.learned.log, texts...)
	return err
}

// take takes in a page of a hash, or what has changed, and returns the next cursor.
func (r *reading) take(p *Operator, reply string) (cursor string, err error) {
	frames, err := framesOf(reply)
	if err != nil || len(frames) == 0 {
		return "", cmp.Or(err, errFrames)
	}
	if r.now = believed(frames[0].texts[0]); r.now < earliest {
		return "", fmt.Errorf("%w: the time is %.100q", errFrames, frames[0].texts[0])
	}
	r.isRead, r.number = true, believed(frames[0].texts[1])
	if r.learned.all == nil {
		r.learned.all = map[string]*overrideVersion{}
	}
	here := p.now()
	for _, f := range frames[1:] {
		name, value := strings.Clone(f.texts[0]), f.texts[1]
		if !r.isWhole {
			lines := strings.Split(f.texts[0], "\n")
			if r.learned.log = append(r.learned.log, f.texts[0]); len(lines) != linesOfChange {
				continue
			}
			name = strings.Clone(lines[nameInChange])
		}
		if v := p.versionIn(name, value, r.now, here); v != nil {
			r.learned.all[name] = v
		} else if r.isWhole {
			r.unsound[name] = true
		}
	}
	return frames[0].word, nil
}

// mend writes to shards what they have lost, or never got, as of a look. One that differs at two looks alike is
// mended, unless another process does so: a change on its way is no loss.
func (p *Operator) mend(ctx context.Context, l *look) error {
	return p.atAllShards(func(shard *Shard) error {
		r := l.of[shard]
		if r == nil || r.head.isOfReplica {
			return nil
		}
		if now := p.now().UnixMilli(); r.head.isThere && now-r.head.seen > touchPeriod.Milliseconds() && !r.head.isOutOfTouch(l.state.seen) {
			if _, err := p.runOverride(ctx, shard, opSeen, strconv.FormatInt(now, 10)); err != nil {
				return err
			}
		}
		differs := ""
		if r.head.sum != l.state.sum || r.head.isOutOfTouch(l.state.seen) {
			differs = fmt.Sprint(r.head.sum, r.head.number, l.state.sum)
		}
		isLasting := false
		p.remember(shard, func(s *shardOverrides) { isLasting, s.unequal = s.unequal == differs, differs })
		if differs == "" || !isLasting {
			return nil
		}
		return p.mendShard(ctx, shard, l.state)
	})
}

// claim reports whether this process is the one that mends a shard now.
func (p *Operator) claim(ctx context.Context, shard *Shard) (bool, error) {
	key := p.asker.Keys.OverrideMender()
	cmd, err := p.ask(ctx, shard, key, false, func(bool) *wire.Command {
		return wire.NewCommand("set", key, "", "nx", "px", mendPeriod.Milliseconds())
	})
	if err != nil {
		return false, err
	}
	return cmd.Cmder.(*goredis.Cmd).Val() == "OK", nil
}

func (p *Operator) mendShard(ctx context.Context, shard *Shard, state *overrideState) error {
	if isMine, err := p.claim(ctx, shard); !isMine || err != nil {
		return err
	}
	var r reading
	var err error
	if r.head, err = p.headOf(ctx, shard); err != nil {
		return err
	}
	if r.head.isOutOfTouch(state.seen) {
		if _, err = p.runOverride(ctx, shard, opClear, strconv.FormatInt(r.head.seen, 10)); err != nil {
			return err
		}
		r.head = overrideHead{}
	}
	if err = p.readWhole(ctx, shard, &r); err != nil {
		return err
	}
	p.remember(shard, func(s *shardOverrides) { s.isRead, s.number, s.unsound = true, r.number, r.unsound })
	state = p.learn(&r.learned)
	sum := uint64(0)
	for _, v := range r.learned.all {
		sum += v.digest
	}
	if sum %= highestVersion; sum != r.head.sum {
		// Somebody else has written there.
		if _, err = p.runOverride(ctx, shard, opSum, strconv.FormatUint(r.head.sum, 10), strconv.FormatUint(sum, 10)); err != nil {
			return err
		}
	}
	lacking := p.lacking(&r, state)
	if _, err = p.send(ctx, shard, lacking); err != nil {
		return err
	}
	if n := len(lacking); n > 0 && lacking[0].known != nil {
		shard.Emit(wire.Event{Kind: wire.WrittenBack, Err: fmt.Errorf("the shard had lost them, or was away: %d differed", n)})
	}
	return p.mendLog(ctx, shard, &r, state)
}

// lacking returns what a shard lacks, as far as a mending may write it, and what it need not remember any more.
func (p *Operator) lacking(r *reading, state *overrideState) (items []item) {
	now := p.now()
	bytes := 0
	for name, v := range state.all {
		if there := r.learned.all[name]; !v.isLater(there) || !v.isKept(now.Add(nearEnd).UnixMilli()) {
			continue
		}
		if bytes += len(name) + len(v.content) + headSize; bytes > mendBytes {
			break
		}
		items = append(items, item{name: name, known: v})
	}
	for name, v := range r.learned.all {
		if !v.isKept(now.UnixMilli()) {
			items = append(items, item{name: name})
		}
	}
	return items
}

// mendLog writes the changes that a shard lacks.
func (p *Operator) mendLog(ctx context.Context, shard *Shard, r *reading, state *overrideState) error {
	var args []any
	for _, change := range state.log {
		if !slices.Contains(r.learned.log, change.text) {
			args = append(args, change.text)
		}
	}
	for some := range slices.Chunk(args, changesInCall) {
		if _, err := p.runOverride(ctx, shard, opLog, some...); err != nil {
			return err
		}
	}
	return nil
}

// logOf returns the entries of the log of a shard, the oldest first.
func (p *Operator) logOf(ctx context.Context, shard *Shard) ([]string, error) {
	cmd, err := p.ask(ctx, shard, p.asker.Keys.Overrides(), true, func(bool) *wire.Command {
		return wire.NewRead("zrange", p.asker.Keys.OverrideLog(), 0, -1)
	})
	if err != nil {
		return nil, err
	}
	return cmd.Texts()
}
