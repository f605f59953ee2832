package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/sony/gobreaker/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// resharding has shards of which one is added or removed.
type resharding struct {
	members []Member
	servers map[string]*redistest.Server
}

func newResharding(t *testing.T) *resharding { return newReshardingOf(t, ShardOptions{}) }

// newReshardingOf starts the shards and connects to them with opts.
func newReshardingOf(t *testing.T, opts ShardOptions) *resharding {
	r := &resharding{servers: map[string]*redistest.Server{}}
	for _, name := range []string{"a", "b", "c"} {
		server := redistest.Start(t)
		r.servers[name] = server
		opts.Primary = server.Addr()
		r.members = append(r.members, Member{Name: name, Shard: newShard(t, opts)})
	}
	return r
}

func (r *resharding) store(members, before []Member) *Store {
	return New(Options{Members: members, Previous: before, CheckTimeout: waitTimeout, ChargeTimeout: waitTimeout})
}

// directions returns the members after and before: a shard is added, or removed.
func (r *resharding) directions() map[string][2][]Member {
	return map[string][2][]Member{"added": {r.members[:2], r.members}, "removed": {r.members, r.members[:2]}}
}

// moving returns client keys that have another owner in the second store.
func moving(before, after *Store, n int) (clients []string) {
	for i := 0; len(clients) < n; i++ {
		if client := fmt.Sprint("client-", i); before.Owner(client) != after.Owner(client) {
			clients = append(clients, client)
		}
	}
	return clients
}

// TestReshardingRefillsNoBucket, under every algorithm and every first operation at the
// new owner.
func TestReshardingRefillsNoBucket(t *testing.T) {
	t.Parallel()
	r := newResharding(t)
	for name, direction := range r.directions() {
		for _, limit := range storetest.Limits {
			if algorithm.Of(limit.Algorithm).Lease {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s/%v", name, limit.Algorithm, limit.Align), func(t *testing.T) {
				limit.Zone, limit.Window = "reshard-"+name, endless
				before, after := r.store(direction[0], nil), r.store(direction[1], direction[0])
				request := func(client string) []store.Request {
					return []store.Request{{Limit: &limit, ClientKey: client, Events: 10, Cost: 1, ID: client + fmt.Sprint(time.Now().UnixNano())}}
				}
				for n, client := range moving(before, after, 4) {
					was := store.State{}
					for range 7 {
						was = store.Answers(t.Context(), before.Charge, request(client))[0]
						must(t, was.Err)
					}
					var st store.State
					spent := int64(7)
					switch n % 4 {
					case 0:
						st = store.Answers(t.Context(), after.Check, request(client))[0]
					case 1:
						st, spent = store.Answers(t.Context(), after.Charge, request(client))[0], 8
					case 2:
						st, spent = store.Answers(t.Context(), after.Take, request(client))[0], 8
					case 3:
						reported := make(chan store.State)
						after.ChargeReported(storetest.Posts(request(client)), func(_ int, st store.State) { reported <- st })
						st, spent = <-reported, 8
					}
					if st.Err != nil || st.Used != spent {
						t.Fatalf("%s: the first answer is %+v, want %d used", client, st, spent)
					}
					if limit.Algorithm == store.FixedWindow && st.Reset != was.Reset {
						t.Errorf("%s: reset %d, was %d", client, st.Reset, was.Reset)
					}
					admitted := spent
					for range 4 {
						if store.Answers(t.Context(), after.Take, request(client))[0].Allowed {
							admitted++
						}
					}
					if admitted != 10 {
						t.Errorf("%s: %d of 10 are spent", client, admitted)
					}
				}
			})
		}
	}
}

// TestReshardingMigratesNoOtherBucket: buckets that keep their owner stay there.
func TestReshardingMigratesNoOtherBucket(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	moved := 0
	for i := range 60 {
		client := fmt.Sprint("client-", i)
		must(t, store.Answers(t.Context(), after.Charge, oneOf(client))[0].Err)
		if before.Owner(client) != after.Owner(client) {
			moved++
		}
	}
	dumps := calls(t, r.servers["a"], "pexpiretime") + calls(t, r.servers["b"], "pexpiretime")
	if int(dumps) != moved {
		t.Errorf("%d buckets were dumped, want the %d that moved", dumps, moved)
	}
	for i := range 60 {
		must(t, store.Answers(t.Context(), after.Charge, oneOf(fmt.Sprint("client-", i)))[0].Err)
	}
	if again := calls(t, r.servers["a"], "pexpiretime") + calls(t, r.servers["b"], "pexpiretime"); again != dumps {
		t.Errorf("%d buckets were dumped again", again-dumps)
	}
}

// TestReshardingCountsLeasesAtBothOwners until those at the previous owner end.
func TestReshardingCountsLeasesAtBothOwners(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	limit := &store.Limit{Zone: "slots", Algorithm: store.Concurrency, Window: time.Hour}
	client := moving(before, after, 1)[0]
	take := func(s *Store, id string) store.State {
		return store.Answers(t.Context(), s.Take, []store.Request{{Limit: limit, ClientKey: client, Events: 3, Cost: 1, ID: id}})[0]
	}
	for _, id := range []string{"1", "2"} {
		if st := take(before, id); !st.Allowed {
			t.Fatalf("%+v", st)
		}
	}
	if st := take(after, "3"); !st.Allowed || st.Used != 3 || st.Limit != 3 {
		t.Fatalf("third: %+v", st)
	}
	if st := take(after, "4"); st.Err != nil || st.Allowed || st.Used != 3 {
		t.Fatalf("fourth: %+v", st)
	}
	must(t, store.Answers(t.Context(), before.Refund, []store.Request{{Limit: limit, ClientKey: client, Events: 3, Cost: 1, ID: "1"}})[0].Err)
	if st := take(after, "5"); !st.Allowed || st.Used != 3 {
		t.Fatalf("after one lease has ended: %+v", st)
	}
}

// TestPreviousOwnerThatIsAway is an error, and refills no bucket.
func TestPreviousOwnerThatIsAway(t *testing.T) {
	t.Parallel()
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	after := New(Options{Members: r.members, Previous: r.members[:2], CheckTimeout: 200 * time.Millisecond, ChargeTimeout: 200 * time.Millisecond})
	client := moving(before, after, 1)[0]
	must(t, store.Answers(t.Context(), before.Charge, oneOf(client))[0].Err)
	was := r.servers[before.Owner(client)]
	must(t, was.Pause())
	for range 3 {
		if st := store.Answers(t.Context(), after.Check, oneOf(client))[0]; st.Err == nil {
			t.Errorf("answered without its previous owner: %+v", st)
		}
	}
	must(t, was.Resume())
	eventually(t, "the previous owner answers", func() error {
		if st := store.Answers(t.Context(), after.Check, oneOf(client))[0]; st.Err != nil || st.Used != 1 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

// TestReshardingBetweenKinds: a cluster has other keys for the same buckets.
func TestReshardingBetweenKinds(t *testing.T) {
	t.Parallel()
	server, c := redistest.Start(t), redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout))
	single := []Member{{Name: "single", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}}
	cluster := []Member{{Name: "cluster", Shard: newShard(t, ShardOptions{Cluster: c.Addrs()})}}
	r := new(resharding)
	for name, direction := range map[string][2][]Member{"into": {single, cluster}, "out of": {cluster, single}} {
		before, after := r.store(direction[0], nil), r.store(direction[1], direction[0])
		client := "client " + name
		for range 3 {
			must(t, store.Answers(t.Context(), before.Charge, oneOf(client))[0].Err)
		}
		used(t, name+" a cluster", store.Answers(t.Context(), after.Check, oneOf(client))[0], 3)
	}
}

// TestDetachedOutlivesAFailedMigration: no detached operation is lost if its previous
// owner is silent for longer than check_timeout, but not than charge_timeout.
func TestDetachedOutlivesAFailedMigration(t *testing.T) {
	t.Parallel()
	for name, op := range map[string]struct {
		detach func(s *Store, reqs []*store.Request, report func(i int, st store.State))
		want   int64
	}{
		"charge": {(*Store).ChargeReported, 4},
		"refund": {(*Store).RefundReported, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newResharding(t)
			before := r.store(r.members[:2], nil)
			clients := moving(before, r.store(r.members, nil), 40)
			was := before.Owner(clients[0])
			lost := make(chan error, 1)
			after := New(Options{
				Members: r.members, Previous: r.members[:2], CheckTimeout: 20 * time.Millisecond, ChargeTimeout: time.Hour,
				OnUndelivered: func(_ string, _ algorithm.Operation, err error) { lost <- err },
			})
			// One client has a silent previous owner, the other one that answers.
			var reqs []store.Request
			for _, silent := range []bool{true, false} {
				i := slices.IndexFunc(clients, func(client string) bool { return (before.Owner(client) == was) == silent })
				req := oneOf(clients[i])[0]
				for range 3 {
					st := store.Answers(t.Context(), before.Charge, []store.Request{req})[0]
					must(t, st.Err)
					req.Receipt.Period = st.Reset
				}
				reqs = append(reqs, req)
			}
			i := slices.IndexFunc(r.members, func(m Member) bool { return m.Name == was })
			journal := keepJournal(r.members[i].Shard)
			must(t, r.servers[was].Pause())
			op.detach(after, storetest.Posts(reqs), nil)
			eventually(t, "migrations have failed", func() error {
				if len(journal.all(wire.ServerDown, r.servers[was].Addr())) == 0 {
					return errors.New("the silent server is not left out")
				}
				return nil
			})
			waitForCount(t, r.servers["c"], reqs[1].ClientKey, op.want)
			must(t, r.servers[was].Resume())
			eventually(t, "the operation arrives", func() error {
				select {
				case err := <-lost:
					t.Fatalf("the operation is reported lost: %v", err)
				default:
				}
				if n := stored(t, r.servers["c"], reqs[0].ClientKey); n != op.want {
					return fmt.Errorf("the count is %d, want %d", n, op.want)
				}
				return nil
			})
		})
	}
}

// TestDetachedCallsThatAwaitMigrationsAreBounded: others are given up at once.
func TestDetachedCallsThatAwaitMigrationsAreBounded(t *testing.T) {
	t.Parallel() // it spends its time waiting
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	lost := make(chan error, 2)
	after := New(Options{
		Members: r.members, Previous: r.members[:2], CheckTimeout: 20 * time.Millisecond, ChargeTimeout: 10 * time.Second,
		OnUndelivered: func(_ string, op algorithm.Operation, err error) {
			if op != algorithm.Refund {
				t.Errorf("the operation is %v", op)
			}
			lost <- err
		},
	})
	clients := moving(before, after, 2)
	for _, client := range clients {
		must(t, r.servers[before.Owner(client)].Pause())
		defer func() { must(t, r.servers[before.Owner(client)].Resume()) }()
	}
	after.awaiting.Store(maxAwaiting - 1)
	after.RefundReported(storetest.Posts(oneOf(clients[0])), nil)
	after.RefundReported(storetest.Posts(oneOf(clients[1])), func(_ int, st store.State) {
		if !errors.Is(st.Err, wire.ErrOverload) || !errors.Is(st.Err, store.ErrNotExecuted) {
			t.Errorf("one more: %v", st.Err)
		}
	})
	after.RefundReported(storetest.Posts(oneOf(clients[1])), nil)
	if err := <-lost; !errors.Is(err, wire.ErrOverload) {
		t.Errorf("one more: %v", err)
	}
	if err := <-lost; errors.Is(err, wire.ErrOverload) || !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("the one that waits: %v", err)
	}
	eventually(t, "none waits", func() error {
		if n := after.awaiting.Load(); n != maxAwaiting-1 {
			return fmt.Errorf("%d count", n)
		}
		return nil
	})
}

// TestDetachedOfASilentPreviousOwnerIsGivenUp after charge_timeout, and at once after
// a final error.
func TestDetachedOfASilentPreviousOwnerIsGivenUp(t *testing.T) {
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	clients := moving(before, r.store(r.members, nil), 2)
	charge := func(client string, timeout time.Duration) error {
		after := New(Options{Members: r.members, Previous: r.members[:2], CheckTimeout: 20 * time.Millisecond, ChargeTimeout: timeout})
		reported := make(chan error, 1)
		after.ChargeReported(storetest.Posts(oneOf(client)), func(_ int, st store.State) { reported <- st.Err })
		return <-reported
	}
	was := r.servers[before.Owner(clients[0])]
	must(t, was.Pause())
	began := time.Now()
	if err := charge(clients[0], 300*time.Millisecond); !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("error is %v, want ErrNotExecuted", err)
	}
	if took := time.Since(began); took < 250*time.Millisecond {
		t.Errorf("the charge was given up after %v", took)
	}
	must(t, was.Resume())
	for _, server := range r.servers {
		must(t, undone(t, server).Client().Do(t.Context(), "ACL", "SETUSER", "default", "-pexpiretime").Err())
	}
	eventually(t, "the missing right is final", func() error {
		if err := charge(clients[1], time.Second); !errors.Is(err, store.ErrFinal) {
			return fmt.Errorf("error is %w", err)
		}
		return nil
	})
}

// TestBucketThatEndsEarlyIsNotMigratedAgain by any store, although the copy at the
// previous owner lives on: a refund, or another rate, ended the bucket.
func TestBucketThatEndsEarlyIsNotMigratedAgain(t *testing.T) {
	t.Parallel()
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	client := moving(before, r.store(r.members, nil), 1)[0]
	previous, owner := r.servers[before.Owner(client)].Client(), r.servers["c"].Client()
	refund := func(t *testing.T, s *Store, reqs []store.Request) {
		for _, st := range store.Answers(t.Context(), s.Refund, reqs) {
			must(t, st.Err)
		}
	}
	for name, c := range map[string]struct {
		algorithm store.Algorithm
		end       func(t *testing.T, s *Store, reqs []store.Request)
	}{
		"fixed window": {store.FixedWindow, refund}, "sliding window": {store.SlidingWindow, refund},
		"sliding log": {store.SlidingLog, refund}, "gcra": {store.GCRA, refund},
	} {
		t.Run(name, func(t *testing.T) {
			limit := store.Limit{Zone: name, Algorithm: c.algorithm, Window: endless}
			key := before.asker.Keys.Key(&limit, client)
			var reqs []store.Request
			for i := range 7 {
				req := store.Request{Limit: &limit, ClientKey: client, Events: 10, Cost: 1, ID: fmt.Sprint(i)}
				st := store.Answers(t.Context(), before.Take, []store.Request{req})[0]
				if !st.Allowed {
					t.Fatalf("%+v", st)
				}
				req.Receipt = st.Receipt
				reqs = append(reqs, req)
			}
			c.end(t, r.store(r.members, r.members[:2]), reqs)
			eventually(t, "the copy lives no shorter than the previous one, or has ended", func() error {
				was, err := previous.PExpireTime(t.Context(), key).Result()
				must(t, err)
				now, err := owner.PExpireTime(t.Context(), key).Result()
				must(t, err)
				// A rewritten bucket gets a time to live, which Redis adds to its clock in
				// whole milliseconds: the end may move by one, long after its window.
				if now == -2 || now >= was-time.Millisecond {
					return nil
				}
				return fmt.Errorf("it ends at %d, the previous one at %d", now, was)
			})
			other := r.store(r.members, r.members[:2])
			used(t, "after the bucket has ended", store.Answers(t.Context(), other.Check, reqs[:1])[0], 0)
		})
	}
}

// TestBucketMigratesOnce for concurrent requests.
func TestBucketMigratesOnce(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		const callers, each = 32, 2
		r := newReshardingOf(t, ShardOptions{NoPipelining: plain})
		before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
		clients := moving(before, after, 10)
		for _, client := range clients {
			must(t, store.Answers(t.Context(), before.Charge, oneOf(client))[0].Err)
		}
		errs := make(chan error, callers*len(clients)*each)
		for i := range callers {
			go func() {
				for n := range len(clients) * each {
					client := clients[(i+n)%len(clients)]
					if n%2 == 0 {
						errs <- store.Answers(context.Background(), after.Check, oneOf(client))[0].Err
					} else {
						after.ChargeReported(storetest.Posts(oneOf(client)), func(_ int, st store.State) { errs <- st.Err })
					}
				}
			}()
		}
		for range cap(errs) {
			must(t, <-errs)
		}
		for _, command := range []string{"pexpiretime", "pexpireat"} {
			total := int64(0)
			for _, server := range r.servers {
				total += calls(t, server, command)
			}
			if total != int64(len(clients)) {
				t.Errorf("%d times %s for %d buckets", total, command, len(clients))
			}
		}
		for _, client := range clients {
			if n := stored(t, r.servers["c"], client); n != 1+callers*each/2 {
				t.Errorf("%s has %d, want %d", client, n, 1+callers*each/2)
			}
		}
	})
}

// TestCancelledCallsDoNotOpenTheBreaker of a slow server, under any operation.
func TestCancelledCallsDoNotOpenTheBreaker(t *testing.T) {
	bothWays(t, func(t *testing.T, plain bool) {
		r := newReshardingOf(t, ShardOptions{NoPipelining: plain, PoolSize: 2})
		before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
		client := moving(before, after, 1)[0]
		must(t, store.Answers(t.Context(), before.Charge, oneOf(client))[0].Err)
		was := r.servers[before.Owner(client)]
		must(t, was.Pause())
		for i := range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%4)*5*time.Millisecond)
			if i%5 == 0 {
				cancel()
			}
			for name, call := range map[string]func(context.Context, []*store.Ask){
				"check": before.Check, "take": before.Take, "charge": before.Charge, "moved check": after.Check, "moved charge": after.Charge,
			} {
				if err := store.Answers(ctx, call, oneOf(client))[0].Err; err == nil {
					t.Errorf("%s: a paused server has answered", name)
				} else if errors.Is(err, wire.ErrShardDown) {
					t.Errorf("%s: %v", name, err)
				}
			}
			cancel()
		}
		must(t, was.Resume())
		must(t, store.Answers(t.Context(), before.Check, oneOf(client))[0].Err)
		must(t, store.Answers(t.Context(), after.Check, oneOf(client))[0].Err)
		for _, m := range r.members {
			for _, at := range m.Shard.Servers() {
				for _, l := range append([]*wire.Lane{at.Checks, at.Charges}, at.Replicas...) {
					breaker := *hidden[*gobreaker.TwoStepCircuitBreaker[any]](l, "breaker")
					if counts := breaker.Counts(); counts.TotalFailures > 0 {
						t.Errorf("%d failures are counted against %s", counts.TotalFailures, l.Addr)
					}
				}
			}
		}
	})
}

// TestMigrationOutlivesItsCaller: the bucket migrates although its only caller has
// stopped waiting.
func TestMigrationOutlivesItsCaller(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	client := moving(before, after, 1)[0]
	must(t, store.Answers(t.Context(), before.Charge, oneOf(client))[0].Err)
	was := r.servers[before.Owner(client)]
	must(t, was.Pause())
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() { left <- store.Answers(ctx, after.Check, oneOf(client))[0].Err }()
	all := after.opts.Migrations
	eventually(t, "the migration has begun", func() error {
		all.mu.Lock()
		defer all.mu.Unlock()
		if len(all.running) == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	leave()
	if err := <-left; !errors.Is(err, store.ErrNotExecuted) || !errors.Is(err, context.Canceled) {
		t.Errorf("the cancelled call has error %v", err)
	}
	must(t, was.Resume())
	waitForCount(t, r.servers["c"], client, 1)
}

// pipelineCounter counts the pipelines of a client with calls of a script.
type pipelineCounter struct {
	// sha is the script's name.
	sha string

	mu                  sync.Mutex
	pipelines, commands int
}

func (p *pipelineCounter) count(cmds ...goredis.Cmder) {
	p.mu.Lock()
	defer p.mu.Unlock()
	some := 0
	for _, cmd := range cmds {
		if c, ok := cmd.(*wire.Command); ok && slices.Contains(c.Cmder.Args(), any(p.sha)) {
			some++
		}
	}
	p.commands += some
	p.pipelines += min(some, 1)
}

func (p *pipelineCounter) DialHook(next goredis.DialHook) goredis.DialHook { return next }

func (p *pipelineCounter) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook {
	return func(ctx context.Context, cmd goredis.Cmder) error {
		p.count(cmd)
		return next(ctx, cmd)
	}
}

func (p *pipelineCounter) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []goredis.Cmder) error {
		p.count(cmds...)
		return next(ctx, cmds)
	}
}

// TestManyBucketsMigrateInFewPipelines: migrations that wait at the same time share
// a pipeline.
func TestManyBucketsMigrateInFewPipelines(t *testing.T) {
	const clients = 1000
	r := newResharding(t)
	before := []Member{r.members[0]}
	after := []Member{r.members[2]}
	s := r.store(after, before)
	// The servers load the scripts.
	must(t, store.Answers(t.Context(), r.store(before, nil).Charge, oneOf("first"))[0].Err)
	must(t, store.Answers(t.Context(), s.Check, oneOf("first"))[0].Err)
	reqs := make([]store.Request, clients)
	for i := range reqs {
		reqs[i] = oneOf(fmt.Sprint("client-", i))[0]
	}
	for _, st := range store.Answers(t.Context(), r.store(before, nil).Charge, reqs) {
		must(t, st.Err)
	}
	dumps, restores := &pipelineCounter{sha: goredis.NewScript(luascripts.Dump).Hash()}, &pipelineCounter{sha: goredis.NewScript(luascripts.Restore).Hash()}
	from, to := before[0].Shard.Owner(0).Checks, after[0].Shard.Owner(0).Checks
	clientOf(from).AddHook(dumps)
	clientOf(to).AddHook(restores)
	// Calls wait together while a server is paused.
	must(t, r.servers["a"].Pause())
	must(t, r.servers["c"].Pause())
	answers := make(chan store.State, clients)
	for i := range reqs {
		go func() { answers <- store.Answers(context.Background(), s.Check, reqs[i:i+1])[0] }()
	}
	waiting := func(l *wire.Lane, p *pipelineCounter) {
		t.Helper()
		eventually(t, "all wait", func() error {
			p.mu.Lock()
			defer p.mu.Unlock()
			if n := p.commands + l.Figures().Queued; n != clients {
				return fmt.Errorf("%d do", n)
			}
			return nil
		})
	}
	waiting(from, dumps)
	must(t, r.servers["a"].Resume())
	waiting(to, restores)
	must(t, r.servers["c"].Resume())
	for range reqs {
		used(t, "check", <-answers, 1)
	}
	most := wire.DefaultPoolSize + (clients+maxBatch-1)/maxBatch
	for name, p := range map[string]*pipelineCounter{"dumped": dumps, "restored": restores} {
		if p.commands != clients || p.pipelines > most {
			t.Errorf("%d buckets were %s in %d pipelines, want %d in at most %d", p.commands, name, p.pipelines, clients, most)
		}
	}
}

// TestResetIsNotUndone by another process that had dumped the previous bucket before,
// under every algorithm.
func TestResetIsNotUndone(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	client := moving(before, after, 1)[0]
	for _, algorithm := range counting {
		req := oneOf(client)[0]
		req.Limit, req.ID = &store.Limit{Zone: "undone", Algorithm: algorithm, Window: endless}, "id"
		reqs := []store.Request{req}
		must(t, store.Answers(t.Context(), before.Charge, reqs)[0].Err)
		key := before.asker.Keys.Key(req.Limit, client)
		source := r.servers[before.Owner(client)].Client()
		dumped, err := source.Eval(t.Context(), luascripts.Dump, []string{key}, ask.TypeOf(algorithm)).Text()
		must(t, err)
		expiry, err := source.PExpireTime(t.Context(), key).Result()
		must(t, err)

		resets(t, after, req)
		other := r.store(r.members, r.members[:2])
		late, _ := other.opts.Migrations.join(key)
		late.store, late.now, late.clientKey, late.limit = other, r.members[2].Shard, client, *req.Limit
		late.restore(life{expiry: expiry.Milliseconds()}, dumped[8:], true)
		must(t, late.wait(t.Context()))
		for _, s := range []*Store{after, other, r.store(r.members, r.members[:2])} {
			used(t, fmt.Sprint(algorithm, ": after the reset"), store.Answers(t.Context(), s.Check, reqs)[0], 0)
		}
	}
}

// TestBucketMigratesToASlotThatMoves in a Redis Cluster, where a node that imports the
// slot refuses calls of two keys.
func TestBucketMigratesToASlotThatMoves(t *testing.T) {
	t.Parallel()
	server, c := redistest.Start(t), redistest.StartCluster(t, 2, 0, redistest.NodeTimeout(waitTimeout))
	single := []Member{{Name: "single", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}}
	cluster := []Member{{Name: "cluster", Shard: newShard(t, ShardOptions{Cluster: c.Addrs()})}}
	r := new(resharding)
	before, after := r.store(single, nil), r.store(cluster, single)
	req := oneOf("client")[0]
	req.Limit = &store.Limit{Zone: "moving", Algorithm: store.GCRA, Window: time.Hour}
	must(t, store.Answers(t.Context(), before.Charge, []store.Request{req})[0].Err)
	slot := redistest.Keyslot("{client}")
	from, err := c.Owner(t.Context(), slot)
	must(t, err)
	to := c.Nodes[0]
	if to == from {
		to = c.Nodes[1]
	}
	_, err = c.BeginMigration(t.Context(), slot, from, to)
	must(t, err)
	used(t, "check", store.Answers(t.Context(), after.Check, []store.Request{req})[0], 1)
}

// TestBucketWithoutExpiryMigrates: a plain opening or charge that was cut short leaves one. The copy
// expires.
func TestBucketWithoutExpiryMigrates(t *testing.T) {
	t.Parallel()
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	client := moving(before, after, 1)[0]
	previous, owner := r.servers[before.Owner(client)].Client(), r.servers["c"].Client()
	for n, limit := range storetest.Limits {
		if algorithm.Of(limit.Algorithm).Lease {
			continue
		}
		limit.Zone, limit.Window = fmt.Sprint("persistent", n), endless
		req := store.Request{Limit: &limit, ClientKey: client, Events: 10, Cost: 7, ID: "first"}
		was := store.Answers(t.Context(), before.Charge, []store.Request{req})[0]
		must(t, was.Err)
		key := before.asker.Keys.Key(&limit, client)
		must(t, previous.Persist(t.Context(), key).Err())
		isOrphan := limit.Align
		if isOrphan {
			must(t, previous.HDel(t.Context(), key, "r").Err())
		}
		req.Cost, req.ID = 1, "second"
		st := store.Answers(t.Context(), after.Take, []store.Request{req})[0]
		used(t, fmt.Sprint(limit), st, 8)
		if algorithm.Of(limit.Algorithm).Windowed() && st.Reset != was.Reset {
			t.Errorf("%v: the window ends at %d, not at %d", limit, st.Reset, was.Reset)
		}
		if ttl := owner.PTTL(t.Context(), key).Val(); ttl <= 0 || ttl > 2*limit.Window+time.Minute {
			t.Errorf("%v: the copy expires in %v", limit, ttl)
		}
	}
	// One of another program does not become a bucket, or expire where it is.
	limit := store.Limit{Zone: "foreign", Algorithm: store.FixedWindow, Window: time.Hour}
	req := store.Request{Limit: &limit, ClientKey: client, Events: 10, Cost: 1}
	key := before.asker.Keys.Key(&limit, client)
	must(t, previous.HSet(t.Context(), key, "name", "x").Err())
	if st := store.Answers(t.Context(), after.Take, []store.Request{req})[0]; st.Err == nil {
		t.Errorf("a take of foreign data: %+v", st)
	}
	if ttl := previous.PTTL(t.Context(), key).Val(); ttl > 0 {
		t.Errorf("it expires in %v", ttl)
	}
}

// TestLongLogMigrates, dumped once, although no request waits as long as that takes: the first ones
// follow on_error, later ones join the migration, or find the copy.
func TestLongLogMigrates(t *testing.T) {
	t.Parallel()
	r := newResharding(t)
	for n := range maxTries {
		dumps, took := migrateLongLog(t, r, fmt.Sprint("k", n))
		if dumps == 1 {
			return
		}
		// A server that is slower than the patience of a migration is asked again.
		if took < wire.ReplyTimeout {
			t.Fatalf("it was dumped %d times within %v", dumps, took)
		}
	}
	t.Fatalf("%d migrations took longer than %v", maxTries, wire.ReplyTimeout)
}

// migrateLongLog makes a long log migrate from shard a to shard c, and returns how often it was
// dumped, and how long that took.
func migrateLongLog(t *testing.T, r *resharding, client string) (dumps int64, took time.Duration) {
	t.Helper()
	const members = 10_000
	before, after := r.store(r.members[:1], nil), r.store(r.members[2:], r.members[:1])
	after.opts.CheckTimeout = time.Millisecond
	limit := &store.Limit{Zone: "long", Algorithm: store.SlidingLog, Window: endless}
	previous, owner := r.servers["a"].Client(), r.servers["c"].Client()
	req := store.Request{Limit: limit, ClientKey: client, Events: members, Cost: 1, ID: "first"}
	must(t, store.Answers(t.Context(), before.Charge, []store.Request{req})[0].Err)
	key, now := before.asker.Keys.Key(limit, client), time.Now().UnixMicro()
	for n := 1; n < members; n += 1000 {
		var some []goredis.Z
		for i := n; i < min(n+1000, members); i++ {
			some = append(some, goredis.Z{Score: float64(now - int64(i)), Member: fmt.Sprintf("%022d", i)})
		}
		must(t, previous.ZAdd(t.Context(), key, some...).Err())
	}
	req.ID = "later"
	dumped, began := calls(t, r.servers["a"], "pexpiretime"), time.Now()
	eventually(t, "the log is at its new owner", func() error {
		if st := store.Answers(t.Context(), after.Peek, []store.Request{req})[0]; st.Err != nil {
			return st.Err
		}
		return nil
	})
	eventually(t, "all members are there", func() error {
		if n := owner.ZCard(t.Context(), key).Val(); n != members {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
	took = time.Since(began)
	return calls(t, r.servers["a"], "pexpiretime") - dumped, took
}
