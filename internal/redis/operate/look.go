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
	opPart    = "part"
	opLog     = "log"
	opSum     = "sum"
	opSeen    = "seen"
)

const (
	// outOfTouch is how far a shard may be behind another one. Before that, no tombstone was forgotten.
	outOfTouch = 90 * 24 * time.Hour
	// touchPeriod is how often shards are told that they are in touch.
	touchPeriod = time.Hour
	// mendPeriod is the time between two mendings of a shard, by any process.
	mendPeriod = time.Minute
	// mendBytes bounds the bytes that a mending writes: a server may evict them at once.
	mendBytes = 4 << 20
	// mostSize is the mean size of overrides beyond which a shard is not read.
	mostSize = 512
	// mostMisread is how many looks in a row may fail to read a shard that answers before that is a fault of
	// its own.
	mostMisread = 5
	// nearEnd is the difference between horizons that a mending ignores: clocks differ.
	nearEnd = time.Minute
)

// look is the result of asking all shards: the heads of shards that answered, and the error of each other shard.
type look struct {
	heads  map[*Shard]overrideHead
	failed map[*Shard]error
	// state is the process's state afterwards, and seen the latest instant at which a shard was in touch.
	state *overrideState
	seen  int64
}

// reading is the content of a shard up to a change.
type reading struct {
	learned learned
	number  int64
	// size is that of the replies.
	size int
	// unsound are the names with a value that is none of ours; nil if not all was read.
	unsound map[string]bool
}

// overrideHead are the fields of a hash that tell whether it has changed.
type overrideHead struct {
	sum    uint64
	number int64
	// seen is when a process was last in touch, in milliseconds, or 0.
	seen int64
}

// errExcess is the error of a content that is not read again for a while, because reading it costs the server much.
var errExcess = fmt.Errorf("%w: it has more overrides", store.ErrFinal)

var errOutOfTouch = errors.New("it was away for 90 days, so nothing there is believed, and it gets all anew")

// look reads changes from all shards into the state. The state of a shard that does not answer stays. Once a shard has
// answered, the others get half of the timeout, so that time is left to read.
func (p *Operator) look(ctx context.Context) (*look, error) {
	l := &look{heads: map[*Shard]overrideHead{}, failed: map[*Shard]error{}}
	heads, cancel := p.withinTimeout(ctx)
	defer cancel()
	end, _ := heads.Deadline()
	half := time.Now().Add(time.Until(end) / 2)
	var mu sync.Mutex
	err := p.atShards(p.shards(), func(shard *Shard) error {
		h, err := p.headOf(heads, shard)
		mu.Lock()
		defer mu.Unlock()
		if errors.Is(err, context.Canceled) && ctx.Err() == nil {
			err = wire.ErrTimeout
		}
		if err != nil {
			l.failed[shard] = err
			return err
		}
		if l.heads[shard] = h; len(l.heads) == 1 {
			time.AfterFunc(time.Until(half), cancel)
		}
		return nil
	})
	if len(l.heads) > 0 {
		p.overrides.answered(p.now())
	}
	l.state = p.learn(&learned{})
	var isRead bool
	var at time.Time
	known := map[*Shard]int64{}
	for _, shard := range p.shards() {
		p.remember(shard, func(s *shardOverrides) {
			if _, isThere := l.heads[shard]; isThere && p.now().Before(s.until) {
				delete(l.heads, shard)
				l.failed[shard], err = s.excess, errors.Join(err, fmt.Errorf("shard %s: %w", p.shardName(shard), s.excess))
			}
			s.seen, known[shard], at = max(s.seen, l.heads[shard].seen), s.number, p.overrides.at
			l.seen, isRead = max(l.seen, s.seen), isRead || s.number > 0
		})
	}
	found := map[*Shard]*reading{}
	for _, shard := range p.shards() {
		switch h, isThere := l.heads[shard]; {
		case !isThere:
		case h.isOutOfTouch(l.seen):
			l.failed[shard] = errOutOfTouch
		case h.number == known[shard] && (h.number > 0 || h.sum == l.state.sum):
		case isRead && h.sum == l.state.sum:
			// All of it is known from another one.
			found[shard] = &reading{number: h.number}
		default:
			err = errors.Join(err, p.atShards([]*Shard{shard}, func(*Shard) error {
				r, err := p.read(ctx, shard, known[shard])
				if err != nil {
					l.failed[shard] = err
					if errors.Is(err, errExcess) || errors.Is(err, wire.ErrFraming) {
						p.remember(shard, func(s *shardOverrides) { s.excess, s.until = err, p.now().Add(p.mendPeriod) })
					}
					return p.misread(shard, err)
				}
				found[shard], isRead, l.state = r, true, p.learn(&r.learned)
				return nil
			}))
		}
	}
	for shard, r := range found {
		p.remember(shard, func(s *shardOverrides) {
			// Ends that were read before this machine's clock was set are read again.
			if s.number, s.misread = max(r.number, 1), 0; !p.overrides.at.Equal(at) {
				s.number = 0
			}
			if r.unsound != nil {
				s.unsound, s.lacks, p.overrides.shown = r.unsound, len(p.lacking(r, l.state)) > 0, nil
			}
		})
	}
	return l, err
}

// misread returns the error of reading a shard that answers. If that goes on, it is final: nothing else says so.
func (p *Operator) misread(shard *Shard, err error) error {
	p.remember(shard, func(s *shardOverrides) {
		if s.misread++; s.misread >= mostMisread && !errors.Is(err, store.ErrFinal) {
			err = fmt.Errorf("%w: the server answers, and not what it keeps of them: %w", store.ErrFinal, err)
		}
	})
	return err
}

// isOutOfTouch reports whether a shard is so far behind another one that its content is ignored: the other shards may
// have forgotten tombstones. Compared with the clock instead, an installation that was off would lose everything.
func (h *overrideHead) isOutOfTouch(latest int64) bool {
	return h.seen > 0 && latest-h.seen > outOfTouch.Milliseconds()
}

// read reads the changes of a shard after a given one, or its whole content if it no longer has them.
func (p *Operator) read(ctx context.Context, shard *Shard, since int64) (*reading, error) {
	if since > 0 {
		reply, err := p.runOverride(ctx, shard, opChanges, since)
		if err != nil {
			return nil, err
		}
		if reply != "LOST" {
			r := &reading{}
			_, err = r.take(p, reply)
			return r, err
		}
	}
	return p.readWhole(ctx, shard)
}

// headOf reads the head of a shard. It calls no script, so users need no right to scripts while there are no overrides.
func (p *Operator) headOf(ctx context.Context, shard *Shard) (h overrideHead, err error) {
	key := p.asker.Keys.Overrides()
	cmd, err := p.ask(ctx, shard, key, true, func(bool) *wire.Command { return wire.NewRead("hmget", key, "d", "v", "s") })
	if err != nil {
		return h, err
	}
	texts, err := cmd.Texts()
	if err != nil || len(texts) != 3 {
		return h, cmp.Or(err, errFrames)
	}
	h = overrideHead{sum: uint64(believed(texts[0])), number: believed(texts[1]), seen: believed(texts[2])} //nolint:gosec // it is not negative
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

// readWhole reads all overrides of a shard page by page, which costs the server little, and the log. The next look reads
// changes that are made meanwhile.
func (p *Operator) readWhole(ctx context.Context, shard *Shard) (*reading, error) {
	r := &reading{unsound: map[string]bool{}}
	for cursor := "0"; ; {
		reply, err := p.runOverride(ctx, shard, opPage, cursor)
		if err == nil {
			cursor, err = r.take(p, reply)
		}
		if err != nil {
			return nil, err
		}
		if cursor == "0" {
			break
		}
	}
	var err error
	if r.learned.log, err = p.logOf(ctx, shard); store.KindOf(err) == store.KindConnection {
		// Overrides hold without their log, which may be more than the server sends. The audit says so.
		err = nil
	}
	return r, err
}

// take adds a page of the hash, or a list of changes, to the reading, and returns the next cursor.
func (r *reading) take(p *Operator, reply string) (cursor string, err error) {
	frames, err := framesOf(reply)
	if err != nil || len(frames) == 0 {
		return "", cmp.Or(err, errFrames)
	}
	now := believed(frames[0].texts[0])
	if now < earliest {
		return "", fmt.Errorf("%w: the time is %.100q", errFrames, frames[0].texts[0])
	}
	if r.learned.all == nil {
		r.number, r.learned.all = believed(frames[0].texts[1]), map[string]*overrideVersion{}
	}
	here := p.now()
	for _, f := range frames[1:] {
		name, value := strings.Clone(f.texts[0]), f.texts[1]
		if r.unsound == nil {
			r.learned.log = append(r.learned.log, name)
			lines := strings.Split(name, "\n")
			name = lines[min(nameInChange, len(lines)-1)]
		}
		if v := p.versionIn(name, value, now, here); v != nil {
			r.learned.all[name] = v
		} else if r.unsound != nil {
			r.unsound[name] = true
		}
	}
	if r.size += len(reply); len(r.learned.all)+len(r.unsound) > p.mostKept()+ownFields || r.size > max(p.mostKept()*mostSize, mendBytes) {
		return "", fmt.Errorf("%w than the %d, with those that have ended, that stores keep: find out what else writes to %s, and remove that", errExcess, p.mostKept(), p.asker.Keys.Overrides())
	}
	return frames[0].word, nil
}

// mend starts to write back overrides that shards lack, as of a look, unless a mending is running. Callers do not wait.
// It ends when the shards are closed.
func (p *Operator) mend(ctx context.Context, l *look) {
	if !p.overrides.mending.TryLock() {
		return
	}
	p = p.ofPrimaries()
	go func() {
		defer p.overrides.mending.Unlock()
		// The next mender, a minute later, tries again.
		_ = p.atShards(slices.Collect(maps.Keys(l.heads)), func(shard *Shard) error {
			return shard.Contain("", func() error { return p.mendShard(context.WithoutCancel(ctx), shard, l) })
		})
	}()
}

// touch records in a shard that it is in touch, and that a shard was at the instant seen; it returns the size of the log.
// If doubted is not negative, and the shard was in touch last at that instant, the shard is emptied.
func (p *Operator) touch(ctx context.Context, shard *Shard, seen, doubted int64) (changes int64, err error) {
	reply, err := p.runOverride(ctx, shard, opSeen, p.now().UnixMilli(), seen, doubted)
	return believed(reply), err
}

// claim reports whether this process may mend a shard now: it takes a lock that lasts a mending period.
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

// ofPrimaries returns an operator that reads at primaries only.
func (p *Operator) ofPrimaries() *Operator {
	q := *p
	q.ask = func(ctx context.Context, shard *Shard, key string, _ bool, about func(isReplica bool) *wire.Command) (*wire.Command, error) {
		return p.ask(ctx, shard, key, false, about)
	}
	return &q
}

// mendShard writes back to a shard that differed from the state at two looks in a row, because at one a change may be
// on its way, at most once a minute. If the shard was not touched for an hour, mendShard touches it.
func (p *Operator) mendShard(ctx context.Context, shard *Shard, l *look) (err error) {
	h, now, doubted := l.heads[shard], p.now(), int64(-1)
	var isDue, isStale, lacks bool
	p.remember(shard, func(s *shardOverrides) {
		// An operator may have deleted unsound values by hand, which moves neither d nor v.
		lacks = s.lacks || len(s.unsound) > 0
		differs := h.sum != l.state.sum || lacks
		// A server that is followed by mistake is not written to: it is found to be foreign soon.
		isDue = differs && s.differed && now.Sub(s.mended) >= p.mendPeriod && time.Since(shard.Standing().Since) >= p.followPeriod
		isStale = !differs && h.number > 0 && now.UnixMilli()-h.seen > touchPeriod.Milliseconds() && now.Sub(s.touched) >= p.mendPeriod
		if s.differed = differs; isStale {
			s.touched = now
		}
	})
	if isDue {
		if isDue, err = p.claim(ctx, shard); isDue {
			p.remember(shard, func(s *shardOverrides) { s.mended = now })
		}
	}
	if !isDue && !isStale {
		return err
	}
	state := p.learn(&learned{})
	if h.sum != state.sum && h.isOutOfTouch(l.seen) {
		doubted = h.seen
	}
	changes, err := p.touch(ctx, shard, l.seen, doubted)
	if err == nil {
		// If the difference was due to ended overrides alone, no reading is needed.
		_, err = p.send(ctx, shard, opChange, state.ended)
	}
	if err == nil {
		h, err = p.headOf(ctx, shard)
	}
	if err == nil && (h.sum != state.sum || lacks) {
		if err = p.writeBack(ctx, shard, &h); err == nil {
			changes = 0
			_, err = p.touch(ctx, shard, l.seen, -1)
		}
	}
	if err != nil || changes >= int64(len(state.log)) {
		return err
	}
	return p.mendLog(ctx, shard, state)
}

// writeBack writes to a shard with this head the overrides that it lacks.
func (p *Operator) writeBack(ctx context.Context, shard *Shard, h *overrideHead) error {
	r, err := p.readWhole(ctx, shard)
	if err != nil {
		return err
	}
	if sum := sumOf(r.learned.all); sum != h.sum {
		// Another program wrote there, or a version that knows other kinds.
		if _, err = p.runOverride(ctx, shard, opSum, int64(h.sum), r.number, int64(sum)); err != nil { //nolint:gosec // sums are below 2^52
			return err
		}
	}
	items := p.lacking(r, p.learn(&r.learned))
	// The last call moves v, so that other processes read: it must not be about ended overrides only.
	var ended []item
	for name, v := range r.learned.all {
		if !v.isKept(p.now()) {
			ended = append(ended, item{name: name})
		}
	}
	replies, err := p.send(ctx, shard, opPart, append(ended, items...))
	// The shard may lack more than mendBytes, or have refused some: the next mending checks.
	p.remember(shard, func(s *shardOverrides) { s.unsound, s.lacks, p.overrides.shown = r.unsound, len(items) > 0, nil })
	replies = slices.DeleteFunc(replies, func(reply frame) bool { return reply.word != "HAS" })
	if len(replies) > 0 {
		shard.Emit(wire.Event{Kind: wire.WrittenBack, Err: fmt.Errorf("the shard lacked %d", len(replies))})
	}
	return err
}

// lacking returns the overrides that a shard lacks or would forget too early, up to mendBytes.
func (p *Operator) lacking(r *reading, state *overrideState) (items []item) {
	bytes, soon := 0, p.now().Add(nearEnd)
	for name, v := range state.all {
		there := r.learned.all[name]
		if !v.isKept(soon) || !v.isLater(there) && v.keep <= there.keep+nearEnd.Microseconds() {
			continue
		}
		if bytes += len(name) + len(v.content) + headSize; bytes > mendBytes {
			break
		}
		items = append(items, item{name: name, known: v})
	}
	return items
}

// mendLog writes to the log of a shard the changes that it lacks.
func (p *Operator) mendLog(ctx context.Context, shard *Shard, state *overrideState) error {
	there, err := p.logOf(ctx, shard)
	if err != nil {
		return err
	}
	var args []any
	for _, change := range state.log {
		if !slices.Contains(there, change) {
			args = append(args, change)
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
