package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// The operations of the script.
const (
	opPage    = "page"
	opChanges = "changes"
	opChange  = "change"
	opLog     = "log"
	opSeen    = "seen"
	opClear   = "clear"
	opSum     = "sum"
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

// look is a look at all shards: the heads of those that have answered, and why others have not, or are not believed.
type look struct {
	heads  map[*Shard]overrideHead
	failed map[*Shard]error
	// state is what is known afterwards, and seen when one of the shards was in touch last.
	state *overrideState
	seen  int64
}

// reading is what a look has found at a shard.
type reading struct {
	learned learned
	// number is the change up to which all is known, if isRead is set.
	isRead bool
	number int64
	// unsound are the names with a value that is none of ours, if isWhole is set: the whole hash was read.
	isWhole bool
	unsound map[string]bool
}

// overrideHead are the fields of a hash that tell whether it has changed.
type overrideHead struct {
	sum    uint64
	number int64
	// seen is when a process was last in touch, in milliseconds, or 0.
	seen    int64
	isThere bool
}

var errOutOfTouch = errors.New("it was away for 90 days, so nothing there is believed, and it gets all anew")

// look reads what shards have that this process does not know. Where one does not answer, what was known stays. Of
// shards with the same sum one is read. A silent shard leaves the others half of the time.
func (p *Operator) look(ctx context.Context) (*look, error) {
	base := p.learn(&learned{})
	heads, cancel := p.withinTimeout(ctx)
	defer cancel()
	if end, _ := heads.Deadline(); len(p.shards()) > 1 {
		heads, cancel = context.WithTimeout(heads, time.Until(end)/2)
		defer cancel()
	}
	l := &look{heads: map[*Shard]overrideHead{}, failed: map[*Shard]error{}}
	var mu sync.Mutex
	all := learned{all: map[string]*overrideVersion{}}
	err := p.atShards(p.shards(), func(shard *Shard) error {
		h, err := p.headOf(heads, shard)
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			l.failed[shard] = err
			return err
		}
		l.heads[shard] = h
		return nil
	})
	for _, shard := range p.shards() {
		p.remember(shard, func(s *shardOverrides) {
			s.seen = max(s.seen, l.heads[shard].seen)
			l.seen = max(l.seen, s.seen)
		})
	}
	alike := map[uint64][]*Shard{}
	for _, shard := range p.shards() {
		switch h := l.heads[shard]; {
		case h.isOutOfTouch(l.seen):
			l.failed[shard] = errOutOfTouch
		case h.isThere:
			alike[h.sum] = append(alike[h.sum], shard)
		}
	}
	found := map[*Shard]*reading{}
	for len(alike) > 0 {
		var firsts []*Shard
		for _, shards := range alike {
			firsts = append(firsts, shards[0])
		}
		err = errors.Join(err, p.atShards(firsts, func(first *Shard) error {
			sum := l.heads[first].sum
			mu.Lock()
			same := alike[sum]
			alike[sum] = same[1:]
			mu.Unlock()
			r, err := p.read(ctx, first, base, l, same)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				l.failed[first] = err
				return err
			}
			for _, shard := range same {
				found[shard] = &reading{isRead: true, number: l.heads[shard].number}
			}
			found[first] = r
			all.add(&r.learned, p.now())
			alike[sum] = nil
			return nil
		}))
		maps.DeleteFunc(alike, func(_ uint64, shards []*Shard) bool { return len(shards) == 0 })
	}
	l.state = p.learn(&all)
	for shard, r := range found {
		p.note(shard, r, base)
	}
	return l, err
}

// note adds to what is known of a shard. base is from before the reading.
func (p *Operator) note(shard *Shard, r *reading, base *overrideState) {
	p.remember(shard, func(s *shardOverrides) {
		// Ends that were read before this machine's clock was set are read again.
		s.isRead, s.number = r.isRead && p.overrides.state.steps == base.steps, cmp.Or(r.number, s.number)
		if r.isWhole {
			_, n := p.lacking(r, p.overrides.state)
			s.unsound, s.lacks = r.unsound, n > 0
		}
	})
}

// add adds what was learned elsewhere.
func (l *learned) add(other *learned, now time.Time) {
	for name, v := range other.all {
		l.all[name] = v.over(l.all[name], now)
	}
	l.log = append(l.log, other.log...)
}

// isOutOfTouch reports whether a shard is so far behind another one that nothing there is believed: others may
// have forgotten tombstones of what it has. Compared with the clock, an installation that was off would lose all.
func (h *overrideHead) isOutOfTouch(latest int64) bool {
	return h.seen > 0 && latest-h.seen > outOfTouch.Milliseconds()
}

// read reads of a shard, the first of those with its sum, what has changed. If all of one of them is known, nothing
// is read.
func (p *Operator) read(ctx context.Context, shard *Shard, base *overrideState, l *look, alike []*Shard) (*reading, error) {
	var known shardOverrides
	for _, other := range slices.Backward(alike) {
		p.remember(other, func(s *shardOverrides) { known = *s })
		if h := l.heads[other]; known.isRead && (h.sum == base.sum || cmp.Or(h.number, known.number) == known.number) {
			return &reading{isRead: true, number: l.heads[shard].number}, nil
		}
	}
	if known.isRead {
		r := &reading{}
		if isKnown, err := p.readChanges(ctx, shard, r, known.number); isKnown || err != nil {
			return r, err
		}
	}
	return p.readWhole(ctx, shard)
}

// headOf asks without a script, so that it needs no right of its own while there are no overrides.
func (p *Operator) headOf(ctx context.Context, shard *Shard) (h overrideHead, err error) {
	key := p.asker.Keys.Overrides()
	cmd, err := p.ask(ctx, shard, key, true, func(bool) *wire.Command { return wire.NewRead("hmget", key, "d", "v", "s", "x") })
	if err != nil {
		return h, err
	}
	texts, err := cmd.Texts()
	if err != nil || len(texts) != 4 {
		return h, cmp.Or(err, errFrames)
	}
	h = overrideHead{sum: uint64(believed(texts[0])), number: believed(texts[1]), seen: believed(texts[2]), isThere: strings.Join(texts, "") != ""} //nolint:gosec // it is not negative
	if h.seen > p.now().Add(outOfTouch).UnixMilli() {
		h.seen = 0
	}
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
func (p *Operator) readWhole(ctx context.Context, shard *Shard) (*reading, error) {
	r := &reading{isWhole: true, unsound: map[string]bool{}}
	number := int64(0)
	for cursor := "0"; ; {
		reply, err := p.runOverride(ctx, shard, opPage, cursor)
		if err != nil {
			return nil, err
		}
		isFirst := cursor == "0"
		if cursor, err = r.take(p, reply); err != nil {
			return nil, err
		}
		if isFirst {
			number = r.number
		}
		if cursor == "0" {
			break
		}
	}
	r.number = number
	var err error
	r.learned.log, err = p.logOf(ctx, shard)
	return r, err
}

// take takes in a page of a hash, or what has changed, and returns the next cursor.
func (r *reading) take(p *Operator, reply string) (cursor string, err error) {
	frames, err := framesOf(reply)
	if err != nil || len(frames) == 0 {
		return "", cmp.Or(err, errFrames)
	}
	now := believed(frames[0].texts[0])
	if now < earliest {
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
		if v := p.versionIn(name, value, now, here); v != nil {
			r.learned.all[name] = v
		} else if r.isWhole {
			r.unsound[name] = true
		}
	}
	return frames[0].word, nil
}

// mend begins to write to shards what they have lost, or never got, as of a look, unless that is going on: nobody
// waits for it. One that differs at two looks is mended, unless that was done within a minute: a change on its way is
// no loss.
func (p *Operator) mend(ctx context.Context, l *look) {
	if !p.overrides.mending.TryLock() {
		return
	}
	ctx = context.WithoutCancel(ctx) // A shard that is closed ends it.
	now, jobs := p.now(), map[*Shard]func() error{}
	for shard, h := range l.heads {
		p.remember(shard, func(s *shardOverrides) {
			differs, isStale := h.sum != l.state.sum || s.lacks, h.isThere && now.UnixMilli()-h.seen > touchPeriod.Milliseconds()
			switch {
			case differs && s.differed && now.Sub(s.mended) >= p.mendPeriod:
				jobs[shard] = func() error { return p.mendShard(ctx, shard, l.seen) }
			case isStale && (h.sum == l.state.sum || !h.isOutOfTouch(l.seen)) && now.Sub(s.touched) >= p.mendPeriod:
				s.touched = now
				jobs[shard] = func() error { return p.touch(ctx, shard, l.state, l.seen) }
			case !differs && !isStale:
				s.failed = nil
			}
			s.differed = differs
		})
	}
	if len(jobs) == 0 {
		p.overrides.mending.Unlock()
		return
	}
	go func() {
		defer p.overrides.mending.Unlock()
		_ = p.atShards(slices.Collect(maps.Keys(jobs)), func(shard *Shard) error {
			err := jobs[shard]()
			if !errors.Is(err, store.ErrFinal) {
				err = nil // What may succeed, the next minute's mender tries.
			}
			p.remember(shard, func(s *shardOverrides) { s.failed = err })
			return nil
		})
	}()
}

// touch says that a shard is in touch, as one was at the instant seen, and writes the changes back if it has lost some.
func (p *Operator) touch(ctx context.Context, shard *Shard, state *overrideState, seen int64) error {
	reply, err := p.runOverride(ctx, shard, opSeen, p.now().UnixMilli(), seen)
	if n := believed(reply); err != nil || n >= int64(len(state.log)) {
		return err
	}
	return p.mendLog(ctx, shard, state)
}

// claim reports whether this process is the one that mends a shard now.
func (p *Operator) claim(ctx context.Context, shard *Shard) (bool, error) {
	key := p.asker.Keys.OverrideMender()
	cmd, err := p.ask(ctx, shard, key, false, func(bool) *wire.Command {
		return wire.NewCommand("set", key, "", "nx", "px", max(p.mendPeriod.Milliseconds(), 1))
	})
	if err != nil {
		return false, err
	}
	return cmd.Cmder.(*goredis.Cmd).Val() == "OK", nil
}

// ofPrimaries returns an operator that asks no replica.
func (p *Operator) ofPrimaries() *Operator {
	q := *p
	q.ask = func(ctx context.Context, shard *Shard, key string, _ bool, about func(isReplica bool) *wire.Command) (*wire.Command, error) {
		return p.ask(ctx, shard, key, false, about)
	}
	return &q
}

func (p *Operator) mendShard(ctx context.Context, shard *Shard, seen int64) error {
	if isMine, err := p.claim(ctx, shard); !isMine || err != nil {
		return err
	}
	p = p.ofPrimaries()
	p.remember(shard, func(s *shardOverrides) { s.mended = p.now() })
	h, err := p.headOf(ctx, shard)
	if err != nil {
		return err
	}
	state := p.learn(&learned{})
	if h.sum != state.sum && h.isOutOfTouch(seen) {
		_, err = p.runOverride(ctx, shard, opClear, h.seen, seen)
	} else if len(state.ended) > 0 {
		// What has run out alone is not worth a reading.
		_, err = p.send(ctx, shard, state.ended)
	}
	if err != nil {
		return err
	}
	if h, err = p.headOf(ctx, shard); err != nil || h.sum != state.sum && h.isOutOfTouch(seen) {
		return err // Somebody has written there meanwhile.
	}
	lacks := false
	if p.remember(shard, func(s *shardOverrides) { lacks = s.lacks }); h.sum == state.sum && !lacks {
		return p.touch(ctx, shard, state, seen)
	}
	r, err := p.readWhole(ctx, shard)
	if err != nil {
		return err
	}
	base := state
	state = p.learn(&r.learned)
	p.note(shard, r, base)
	sum := uint64(0)
	for _, v := range r.learned.all {
		sum = (sum + v.digest) % highestVersion
	}
	if sum != h.sum {
		// Somebody else has written there, or a build that knows other kinds.
		if _, err = p.runOverride(ctx, shard, opSum, strconv.FormatUint(h.sum, 10), strconv.FormatUint(sum, 10)); err != nil {
			return err
		}
	}
	items, written := p.lacking(r, state)
	replies, err := p.send(ctx, shard, items)
	if err != nil {
		return err
	}
	p.remember(shard, func(s *shardOverrides) { s.lacks = false })
	words := map[string]int{}
	for _, reply := range replies[:written] {
		words[reply.word]++
	}
	if n := words["HAS"]; n > 0 {
		shard.Emit(wire.Event{Kind: wire.WrittenBack, Err: fmt.Errorf("the shard lacked %d", n)})
	}
	if n := words["FULL"]; n > 0 {
		err = fmt.Errorf("%w: it lacks %d overrides, and has no room for them", store.ErrFinal, n)
	}
	return errors.Join(err, p.mendLog(ctx, shard, state), p.touch(ctx, shard, state, seen))
}

// lacking returns what a shard lacks, or forgets too early, of which there are written, as far as a mending may write
// it, and what it need not remember any more.
func (p *Operator) lacking(r *reading, state *overrideState) (items []item, written int) {
	now := p.now()
	bytes := 0
	for name, v := range state.all {
		there := r.learned.all[name]
		if !v.isKept(now.Add(nearEnd)) || !v.isLater(there) && v.keep <= there.keep+nearEnd.Milliseconds() {
			continue
		}
		if bytes += len(name) + len(v.content) + headSize; bytes > mendBytes {
			break
		}
		items = append(items, item{name: name, known: v})
	}
	written = len(items)
	for name, v := range r.learned.all {
		if !v.isKept(now) {
			items = append(items, item{name: name})
		}
	}
	return items, written
}

// mendLog writes the changes that a shard lacks.
func (p *Operator) mendLog(ctx context.Context, shard *Shard, state *overrideState) error {
	there, err := p.logOf(ctx, shard)
	if err != nil {
		return err
	}
	var args []any
	for _, change := range state.log {
		if !slices.Contains(there, change.text) {
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
