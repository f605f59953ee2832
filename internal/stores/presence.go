package stores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// presencePeriod is how often a process tells others of itself, and firstPresencePeriod how often
	// it does so at first, as many times as firstPresences says: most disagree from the start.
	presencePeriod      = 10 * time.Second
	firstPresencePeriod = 250 * time.Millisecond
	firstPresences      = 12
	// missedBeats is after how many periods without a beat a process is taken to be gone, in which this
	// one has looked.
	missedBeats = 3
	// presenceTimeout bounds a telling.
	presenceTimeout = 5 * time.Second
	// mostDetails is how many parts of the configs of others are read after one telling.
	mostDetails = 8
	// lossListed is for how long a reload is a problem by which clients lost their counts.
	lossListed = time.Hour
)

// ProcessID tells this process from others.
var ProcessID = strconv.FormatUint(rand.Uint64(), 36)

// beats is how often this process has told others of itself.
var beats atomic.Int64

// hostName is the name of this process's host, and processName the name of the process.
var (
	hostName = sync.OnceValue(func() string {
		host, err := os.Hostname()
		if err != nil {
			host = "a host without a name"
		}
		return host
	})
	processName = sync.OnceValue(func() string { return hostName() + fmt.Sprintf(processForm, os.Getpid()) })
)

// processForm follows the host in the name of a process.
const processForm = " (process %d)"

// mayRun reports whether another process of that name may run: it is of another host, or its number is in use.
func mayRun(name string) bool {
	var pid int
	number, isHere := strings.CutPrefix(name, hostName())
	if _, err := fmt.Sscanf(number, processForm, &pid); !isHere || err != nil {
		return true
	}
	process, err := os.FindProcess(pid)
	if err != nil || pid == os.Getpid() {
		return false
	}
	defer func() { _ = process.Release() }()
	return !errors.Is(process.Signal(syscall.Signal(0)), os.ErrProcessDone)
}

// presence tells other processes of this one, as long as a store is open, and finds out where their
// configs do not agree with this one.
type presence struct {
	// name is the store's.
	name    string
	kept    store.Shared
	started sync.Once
	life    context.Context
	stop    context.CancelFunc
	// ended is closed when the last beat is over, if there was one.
	ended chan struct{}
	// before has the config that ran when p was made, because it may end before p runs. After the start it has every
	// config that p may have replaced; nil once they are compared.
	before []*placed
	// ran are all that ran then.
	ran []*presence

	mu sync.Mutex
	// parts are the parts of this config, and digests their digests; nil until they are needed.
	parts   map[store.Part]store.Details
	digests map[store.Part]string
	// seen are the other processes, by their records, and looks the looks at each shard, by the name here.
	seen  map[string]seenPresence
	looks map[string]looks
	// own is this process as the shards have it.
	own store.Presence
	// details are the parts of other configs that differ, by digest. Of zones they have only the differing ones.
	details       map[string]store.Details
	disagreements []string
	// shares are the shares of clients that two configs count on different shards, by weights and names. Only the goroutine
	// that tells uses them.
	shares map[string]share
	// loss is how many clients lost their counts when the config was loaded, at lostAt; empty if none did.
	loss   string
	lostAt time.Time
	// first is this one's first beat, and twins are the shards, in pairs, that are one server: there this one
	// finds itself under another name.
	first int64
	twins map[[2]string]bool
}

type seenPresence struct {
	store.Met
	// isAlive is set once a beat has followed another, and at is how long this process had looked at the
	// shard when the last did.
	isAlive bool
	at      time.Duration
}

// looks are this process's looks at a shard that have succeeded: the last one, and for how long there were
// some. So nobody is gone because the shard is away, or this process was stopped.
type looks struct {
	last time.Time
	long time.Duration
}

func (l looks) at(now time.Time) looks {
	if !l.last.IsZero() {
		l.long += min(now.Sub(l.last), presencePeriod)
	}
	l.last = now
	return l
}

func newPresence(name string, kept store.Shared) *presence {
	p := &presence{
		name: name, kept: kept, ended: make(chan struct{}),
		parts: map[store.Part]store.Details{store.PartZones: {}, store.PartShards: kept.Weights()},
		seen:  map[string]seenPresence{}, looks: map[string]looks{}, details: map[string]store.Details{}, twins: map[[2]string]bool{},
	}
	life, end := context.WithCancel(context.Background())
	p.life, p.stop = life, sync.OnceFunc(func() {
		running.Lock()
		defer running.Unlock()
		end()
		if running.names[name]--; running.names[name] == 0 {
			delete(running.names, name)
		}
	})
	running.Lock()
	defer running.Unlock()
	p.ran = slices.Clone(running.all)
	p.before = p.placedBefore()
	running.names[name]++
	return p
}

// NoteZone notes that a zone counts in the store, with a digest of its definition.
func (h *Handle) NoteZone(name, definition string) {
	if open := h.open.Load(); open != nil && open.presence != nil {
		open.presence.mu.Lock()
		defer open.presence.mu.Unlock()
		open.presence.parts[store.PartZones][name], open.presence.digests = definition, nil
	}
}

// Disagreements are where the configs of other processes that use the shards do not agree with this one, and
// whether clients lost their counts when this one was loaded.
func (o *Opened) Disagreements() []string {
	if o.presence == nil {
		return nil
	}
	o.presence.mu.Lock()
	defer o.presence.mu.Unlock()
	all := slices.Clone(o.presence.disagreements)
	if o.presence.loss != "" && time.Since(o.presence.lostAt) < lossListed {
		all = append(all, o.presence.loss)
	}
	return all
}

// running are the presences of the configs that run, oldest first. names counts the presences of each name until they are
// stopped, including a config that is being loaded.
var running = struct {
	sync.Mutex
	all   []*presence
	names map[string]int
}{names: map[string]int{}}

// placed are the shards of a config that runs, and their weights.
type placed struct {
	weights store.Details
	shards  []store.ShardFigures
}

// placedBefore returns the shards of the last config with a store of that name that ran when p was made, and still
// runs, or nil. It ignores stores made later, because handlers of one config share the name of equal stores. running is
// locked.
func (p *presence) placedBefore() []*placed {
	for _, other := range slices.Backward(p.ran) {
		if other.name == p.name && slices.Contains(running.all, other) {
			return []*placed{{other.kept.Weights(), other.kept.Shards()}}
		}
	}
	return nil
}

// akin returns the shards of the stores that go when p comes, because a store was renamed or a handler's own one was
// changed: that ran when p was made, and share a server and the prefix of keys.
func (p *presence) akin() (all []*placed) {
	mine := ownersOf(p.kept.Shards())
	running.Lock()
	defer running.Unlock()
	ran := map[string]int{}
	for _, other := range p.ran {
		if other.life.Err() == nil {
			ran[other.name]++
		}
	}
	for _, other := range p.ran {
		stays := running.names[other.name] > ran[other.name]
		if stays || !slices.Contains(running.all, other) || other.kept.KeyPrefix() != p.kept.KeyPrefix() {
			continue
		}
		shards := other.kept.Shards()
		for address := range ownersOf(shards) {
			if mine[address] != nil {
				all = append(all, &placed{other.kept.Weights(), shards})
				break
			}
		}
	}
	return all
}

// replaced returns the config before: the one with a store of that name or, if there was none, the configs with a
// related store.
func (p *presence) replaced() []*placed {
	running.Lock()
	before := p.placedBefore()
	running.Unlock()
	if len(before) == 0 {
		before = p.before
	}
	if len(before) == 0 {
		before = p.akin()
	}
	return before
}

// noteLoss notes the loss since the configs before: there is none if one of them had the same shards as there are now.
func (p *presence) noteLoss(now []store.ShardFigures) {
	var loss string
	for _, b := range p.before {
		if loss = p.lossSince(b, now); loss == "" {
			break
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if loss != p.loss {
		p.loss, p.lostAt = loss, time.Now()
	}
}

// start tells others of this process from now on, until stop is called: not before the config runs.
func (p *presence) start() {
	p.started.Do(func() {
		_ = contain.Run(func() error {
			p.before = p.replaced()
			p.noteLoss(p.kept.Shards())
			return nil
		})
		p.ran = nil
		running.Lock()
		running.all = append(running.all, p)
		running.Unlock()
		go p.follow()
	})
}

// reviseLoss notes the loss again, until it is known which servers answer at all new addresses.
func (p *presence) reviseLoss() {
	now := p.kept.Shards()
	p.noteLoss(now)
	if !slices.ContainsFunc(p.before, func(b *placed) bool { return !areComparable(b.shards, now) }) {
		p.before = nil
	}
}

func (p *presence) follow() {
	defer close(p.ended)
	defer func() {
		running.Lock()
		defer running.Unlock()
		running.all = slices.DeleteFunc(running.all, func(other *presence) bool { return other == p })
	}()
	for n := 0; ; n++ {
		err := contain.Run(func() error {
			err := p.tell(p.life, time.Now())
			if p.before != nil && p.life.Err() == nil {
				p.reviseLoss()
			}
			return err
		})
		if errors.Is(err, contain.ErrPanic) {
			p.mu.Lock()
			p.disagreements = []string{fmt.Sprintf("whether other Caddys have the same config is not known: report this: %v", err)}
			p.mu.Unlock()
		}
		pause := presencePeriod
		if n < firstPresences && err == nil {
			pause = firstPresencePeriod
		}
		select {
		case <-time.After(pause):
		case <-p.life.Done():
			return
		}
	}
}

// isTold reports whether others may know of this process by p.
func (p *presence) isTold() bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.own.At) > 0
}

// withdraw stops, and makes others forget this process's config: others that start do not compare it.
func (p *presence) withdraw(ctx context.Context) {
	if !p.isTold() {
		return
	}
	p.stop()
	<-p.ended
	_ = contain.Run(func() error {
		p.kept.Withdraw(ctx, p.own)
		return nil
	})
}

// tell tells others of this process, and takes in what they tell. It is now by the monotonic clock.
func (p *presence) tell(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, presenceTimeout)
	defer cancel()
	p.mu.Lock()
	if p.digests == nil {
		p.digests, p.details = map[store.Part]string{}, map[string]store.Details{}
		for part, content := range p.parts {
			p.digests[part] = store.DigestOf(content.Text())
		}
	}
	mine := store.Presence{ID: ProcessID, Process: processName(), Digests: p.digests, At: p.own.At, Beat: beats.Add(1)}
	p.first, p.own.Beat = cmp.Or(p.first, mine.Beat), mine.Beat
	var gone []store.Met
	for key, s := range p.seen {
		if p.looks[s.Here].long-s.at >= missedBeats*presencePeriod {
			gone = append(gone, s.Met)
			delete(p.seen, key)
		}
	}
	p.mu.Unlock()
	// While a shard is away, what the others have is known.
	met, err := p.kept.Announce(ctx, mine, p.textOf, gone)
	p.take(met, mine.Beat, now)
	readErr := p.readDetails(ctx)
	p.judge(now)
	return errors.Join(err, readErr)
}

func (p *presence) textOf(part store.Part) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.parts[part].Text()
}

// take takes in the processes at the shards. Records of this process are of this beat, or of an earlier config that
// differed.
func (p *presence) take(met []store.Met, beat int64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.life.Err() != nil {
		return // the beat may have arrived all the same
	}
	p.own.At = nil
	isThere, isFull := map[string]bool{}, map[string]bool{}
	for i := range met {
		switch m := &met[i]; {
		case m.ID != ProcessID || m.Beat < p.first:
		case m.Shard != m.Here:
			p.twins[[2]string{m.Here, m.Shard}], p.twins[[2]string{m.Shard, m.Here}] = true, true
		case m.Beat == beat:
			// The shard has answered.
			at := append(p.own.At, m.Here)
			p.own, p.looks[m.Here] = m.Presence, p.looks[m.Here].at(now)
			p.own.At = at
		}
	}
	for i := range met {
		m := &met[i]
		isFull[m.Here] = m.Full
		if m.ID == ProcessID && m.Beat == beat {
			continue
		}
		key := fmt.Sprint(m.ID, " ", m.Here, " ", m.Shard, " ", m.Secret, " ", m.Layout, " ", m.Digests)
		s, isKnown := p.seen[key]
		if !isKnown || s.Beat != m.Beat {
			s.at, s.isAlive = p.looks[m.Here].long, s.isAlive || isKnown
		}
		s.Met = *m
		p.seen[key], isThere[key] = s, true
	}
	// A process that a shard has no more has ended, unless the shard lacks room for it.
	maps.DeleteFunc(p.seen, func(key string, s seenPresence) bool {
		return !isThere[key] && p.looks[s.Here].last.Equal(now) && !isFull[s.Here]
	})
}
