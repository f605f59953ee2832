// Package limit limits what a Go program does by the same counts as the rate_limit handler of
// Caddy: a worker, a crawler or a client of an API spends from the buckets of a zone, wherever its
// other spenders run. It needs no Caddy.
//
// [OpenRedis] or [OpenMemory] opens a store, and [Store.Limit] names a limit in it. Then
// [Limit.Allow] and [Limit.Take] decide at once, [Limit.Wait] waits, and [Limit.Reserve] takes an
// estimate that is corrected later. [Transport] does the same for outgoing requests of HTTP, and
// closes a bucket for all processes while the server says that it wants no more.
//
// # Sharing a limit with Caddy
//
// A limit has the same buckets as a zone if the store has the same shards by name and weight,
// KeyPrefix and KeySecret, and the limit has the name, algorithm and window of the zone and, in
// Key, the text of its key. How many events a bucket admits is not part of it: each asks for its own.
//
// Nothing is admitted twice: every decision is made by the bucket's primary, as with the
// option "charge before" of a zone. Blocks, grants and limits that operators set while Caddy runs
// are Caddy's alone.
//
// # Errors
//
// That a bucket has no room is no error. If the store does not answer, the error is
// [ErrUnavailable], and the program decides whether to go on; nothing is counted alone. If such an error
// is [ErrUncertain] as well, the events may have been spent.
package limit

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/ledger"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Redis says where a store in Redis is, 7.0 or later. It has the meaning of the store redis in a
// Caddyfile.
type Redis struct {
	// Shards are the independent servers over which the clients are spread; at least one.
	// Processes that share counts have the same names and weights.
	Shards []Shard
	// KeyPrefix begins the keys in Redis. Empty means "rl".
	KeyPrefix string
	// KeySecret, if it is not empty, replaces client keys by their HMAC, so that Redis never sees
	// them. Empty means none.
	KeySecret string
	// CheckTimeout bounds how long a call waits for Redis before it takes something. 0 means 50ms.
	CheckTimeout time.Duration
	// ChargeTimeout bounds how long a correction is retried that Redis did not run; the reply of
	// one that was sent is awaited two seconds longer. 0 means 250ms.
	ChargeTimeout time.Duration
	// MaxBuckets bounds the buckets that this process remembers, at less than 300 bytes each.
	// 0 means 1,000,000.
	MaxBuckets int
	// OnUndelivered, if it is not nil, is called with the error of what no call waits for, such as
	// the release of a reservation at its deadline. It must be quick.
	OnUndelivered func(err error)
}

// Shard is an independent Redis. Exactly one of Primary, Sentinel and Cluster is set.
type Shard struct {
	// Name decides which clients the shard owns. Empty means "default", for a single shard.
	Name string
	// Weight is the share of the clients relative to other shards. 0 means 1.
	Weight int
	// Primary is the address of the server: host, host:port or unix/path. The default port is 6379.
	Primary string
	// Sentinel finds the primary, and follows failovers.
	Sentinel *Sentinel
	// Cluster are the addresses of some nodes of a Redis Cluster.
	Cluster []string
	// Username and Password log in. Empty means the default user, and no password.
	Username, Password string
	// Credentials, if it is not nil, is asked for them at each new connection instead.
	Credentials func(ctx context.Context) (username, password string, err error)
	// TLS, if it is not nil, encrypts all connections, those to sentinels too.
	TLS *tls.Config
	// DB is the number of the database. Of clusters only those of Valkey 9 have others than 0.
	DB int
}

// Sentinel finds a primary through Redis Sentinel.
type Sentinel struct {
	// Master is the name under which the sentinels watch the primary. Required.
	Master string
	// Addrs are the addresses of the sentinels. The default port is 26379. At least one.
	Addrs []string
	// Username and Password log in to the sentinels. Empty means none.
	Username, Password string
}

// Memory says how a store in this process's memory is kept. The zero value is ready to use.
type Memory struct {
	// MaxBuckets bounds the buckets, at less than 300 bytes each; beyond it those go first whose
	// window is over. 0 means 1,000,000.
	MaxBuckets int
}

// Store keeps buckets. It is safe for concurrent use.
type Store struct {
	buckets store.Store
	// remote and shards are those of Redis, or none.
	remote        *ledger.Ledger
	shards        []*redis.Shard
	onUndelivered func(err error)
	// open counts the reservations that have not ended.
	open atomic.Int64
	// done is closed by Close. closing is held while that happens, and while expiring grows.
	closing sync.Mutex
	done    chan struct{}
	// expiring are the reservations that end by themselves.
	expiring sync.WaitGroup
	// checkTimeout is that of Redis.
	checkTimeout time.Duration
}

// OpenRedis opens a store in Redis. It calls no server: the first use does. The error names the
// field that is wrong.
func OpenRedis(r Redis) (*Store, error) {
	if err := r.validate(); err != nil {
		return nil, fmt.Errorf("limit: Redis: %w", err)
	}
	s := &Store{
		onUndelivered: r.OnUndelivered, done: make(chan struct{}),
		checkTimeout: cmp.Or(r.CheckTimeout, redis.DefaultCheckTimeout),
	}
	members := make([]redis.Member, len(r.Shards))
	for i := range r.Shards {
		shard := redis.NewShard(r.Shards[i].options())
		shard.Use(r.CheckTimeout)
		s.shards = append(s.shards, shard)
		members[i] = redis.Member{Name: cmp.Or(r.Shards[i].Name, onlyShard), Weight: r.Shards[i].Weight, Shard: shard}
	}
	remote := redis.New(redis.Options{
		Members: members, KeyPrefix: r.KeyPrefix, KeySecret: []byte(r.KeySecret),
		CheckTimeout: r.CheckTimeout, ChargeTimeout: r.ChargeTimeout, ReadPrimary: true,
		OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, err error) { s.report(err) },
	})
	s.remote = ledger.New(ledger.NewRegistry(nil), remote, ledger.Options{
		MaxBuckets: r.MaxBuckets, Timeout: r.CheckTimeout,
		OnUndelivered: func(_ string, _ *store.Limit, _ algorithm.Operation, _ int64, err error) { s.report(err) },
	})
	s.remote.Run()
	s.buckets = s.remote
	return s, nil
}

// OpenMemory opens a store in memory, which nothing else shares.
func OpenMemory(m Memory) *Store {
	return &Store{
		buckets: memory.New(memory.NewBuckets(), memory.Options{MaxBuckets: m.MaxBuckets}), done: make(chan struct{}),
		checkTimeout: redis.DefaultCheckTimeout,
	}
}

// closeTimeout bounds the delivery of what waits.
const closeTimeout = 5 * time.Second

// Close delivers what waits, for up to five seconds, and closes the connections. Who waits for room gets
// [ErrClosed]. No limit of the store may be used afterwards. What open reservations have taken stays
// spent.
func (s *Store) Close() {
	if !s.beginClosing() || s.remote == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	expired := make(chan struct{})
	go func() {
		s.expiring.Wait()
		close(expired)
	}()
	select {
	case <-expired:
	case <-ctx.Done():
	}
	s.remote.Flush(ctx)
	s.remote.Stop()
	s.remote.Leave()
	var shards sync.WaitGroup
	for _, shard := range s.shards {
		shards.Go(func() { shard.Close(ctx) })
	}
	shards.Wait()
}

// beginClosing ends all waits, and reports whether the store was open.
func (s *Store) beginClosing() bool {
	s.closing.Lock()
	defer s.closing.Unlock()
	if s.isClosed() {
		return false
	}
	close(s.done)
	return true
}

// beginExpiring adds to expiring, unless the store is closed.
func (s *Store) beginExpiring() bool {
	s.closing.Lock()
	defer s.closing.Unlock()
	if s.isClosed() {
		return false
	}
	s.expiring.Add(1)
	return true
}

func (s *Store) isClosed() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

func (s *Store) report(err error) {
	if s.onUndelivered != nil {
		s.onUndelivered(err)
	}
}

// What is used where nothing is given.
const (
	onlyShard    = "default"
	redisPort    = "6379"
	sentinelPort = "26379"
)

// maxTimeout bounds Redis.CheckTimeout and Redis.ChargeTimeout.
const maxTimeout = time.Minute

func (r *Redis) validate() error {
	switch {
	case len(r.Shards) == 0:
		return errors.New("field Shards is empty: name a server, such as {Primary: \"localhost:6379\"}")
	case r.CheckTimeout < 0 || r.CheckTimeout > maxTimeout:
		return fmt.Errorf("field CheckTimeout %s: it must be up to 1m", r.CheckTimeout)
	case r.ChargeTimeout < 0 || r.ChargeTimeout > maxTimeout:
		return fmt.Errorf("field ChargeTimeout %s: it must be up to 1m", r.ChargeTimeout)
	case r.MaxBuckets < 0:
		return fmt.Errorf("field MaxBuckets %d: it must be at least 1", r.MaxBuckets)
	case r.KeyPrefix != "" && !isName(r.KeyPrefix, ":"):
		return fmt.Errorf("field KeyPrefix %q: use only letters, digits and the characters _ . : -", r.KeyPrefix)
	}
	taken := map[string]bool{}
	for i := range r.Shards {
		name := cmp.Or(r.Shards[i].Name, onlyShard)
		if err := r.Shards[i].validate(); err != nil {
			return fmt.Errorf("shard %s: %w", name, err)
		}
		if taken[name] {
			return fmt.Errorf("shard %s: field Name is that of another shard: give each its own", name)
		}
		taken[name] = true
	}
	return nil
}

func (s *Shard) validate() error {
	ways := 0
	for _, given := range []bool{s.Primary != "", s.Sentinel != nil, len(s.Cluster) > 0} {
		if given {
			ways++
		}
	}
	switch {
	case s.Name != "" && !isName(s.Name, ""):
		return errors.New("field Name: use only letters, digits and the characters _ . -")
	case ways != 1:
		return errors.New("fields Primary, Sentinel and Cluster: set exactly one of them")
	case slices.ContainsFunc(s.addresses(), func(addr string) bool { return addr == "" || strings.Contains(addr, "://") }):
		return errors.New("an address is empty or a URL: write host, host:port or, as Primary, unix/path")
	case s.Weight < 0 || s.Weight > 1000:
		return fmt.Errorf("field Weight %d: it must be from 1 to 1000", s.Weight)
	case s.Sentinel != nil && s.Sentinel.Master == "":
		return errors.New("field Sentinel.Master is empty: write the name under which the sentinels watch the primary")
	case s.Sentinel != nil && len(s.Sentinel.Addrs) == 0:
		return errors.New("field Sentinel.Addrs is empty: name the sentinels")
	case s.Username != "" && s.Password == "":
		return errors.New("field Username needs Password: set both")
	case s.Credentials != nil && s.Password != "":
		return errors.New("field Credentials does not go with Password: set one")
	case s.DB < 0:
		return fmt.Errorf("field DB %d: it must be 0 or more", s.DB)
	}
	return nil
}

func (s *Shard) addresses() []string {
	switch {
	case s.Primary != "":
		return []string{s.Primary}
	case s.Sentinel != nil:
		return s.Sentinel.Addrs
	default:
		return s.Cluster
	}
}

// isName reports whether a text has letters, digits, _ . - and some more characters alone.
func isName(text, more string) bool {
	for _, c := range []byte(text) {
		isLetter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !isLetter && !strings.ContainsRune("_.-"+more, rune(c)) {
			return false
		}
	}
	return text != ""
}

// options are those of the connections. No replica is asked: every decision is the primary's.
func (s *Shard) options() redis.ShardOptions {
	opts := redis.ShardOptions{
		Cluster: complete(s.Cluster, redisPort), TLS: s.TLS, DB: s.DB,
		Credentials: credentials(s.Username, s.Password),
	}
	if s.Credentials != nil {
		opts.Credentials = s.Credentials
	}
	if s.Primary != "" {
		opts.Primary = complete([]string{s.Primary}, redisPort)[0]
	}
	if s.Sentinel != nil {
		opts.Sentinel = &redis.SentinelOptions{
			Master: s.Sentinel.Master, Addrs: complete(s.Sentinel.Addrs, sentinelPort),
			Credentials: credentials(s.Sentinel.Username, s.Sentinel.Password),
		}
	}
	return opts
}

func credentials(username, password string) func(context.Context) (string, string, error) {
	if password == "" {
		return nil
	}
	return func(context.Context) (string, string, error) { return username, password, nil }
}

// complete adds a port to the addresses that lack one.
func complete(addrs []string, port string) (all []string) {
	for _, addr := range addrs {
		if _, _, err := net.SplitHostPort(addr); err != nil && !strings.HasPrefix(addr, "unix/") {
			addr = net.JoinHostPort(strings.Trim(addr, "[]"), port)
		}
		all = append(all, addr)
	}
	return all
}
