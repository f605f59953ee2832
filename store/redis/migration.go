package redis

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/maypok86/otter/v2"
	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// maxMigrated bounds how many buckets are remembered, at about 110 bytes each. To
// forget one costs a call.
const maxMigrated = 1_000_000

// Migrations are the buckets that are being brought from former owners, each once
// whoever wants it, and those for which that is done. Stores may share them that
// have the same members and the same former members.
type Migrations struct {
	seed maphash.Seed
	// done holds, by a hash of their key, the buckets that were brought or of which
	// there was nothing to bring, and for how long to believe that.
	done *otter.Cache[uint64, time.Duration]

	mu sync.Mutex
	// running are by the bucket's key.
	running map[string]*migration
}

// NewMigrations returns Migrations of which none has begun.
func NewMigrations() *Migrations {
	return &Migrations{
		seed:    maphash.MakeSeed(),
		running: map[string]*migration{},
		done: otter.Must(&otter.Options[uint64, time.Duration]{
			MaximumSize:      maxMigrated,
			ExpiryCalculator: otter.ExpiryCreatingFunc(func(e otter.Entry[uint64, time.Duration]) time.Duration { return e.Value }),
		}),
	}
}

// Close ends what is done in the background. What is running goes on.
func (m *Migrations) Close() { m.done.StopAllGoroutines() }

// join returns the migration of a bucket, which the caller has to start if it is
// new, or nil if there is nothing to do.
func (m *Migrations) join(target string) (running *migration, isNew bool) {
	hash := maphash.String(m.seed, target)
	if _, ok := m.done.GetIfPresent(hash); ok {
		return nil, false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if running = m.running[target]; running != nil {
		return running, false
	}
	// It may have ended just now.
	if _, ok := m.done.GetIfPresent(hash); ok {
		return nil, false
	}
	running = &migration{target: target, ended: make(chan struct{})}
	m.running[target] = running
	return running, true
}

// migration is a bucket on its way to its new owner: dumped at the former one, and
// restored unless it is there. It goes on whoever stops waiting for it, and joins
// the queues of checks, so that many leave in one pipeline.
type migration struct {
	store          *Store
	was, now       *Shard
	clientKey      string
	source, target string
	// marks is set if the bucket may end before the former copy, which is then not
	// to be brought again.
	marks bool
	// lasting is how long it is remembered that this is done.
	lasting time.Duration

	ended chan struct{}
	// err is what went wrong, once it has ended.
	err error
}

// bring returns the migration of a bucket from its former owner, or nil if it is
// done. Other processes may bring the bucket at the same time.
func (s *Store) bring(was *Shard, r *store.Request) *migration {
	now := s.shards[s.sharder.owner(r.ClientKey)]
	m, isNew := s.former.migrations.join(s.keyIn(now, r))
	if !isNew {
		return m
	}
	m.store, m.was, m.now = s, was, now
	m.clientKey, m.source = r.ClientKey, s.keyIn(was, r)
	m.marks = layoutOf(r.Limit.Algorithm).endsEarly
	// A bucket that was not there for a window cannot come back.
	m.lasting = max(r.Limit.Window, time.Second)
	if was.isFound() && now.isFound() {
		m.dump()
	} else {
		go m.find()
	}
	return m
}

// find starts once it is known who the servers are.
func (m *migration) find() {
	ctx, cancel := context.WithTimeout(context.Background(), m.store.opts.CheckTimeout)
	defer cancel()
	m.was.await(ctx)
	m.now.await(ctx)
	m.dump()
}

func (m *migration) dump() {
	m.ask(m.was, newScriptCall(scriptDump, wordEvalSHARO, []string{m.source}), func(reply string, err error) {
		if err != nil {
			m.end(err)
			return
		}
		expiry, content := reply[:min(8, len(reply))], reply[min(8, len(reply)):]
		at, err := unpack(expiry)
		switch {
		case err != nil || len(at) != 1:
			m.end(errReply)
		case content == "" || at[0] < 0:
			m.end(nil)
		default:
			m.restore(at[0], content, true)
		}
	})
}

// restore makes the bucket. marked is set if the mark counts.
func (m *migration) restore(expiry int64, content string, marked bool) {
	keys := []string{m.target}
	if marked {
		keys = append(keys, m.store.keysIn(m.now).markOf(m.target))
	}
	var marks int64
	if m.marks {
		marks = 1
	}
	m.ask(m.now, newScriptCall(scriptRestore, wordEvalSHA, keys, appendPacked(nil, expiry, marks), content), func(_ string, err error) {
		if marked && says(err, oneKey) {
			// A node of a Redis Cluster takes one key at a time while it gets the slot.
			m.restore(expiry, content, false)
			return
		}
		m.end(err)
	})
}

// ask makes a shard's primary run cmd, and tells then of the reply.
func (m *migration) ask(shard *Shard, cmd *command, then func(reply string, err error)) {
	at := m.store.serversOf(shard, m.clientKey)
	if at == nil {
		then("", errNoServers)
		return
	}
	if !at.checks.isUp() {
		then("", at.checks.down())
		return
	}
	c := newCall(time.Now().Add(m.store.opts.CheckTimeout))
	c.fair = m.store.opts.CheckTimeout
	c.cmds = append(c.cmds, cmd)
	c.detached = func(c *call) {
		err := cmd.outcome
		c.release()
		if err != nil {
			then("", err)
			return
		}
		then(cmd.Cmder.(*goredis.StringCmd).Val(), nil)
	}
	at.checks.post(c)
}

// end tells all who wait.
func (m *migration) end(err error) {
	all := m.store.former.migrations
	if err == nil {
		all.done.Set(maphash.String(all.seed, m.target), m.lasting)
	} else {
		m.err = notExecuted(fmt.Errorf("bring a bucket from its former shard: %w", err))
	}
	all.mu.Lock()
	delete(all.running, m.target)
	all.mu.Unlock()
	close(m.ended)
}

// wait returns nil once the bucket is at its owner. A nil migration is one that is
// done.
func (m *migration) wait(ctx context.Context) error {
	if m == nil {
		return nil
	}
	select {
	case <-m.ended:
		return m.err
	case <-ctx.Done():
	}
	err := ctx.Err()
	if errors.Is(err, context.DeadlineExceeded) {
		err = ErrTimeout
	}
	return notExecuted(fmt.Errorf("bring a bucket from its former shard: %w", err))
}
