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
	"sync"
	"sync/atomic"
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
)

// ProcessID tells this process from others.
var ProcessID = strconv.FormatUint(rand.Uint64(), 36)

// processName is what this process is called, and beats is how often it has told others of itself.
var (
	beats       atomic.Int64
	processName = sync.OnceValue(func() string {
		host, err := os.Hostname()
		if err != nil {
			host = "a host without a name"
		}
		return fmt.Sprintf("%s (process %d)", host, os.Getpid())
	})
)

// presence tells other processes of this one, as long as a store is open, and finds out where their
// configs do not agree with this one.
type presence struct {
	kept    store.Operable
	started sync.Once
	life    context.Context
	stop    context.CancelFunc

	mu    sync.Mutex
	zones map[string]string
	// seen are the other processes, by what they say, and looks those at each shard, by the name here.
	seen          map[string]seenPresence
	looks         map[string]looks
	secret        string
	disagreements []string
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

func newPresence(kept store.Operable) *presence {
	p := &presence{kept: kept, zones: map[string]string{}, seen: map[string]seenPresence{}, looks: map[string]looks{}, twins: map[[2]string]bool{}}
	p.life, p.stop = context.WithCancel(context.Background())
	return p
}

// start tells others of this process from now on, until stop is called: not before the config runs.
func (p *presence) start() { p.started.Do(func() { go p.follow() }) }

// NoteZone notes that a zone counts in the store, with a digest of its definition.
func (h *Handle) NoteZone(name, definition string) {
	if open := h.open.Load(); open != nil && open.presence != nil {
		open.presence.mu.Lock()
		defer open.presence.mu.Unlock()
		open.presence.zones[name] = definition
	}
}

// Disagreements are where the configs of other processes that use the shards do not agree with this one.
func (o *Opened) Disagreements() []string {
	if o.presence == nil {
		return nil
	}
	o.presence.mu.Lock()
	defer o.presence.mu.Unlock()
	return slices.Clone(o.presence.disagreements)
}

func (p *presence) follow() {
	for n := 0; ; n++ {
		err := contain.Run(func() error { return p.tell(p.life, time.Now()) })
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

// tell tells others of this process, and takes in what they tell. It is now by the monotonic clock.
func (p *presence) tell(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, presenceTimeout)
	defer cancel()
	p.mu.Lock()
	mine := store.Presence{ID: ProcessID, Process: processName(), Zones: maps.Clone(p.zones), Beat: beats.Add(1)}
	p.first = cmp.Or(p.first, mine.Beat)
	var gone []store.Met
	for key, s := range p.seen {
		if p.looks[s.Here].long-s.at >= missedBeats*presencePeriod {
			gone = append(gone, s.Met)
			delete(p.seen, key)
		}
	}
	p.mu.Unlock()
	// While a shard is away, what the others have is known.
	met, err := p.kept.Announce(ctx, mine, gone)
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range met {
		if m := &met[i]; m.ID == ProcessID && m.Beat >= p.first && m.Shard != m.Here {
			p.twins[[2]string{m.Here, m.Shard}], p.twins[[2]string{m.Shard, m.Here}] = true, true
		}
	}
	isMine := func(m *store.Met) bool { return m.ID == ProcessID && m.Beat == mine.Beat }
	for i := range met {
		if m := &met[i]; isMine(m) {
			// The shard has answered.
			p.secret, p.looks[m.Here] = m.Secret, p.looks[m.Here].at(now)
		}
	}
	for i := range met {
		if m := &met[i]; !isMine(m) {
			p.take(m)
		}
	}
	mine.Secret = p.secret
	p.judge(mine)
	return err
}

// take takes in one of the processes at a shard. This one's own are those of its configs before, where they
// were others. mu is held.
func (p *presence) take(met *store.Met) {
	key := fmt.Sprint(met.ID, " ", met.Here, " ", met.Shard, " ", met.Secret, " ", met.Zones)
	s, isKnown := p.seen[key]
	if !isKnown || s.Beat != met.Beat {
		s.at, s.isAlive = p.looks[met.Here].long, s.isAlive || isKnown
	}
	s.Met = *met
	p.seen[key] = s
}

// judge finds the disagreements. mu is held.
func (p *presence) judge(mine store.Presence) {
	now := map[string]bool{}
	for _, s := range p.seen {
		for _, text := range s.disagreesWith(mine, p.twins) {
			now[text] = true
		}
	}
	p.disagreements = slices.Sorted(maps.Keys(now))
}

// disagreesWith returns where a process does not agree with this one. The names of twins say nothing: they are
// a problem of their own.
func (s *seenPresence) disagreesWith(mine store.Presence, twins map[[2]string]bool) (texts []string) {
	isOwn := s.ID == mine.ID
	who := "the Caddy on " + s.Process
	if isOwn {
		who = "this Caddy's config before the last reload"
	}
	// Names of shards that were swapped are said at once; else the process has to be there.
	if s.Shard != s.Here && !twins[[2]string{s.Here, s.Shard}] {
		texts = append(texts, fmt.Sprintf("shard %s is shard %s for %s, so the same clients are counted on different servers: give the servers the same names everywhere", s.Here, s.Shard, who))
	}
	if isOwn || !s.isAlive {
		return texts
	}
	if s.Secret != mine.Secret {
		texts = append(texts, fmt.Sprintf("%s has another key_secret, so each counts the same clients by itself: give both the same one", who))
	}
	for zone, definition := range mine.Zones {
		if other, ok := s.Zones[zone]; ok && other != definition {
			texts = append(texts, fmt.Sprintf("zone %s is defined otherwise for %s, so their clients have two limits: load the same definition, or give one zone another name", zone, who))
		}
	}
	return texts
}
