package redis

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// gate forwards connections to a server, and holds those that arrive while it is
// shut.
type gate struct {
	listener net.Listener
	upstream string
	// held receives one value for each connection that is held.
	held chan struct{}

	mu sync.Mutex
	// shut is closed when the gate is opened; nil while it is open.
	shut chan struct{}
}

func startGate(t *testing.T, upstream string) *gate {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	g := &gate{listener: listener, upstream: upstream, held: make(chan struct{}, 16)}
	var running sync.WaitGroup
	running.Go(func() {
		for client, err := listener.Accept(); err == nil; client, err = listener.Accept() {
			running.Go(func() { g.pass(client) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		running.Wait()
	})
	return g
}

func (g *gate) pass(client net.Conn) {
	defer client.Close()
	g.mu.Lock()
	shut := g.shut
	g.mu.Unlock()
	if shut != nil {
		g.held <- struct{}{}
		<-shut
	}
	server, err := net.Dial("tcp", g.upstream)
	if err != nil {
		return
	}
	defer server.Close()
	go func() {
		_, _ = io.Copy(server, client)
		server.Close()
	}()
	_, _ = io.Copy(client, server)
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = make(chan struct{})
}

// letOthers lets connections pass that arrive from now on.
func (g *gate) letOthers() (release func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	held := g.shut
	g.shut = nil
	return func() { close(held) }
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.shut)
	g.shut = nil
}

// abandon returns a take whose client left while the take waited for a connection, and its
// error. Refunds still have one.
func abandon(t *testing.T, s *Store, way *gate) ([]store.Request, error) {
	t.Helper()
	waitUntilUp(t, s)
	reqs := oneOf("k")
	reqs[0].Limit = &store.Limit{Zone: "log", Algorithm: store.SlidingLog, Window: time.Hour}
	reqs[0].ID = "request"
	return reqs, abandonBy(t, s.Take, reqs, s.opts.Members[0].Shard.Servers()[0].Checks, way)
}

// abandonBy returns the error of an operation whose caller left while it waited for a connection of the lane.
func abandonBy(t *testing.T, op func(context.Context, []*store.Ask), reqs []store.Request, lane *wire.Lane, way *gate) error {
	t.Helper()
	// Occupy the existing connections, with those that a probe still uses.
	client, occupied := clientOf(lane), uint32(0)
	eventually(t, "all connections are occupied", func() error {
		for ; client.PoolStats().IdleConns > 0; occupied++ {
			conn := client.Conn()
			t.Cleanup(func() { conn.Close() })
			must(t, conn.Ping(t.Context()).Err())
		}
		if total := client.PoolStats().TotalConns; total != occupied {
			return fmt.Errorf("%d of %d are", occupied, total)
		}
		return nil
	})
	way.close()
	ctx, leave := context.WithCancel(t.Context())
	go func() {
		<-way.held
		leave()
	}()
	err := store.Answers(ctx, op, reqs)[0].Err
	if !errors.Is(err, store.ErrUncertain) {
		t.Fatalf("what was abandoned has error %v, want an uncertain one", err)
	}
	return err
}

// TestRefundDoesNotOvertakeARenewal, which would take the slot back for another window.
func TestRefundDoesNotOvertakeARenewal(t *testing.T) {
	way := startGate(t, redistest.Start(t).Addr())
	s := newStore(t, newShard(t, ShardOptions{Primary: way.listener.Addr().String()}), func(o *Options) { o.ChargeTimeout = waitTimeout })
	waitUntilUp(t, s)
	reqs := oneOf("k")
	reqs[0].Limit = &store.Limit{Zone: "slots", Algorithm: store.Concurrency, Window: time.Hour}
	reqs[0].ID = "request"
	must(t, store.Answers(t.Context(), s.Take, reqs)[0].Err)
	_ = abandonBy(t, s.Charge, reqs, s.opts.Members[0].Shard.Servers()[0].Charges, way)
	release := way.letOthers()
	done := make(chan error, 1)
	s.RefundReported(storetest.Posts(reqs), func(_ int, st store.State) { done <- st.Err })
	select {
	case err := <-done:
		t.Error("the refund overtook the renewal")
		done <- err
	case <-time.After(50 * time.Millisecond):
		// It had time to: nothing shows that it waits.
	}
	release()
	must(t, <-done)
	used(t, "after the refund", store.Answers(t.Context(), s.Check, reqs)[0], 0)
}

// TestAbandonedTakeTellsItsEnd: one that is refused in the end has spent nothing.
func TestAbandonedTakeTellsItsEnd(t *testing.T) {
	for _, isFull := range []bool{false, true} {
		server := redistest.Start(t)
		way := startGate(t, server.Addr())
		s := newStore(t, newShard(t, ShardOptions{Primary: way.listener.Addr().String()}), nil)
		reqs, err := abandon(t, s, way)
		if isFull {
			other := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), nil)
			all := reqs[0]
			all.Cost, all.ID = all.Events, "others"
			must(t, store.Answers(t.Context(), other.Charge, []store.Request{all})[0].Err)
		}
		ended := make(chan error, 1)
		store.LateOf(err).Then(func(err error) { ended <- err })
		way.open()
		select {
		case err = <-ended:
		case <-time.After(waitTimeout):
			t.Fatal("the end of the take was not told")
		}
		if errors.Is(err, store.ErrNotExecuted) != isFull || !isFull && err != nil {
			t.Errorf("of a full bucket %t: it ends with %v", isFull, err)
		}
	}
}

func TestRefundDoesNotOvertakeItsTake(t *testing.T) {
	for name, refund := range map[string]func(s *Store, reqs []store.Request, done chan<- error){
		"Waited": func(s *Store, reqs []store.Request, done chan<- error) {
			go func() { done <- store.Answers(context.Background(), s.Refund, reqs)[0].Err }()
		},
		"Detached": func(s *Store, reqs []store.Request, done chan<- error) {
			s.RefundReported(storetest.Posts(reqs), func(_ int, st store.State) { done <- st.Err })
		},
	} {
		t.Run(name, func(t *testing.T) {
			way := startGate(t, redistest.Start(t).Addr())
			s := newStore(t, newShard(t, ShardOptions{Primary: way.listener.Addr().String()}), nil)
			reqs, _ := abandon(t, s, way)
			done := make(chan error, 1)
			refund(s, reqs, done)
			select {
			case err := <-done:
				t.Error("the refund overtook its take")
				done <- err
			case <-time.After(50 * time.Millisecond):
				// It had time to: nothing shows that it waits.
			}
			way.open()
			must(t, <-done)
			used(t, "after the refund", store.Answers(t.Context(), s.Check, reqs)[0], 0)
		})
	}
}

// TestCloseRefundsAbandonedTakes: waiting refunds run before the connections close.
func TestCloseRefundsAbandonedTakes(t *testing.T) {
	server := redistest.Start(t)
	way := startGate(t, server.Addr())
	shard := NewShard(ShardOptions{Primary: way.listener.Addr().String(), DialTimeout: waitTimeout})
	s := newStore(t, shard, nil)
	reqs, _ := abandon(t, s, way)
	done := make(chan error, 1)
	s.RefundReported(storetest.Posts(reqs), func(_ int, st store.State) { done <- st.Err })
	go way.open()
	shard.Close(t.Context())
	must(t, <-done)
	if n := server.Client().DBSize(t.Context()).Val(); n != 1 {
		t.Errorf("%d buckets are left, want that of the probe", n)
	}
}

// counting holds the algorithms that count events.
var counting = func() (all []store.Algorithm) {
	for a := range store.Algorithms {
		if !algorithm.Of(a).Lease {
			all = append(all, a)
		}
	}
	return all
}()

// ofEach returns one request for each algorithm that counts, under an ID.
func ofEach(clientKey string, id int) (reqs []store.Request) {
	for _, name := range counting {
		limit := &store.Limit{Zone: "lost", Algorithm: name, Window: endless}
		reqs = append(reqs, store.Request{Limit: limit, ClientKey: clientKey, Events: 10, Cost: 1, ID: fmt.Sprintf("%011d", id)})
	}
	return reqs
}

// TestLostRepliesOfTakesAndRefunds: a lost reply repeats neither, and both are
// reported as uncertain.
func TestLostRepliesOfTakesAndRefunds(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, plain bool) {
		server := redistest.Start(t)
		proxy := redistest.StartProxy(t, server.Addr())
		outcomes := make(chan error, len(counting))
		shard := newShard(t, ShardOptions{Primary: proxy.Addr(), NoPipelining: plain, PoolSize: 1})
		patient := newStore(t, shard, nil)
		s := newStore(t, shard, func(o *Options) {
			o.OnUndelivered = func(_ string, _ *store.Limit, op algorithm.Operation, err error) {
				if op != algorithm.Refund || !errors.Is(err, store.ErrUncertain) {
					err = fmt.Errorf("%v ends with %w, want a refund whose outcome is unknown", op, err)
				} else {
					err = nil
				}
				outcomes <- err
			}
		})
		// reachable waits until the server answers checks and charges.
		reachable := func() {
			other := ofEach("other", 0)
			eventually(t, "the server is reached", func() error {
				return errors.Join(store.Answers(t.Context(), patient.Check, other)[0].Err, store.Answers(t.Context(), patient.Charge, other)[0].Err)
			})
		}
		direct := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), NoPipelining: plain, PoolSize: 1}), nil)
		allUsed := func(what string, n int64) {
			t.Helper()
			for i, st := range store.Answers(t.Context(), direct.Check, ofEach("k", 0)) {
				used(t, fmt.Sprint(what, ", ", counting[i]), st, n)
			}
		}
		// cutWhenUsed cuts the connections once the server has done what its client hears no replies to.
		cutWhenUsed := func(n int64) {
			t.Helper()
			eventually(t, "the server has done it", func() (err error) {
				for i, st := range store.Answers(t.Context(), direct.Check, ofEach("k", 0)) {
					if st.Err != nil || st.Used != n {
						err = errors.Join(err, fmt.Errorf("%v: %+v, want %d used", counting[i], st, n))
					}
				}
				return err
			})
			must(t, proxy.Cut())
		}
		reachable()
		var taken []store.Request
		for id := range 3 {
			taken = ofEach("k", id)
			for i, st := range store.Answers(t.Context(), patient.Take, taken) {
				must(t, st.Err)
				taken[i].Receipt = st.Receipt
			}
		}

		must(t, proxy.SwallowReplies())
		states := make(chan []store.State, 1)
		go func() { states <- store.Answers(context.Background(), s.Take, ofEach("k", 3)) }()
		cutWhenUsed(4)
		for i, st := range <-states {
			if !errors.Is(st.Err, store.ErrUncertain) {
				t.Fatalf("take, %s: error is %v, want an unknown outcome", counting[i], st.Err)
			}
		}
		must(t, proxy.Pass())
		reachable()
		allUsed("after the take", 4)

		must(t, proxy.SwallowReplies())
		s.RefundReported(storetest.Posts(taken), nil)
		cutWhenUsed(3)
		for range counting {
			must(t, <-outcomes)
		}
		must(t, proxy.Pass())
		reachable()
		allUsed("after the refund", 3)
	})
}
