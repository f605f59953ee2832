package wire

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestDialTimeoutFollowsTheCheckTimeout(t *testing.T) {
	for check, want := range map[time.Duration]time.Duration{
		0:                      200 * time.Millisecond,
		10 * time.Millisecond:  200 * time.Millisecond,
		50 * time.Millisecond:  200 * time.Millisecond,
		100 * time.Millisecond: 400 * time.Millisecond,
		time.Second:            4 * time.Second,
		2 * time.Second:        5 * time.Second,
		5 * time.Second:        5 * time.Second,
		20 * time.Second:       20 * time.Second,
		time.Minute:            time.Minute,
		1 << 62:                time.Minute,
	} {
		if got := DialTimeout(check); got != want {
			t.Errorf("with a check_timeout of %v, connecting may take %v, want %v", check, got, want)
		}
	}
}

// TestRepliesMayTakeACheckTimeout, within bounds, where no request waits for them.
func TestRepliesMayTakeACheckTimeout(t *testing.T) {
	for check, want := range map[time.Duration]struct{ node, search, other time.Duration }{
		0:                      {125 * time.Millisecond, 500 * time.Millisecond, time.Second},
		50 * time.Millisecond:  {125 * time.Millisecond, 500 * time.Millisecond, time.Second},
		500 * time.Millisecond: {500 * time.Millisecond, 2 * time.Second, time.Second},
		2 * time.Second:        {2 * time.Second, 8 * time.Second, 2 * time.Second},
		time.Hour:              {5 * time.Second, 20 * time.Second, 5 * time.Second},
	} {
		s := newShard(t, Options{Primary: "localhost:1"})
		done := s.Use(check)
		if o := &s.Options; o.NodeTimeout() != want.node || o.SearchTimeout() != want.search || o.ReplyWithin(time.Second) != want.other {
			t.Errorf("with a check_timeout of %v: %v for a node, %v for a search, %v for another reply", check, o.NodeTimeout(), o.SearchTimeout(), o.ReplyWithin(time.Second))
		}
		done()
	}
}

// TestMostPatientStoreDecidesAboutDialling checks that connections may be dialled for as long as the
// most patient of the stores allows that use the shard at the time, and no longer.
func TestMostPatientStoreDecidesAboutDialling(t *testing.T) {
	errDialled := errors.New("dialled")
	var end time.Time
	s := newShard(t, Options{
		Primary: "localhost:1", DialTimeout: DefaultDialTimeout,
		Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			end, _ = ctx.Deadline()
			return nil, errDialled
		},
	})
	dial := func(what string, want time.Duration) {
		t.Helper()
		before := time.Now()
		_, err := s.Options.connect(t.Context(), "tcp", "localhost:1")
		if after := time.Now(); !errors.Is(err, errDialled) || end.Before(before.Add(want)) || end.After(after.Add(want)) {
			t.Errorf("%s: dialling may take %v to %v, want %v; error %v", what, end.Sub(after), end.Sub(before), want, err)
		}
	}
	dial("without a store", DefaultDialTimeout)
	first := s.Use(10 * time.Second)
	dial("with one store", 10*time.Second)
	second, same := s.Use(30*time.Second), s.Use(30*time.Second)
	dial("with a more patient one", 30*time.Second)
	second()
	dial("when one of two equal ones has ended", 30*time.Second)
	same()
	dial("when both have ended", 10*time.Second)
	first()
	dial("without a store again", DefaultDialTimeout)
}

// TestUnreachableNodeLeavesTimeForOthers checks that a search for the servers of a cluster does not
// wait for a connection to a node whose packets are dropped.
func TestUnreachableNodeLeavesTimeForOthers(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(redistest.WaitTimeout))
	const silent = "localhost:1"
	s := newShard(t, Options{
		Cluster: append([]string{silent}, c.Addrs()...),
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == silent {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	})
	began := time.Now()
	s.Await(t.Context())
	// It may take several searches on a busy machine, but not as long as dialling may.
	if took := time.Since(began); !s.IsFound() || took > redistest.WaitTimeout/2 {
		t.Errorf("the servers are found %v, after %v", s.IsFound(), took)
	}
}
