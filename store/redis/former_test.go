package redis

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// resharding is shards of which one is added, or removed.
type resharding struct {
	members []Member
	servers map[string]*redistest.Server
}

func newResharding(t *testing.T) *resharding { return newReshardingOf(t, ShardOptions{}) }

// newReshardingOf connects to its shards as opts say.
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
	return New(Options{Members: members, Former: before, CheckTimeout: patience, ChargeTimeout: patience})
}

// directions are a shard that is added, and one that is removed.
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

// TestReshardingRefillsNobody, whatever the algorithm and the operation that
// comes first at the new owner.
func TestReshardingRefillsNobody(t *testing.T) {
	r := newResharding(t)
	for name, direction := range r.directions() {
		for _, limit := range []store.Limit{
			{Algorithm: store.FixedWindow},
			{Algorithm: store.FixedWindow, Align: true},
			{Algorithm: store.SlidingWindow},
			{Algorithm: store.SlidingLog},
			{Algorithm: store.GCRA},
		} {
			t.Run(fmt.Sprintf("%s/%s/%v", name, limit.Algorithm, limit.Align), func(t *testing.T) {
				limit.Zone, limit.Window = "reshard-"+name, time.Hour
				before, after := r.store(direction[0], nil), r.store(direction[1], direction[0])
				request := func(client string) []store.Request {
					return []store.Request{{Limit: &limit, ClientKey: client, Events: 10, Cost: 1, ID: client + fmt.Sprint(time.Now().UnixNano())}}
				}
				for n, client := range moving(before, after, 12) {
					was := store.State{}
					for range 7 {
						was = before.Charge(t.Context(), request(client))[0]
						must(t, was.Err)
					}
					// What comes first.
					var st store.State
					spent := int64(7)
					switch n % 4 {
					case 0:
						st = after.Check(t.Context(), request(client))[0]
					case 1:
						st, spent = after.Charge(t.Context(), request(client))[0], 8
					case 2:
						st, spent = after.Take(t.Context(), request(client))[0], 8
					case 3:
						told := make(chan store.State)
						after.ChargeReported(request(client), func(_ int, st store.State) { told <- st })
						st, spent = <-told, 8
					}
					if st.Err != nil || st.Used != spent {
						t.Fatalf("%s: the first answer is %+v, want %d used", client, st, spent)
					}
					if limit.Algorithm == store.FixedWindow && st.Reset != was.Reset {
						t.Errorf("%s: reset %d, was %d", client, st.Reset, was.Reset)
					}
					admitted := spent
					for range 10 {
						if after.Take(t.Context(), request(client))[0].Allowed {
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

// TestReshardingLeavesOthersAlone: client keys with the same owner are not
// looked for elsewhere.
func TestReshardingLeavesOthersAlone(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	moved := 0
	for i := range 200 {
		client := fmt.Sprint("client-", i)
		must(t, after.Charge(t.Context(), ask(client))[0].Err)
		if before.Owner(client) != after.Owner(client) {
			moved++
		}
	}
	dumps := calls(t, r.servers["a"], "dump") + calls(t, r.servers["b"], "dump")
	if int(dumps) != moved {
		t.Errorf("%d buckets were looked for, of %d that moved", dumps, moved)
	}
	for i := range 200 {
		must(t, after.Charge(t.Context(), ask(fmt.Sprint("client-", i)))[0].Err)
	}
	if again := calls(t, r.servers["a"], "dump") + calls(t, r.servers["b"], "dump"); again != dumps {
		t.Errorf("%d buckets were looked for again", again-dumps)
	}
}

// TestReshardingCountsLeasesAtBothOwners until the old ones end.
func TestReshardingCountsLeasesAtBothOwners(t *testing.T) {
	r := newResharding(t)
	before, after := r.store(r.members[:2], nil), r.store(r.members, r.members[:2])
	limit := &store.Limit{Zone: "slots", Algorithm: store.Concurrency, Window: time.Hour}
	client := moving(before, after, 1)[0]
	take := func(s *Store, id string) store.State {
		return s.Take(t.Context(), []store.Request{{Limit: limit, ClientKey: client, Events: 3, Cost: 1, ID: id}})[0]
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
	must(t, before.Refund(t.Context(), []store.Request{{Limit: limit, ClientKey: client, Events: 3, Cost: 1, ID: "1"}})[0].Err)
	if st := take(after, "5"); !st.Allowed || st.Used != 3 {
		t.Fatalf("once one has ended: %+v", st)
	}
}

// TestFormerOwnerThatIsAway makes nothing be refilled: it is an error.
func TestFormerOwnerThatIsAway(t *testing.T) {
	t.Parallel()
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	after := New(Options{Members: r.members, Former: r.members[:2], CheckTimeout: 200 * time.Millisecond, ChargeTimeout: 200 * time.Millisecond})
	client := moving(before, after, 1)[0]
	must(t, before.Charge(t.Context(), ask(client))[0].Err)
	was := r.servers[before.Owner(client)]
	must(t, was.Pause())
	for range 3 {
		if st := after.Check(t.Context(), ask(client))[0]; st.Err == nil {
			t.Errorf("answered without its former owner: %+v", st)
		}
	}
	must(t, was.Resume())
	eventually(t, "the former owner is heard", func() error {
		if st := after.Check(t.Context(), ask(client))[0]; st.Err != nil || st.Used != 1 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

// TestReshardingBetweenKinds: a cluster has other keys for the same buckets.
func TestReshardingBetweenKinds(t *testing.T) {
	t.Parallel()
	server, c := redistest.Start(t), redistest.StartCluster(t, 3, 0)
	single := []Member{{Name: "single", Shard: newShard(t, ShardOptions{Primary: server.Addr()})}}
	cluster := []Member{{Name: "cluster", Shard: newShard(t, ShardOptions{Cluster: c.Addrs()})}}
	r := new(resharding)
	for name, direction := range map[string][2][]Member{"into": {single, cluster}, "out of": {cluster, single}} {
		before, after := r.store(direction[0], nil), r.store(direction[1], direction[0])
		client := "client " + name
		for range 3 {
			must(t, before.Charge(t.Context(), ask(client))[0].Err)
		}
		if st := after.Check(t.Context(), ask(client))[0]; st.Err != nil || st.Used != 3 {
			t.Errorf("%s a cluster: %+v", name, st)
		}
	}
}

// TestDetachedOutlivesAFailedMigration: a former owner that is silent for longer than
// check_timeout, but not than charge_timeout, costs nothing that is detached.
func TestDetachedOutlivesAFailedMigration(t *testing.T) {
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	clients := moving(before, r.store(r.members, nil), 40)
	was := before.Owner(clients[0])
	for name, op := range map[string]struct {
		detach func(s *Store, reqs []store.Request)
		want   int64
	}{
		"charge": {(*Store).ChargeDetached, 4},
		"refund": {(*Store).RefundDetached, 2},
	} {
		t.Run(name, func(t *testing.T) {
			lost := make(chan error, 1)
			after := New(Options{
				Members: r.members, Former: r.members[:2], CheckTimeout: 20 * time.Millisecond, ChargeTimeout: patience,
				OnUndelivered: func(_ string, _ algorithm.Operation, err error) { lost <- err },
			})
			// One whose former owner is silent, and one whose former owner answers.
			var reqs []store.Request
			for _, silent := range []bool{true, false} {
				i := slices.IndexFunc(clients, func(client string) bool { return (before.Owner(client) == was) == silent })
				req := ask(clients[i])[0]
				clients = slices.Delete(clients, i, i+1)
				for range 3 {
					st := before.Charge(t.Context(), []store.Request{req})[0]
					must(t, st.Err)
					req.Receipt.Period = st.Reset
				}
				reqs = append(reqs, req)
			}
			must(t, r.servers[was].Pause())
			op.detach(after, reqs)
			all := after.former.migrations
			var migration *migration
			eventually(t, "the bucket is on its way", func() error {
				all.mu.Lock()
				defer all.mu.Unlock()
				if migration = all.running[after.keys.key(hourly, reqs[0].ClientKey)]; migration == nil {
					return errors.New("it is not")
				}
				return nil
			})
			<-migration.ended
			if migration.err == nil {
				t.Fatal("a silent server has answered")
			}
			waitForCount(t, r.servers["c"], reqs[1].ClientKey, op.want)
			must(t, r.servers[was].Resume())
			eventually(t, "the operation arrives", func() error {
				select {
				case err := <-lost:
					t.Fatalf("it is reported lost: %v", err)
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

// TestDetachedOfASilentFormerOwnerIsGivenUp when charge_timeout is over, and at once
// if no other try can help.
func TestDetachedOfASilentFormerOwnerIsGivenUp(t *testing.T) {
	r := newResharding(t)
	before := r.store(r.members[:2], nil)
	clients := moving(before, r.store(r.members, nil), 2)
	charge := func(client string, timeout time.Duration) error {
		after := New(Options{Members: r.members, Former: r.members[:2], CheckTimeout: 20 * time.Millisecond, ChargeTimeout: timeout})
		told := make(chan error, 1)
		after.ChargeReported(ask(client), func(_ int, st store.State) { told <- st.Err })
		return <-told
	}
	was := r.servers[before.Owner(clients[0])]
	must(t, was.Pause())
	began := time.Now()
	if err := charge(clients[0], 300*time.Millisecond); !errors.Is(err, store.ErrNotExecuted) {
		t.Errorf("error is %v, want that of a charge that did not run", err)
	}
	if took := time.Since(began); took < 250*time.Millisecond {
		t.Errorf("it was given up after %v", took)
	}
	must(t, was.Resume())
	for _, server := range r.servers {
		must(t, server.Client().Do(t.Context(), "ACL", "SETUSER", "default", "-dump").Err())
	}
	eventually(t, "the missing right is final", func() error {
		if err := charge(clients[1], time.Second); !errors.Is(err, store.ErrFinal) {
			return fmt.Errorf("error is %w", err)
		}
		return nil
	})
}
