package wire

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestPeer covers what a new connection can show.
func TestPeer(t *testing.T) {
	const hour = time.Hour
	of := func(id, lineage string, uptime time.Duration) Server {
		return Server{ID: id, Marks: []string{id, lineage}, Uptime: uptime}
	}
	replica := func(id, lineage string) Server {
		s := of(id, lineage, time.Hour)
		s.IsReplica = true
		return s
	}
	type step struct {
		after  time.Duration
		server Server
		want   meeting
	}
	for name, steps := range map[string][]step{
		"the same":                     {{0, of("a", "A", hour), metSame}, {time.Second, of("a", "A", hour), metSame}},
		"a restart":                    {{0, of("a", "A", hour), metSame}, {5 * time.Second, of("b", "B", time.Second), metRestarted}, {time.Second, of("b", "B", 2*time.Second), metSame}},
		"a virtual IP at its replica":  {{0, of("a", "A", hour), metSame}, {time.Second, replica("b", "A"), metSame}, {time.Second, of("b", "A", hour), metSuccessor}},
		"a name at another's replica":  {{0, of("a", "A", hour), metSame}, {time.Second, replica("b", "B"), metStranger}},
		"a name at another server":     {{0, of("a", "A", hour), metSame}, {time.Second, of("b", "B", hour), metStranger}, {0, of("b", "B", hour), metSame}},
		"one that has another lineage": {{0, of("a", "A", hour), metSame}, {0, of("a", "B", hour), metSame}, {time.Second, of("b", "B", hour), metSuccessor}},
	} {
		var p peer
		now := time.Unix(1_800_000_000, 0)
		for i, s := range steps {
			now = now.Add(s.after)
			if got := p.meet(&s.server, now); got != s.want {
				t.Errorf("%s, step %d: %v, want %v", name, i, got, s.want)
			}
		}
		if p.takesTurns() {
			t.Errorf("%s: it takes turns", name)
		}
	}
}

// TestPeersInTurn are found after some looks, and are none any more once looks agree. Other connections do not count, and
// of the changes within a second one does.
func TestPeersInTurn(t *testing.T) {
	var p peer
	now := time.Unix(1_800_000_000, 0)
	both := []Server{{ID: "a", Uptime: time.Hour}, {ID: "b", Uptime: time.Hour}}
	for n := range 4 * turnsMost {
		now = now.Add(time.Millisecond)
		p.meet(&both[n%2], now)
		p.look(&both[n%2], now)
	}
	if p.takesTurns() {
		t.Error("an overlap of two servers counts")
	}
	for n := range turnsMost {
		now = now.Add(settlePeriod)
		p.look(&both[n%2], now)
		p.meet(&both[n%2], now)
	}
	if !p.takesTurns() || !p.hasStrangers {
		t.Errorf("after %d changes it does not take turns: %+v", p.turns, &p)
	}
	for range turnsEnd {
		if !p.takesTurns() {
			t.Error("it takes turns no more, too early")
		}
		now = now.Add(settlePeriod)
		p.look(&both[0], now)
		p.meet(&both[0], now)
	}
	if p.takesTurns() || p.hasStrangers {
		t.Error("turns are not forgotten")
	}
}

// TestVagueAddress is one after two visits in a row with two IDs each, and none after a visit with one.
func TestVagueAddress(t *testing.T) {
	var p peer
	now := time.Unix(1_800_000_000, 0)
	p.meet(&Server{ID: "a"}, now)
	for i, step := range []struct {
		server          Server
		isSame, isVague bool
	}{
		{Server{ID: "b"}, false, false}, {Server{ID: "a", Uptime: time.Hour}, true, false},
		{Server{ID: "c"}, false, false}, {Server{ID: "d"}, false, true}, {Server{ID: "e", Uptime: time.Hour}, true, false},
	} {
		now = now.Add(time.Minute)
		p.visit(&step.server, step.isSame, now)
		met := p.meet(&step.server, now)
		if got := p.differing >= mostDiffering; got != step.isVague || met != metSame || p.turns > 0 {
			t.Errorf("step %d: it is vague: %t; it met %v; %d turns", i, got, met, p.turns)
		}
	}
}

// TestStrayConnection has all connections replaced once the address has settled: it reached another server just after
// these moved.
func TestStrayConnection(t *testing.T) {
	var p peer
	now := time.Unix(1_800_000_000, 0)
	a, b := Server{ID: "a", Uptime: time.Hour}, Server{ID: "b", Uptime: time.Hour}
	for i, step := range []struct {
		after time.Duration
		of    *Server
		want  meeting
	}{
		{0, &a, metSame}, {time.Minute, &b, metStranger}, {settlePeriod / 2, &a, metSame}, {0, &b, metSame},
		{settlePeriod, &b, metRestarted}, {settlePeriod, &b, metSame}, {0, &a, metStranger},
	} {
		now = now.Add(step.after)
		if got := p.meet(step.of, now); got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
}

// TestLookEndsWithItsContext, not once a silent server has had its time: a shard that closes waits for it.
func TestLookEndsWithItsContext(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr())
	s := newShard(t, Options{Primary: proxy.Addr()})
	t.Cleanup(s.Use(time.Hour))
	s.Await(t.Context())
	l := s.Owner(0).Checks
	hear(t, l)
	before := strings.Count(server.Client().ClientList(t.Context()).Val(), "\n")
	redistest.Must(t, proxy.SwallowReplies())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		l.Revisit(ctx)
		close(ended)
	}()
	redistest.Eventually(t, "it waits for a reply", func() error {
		if text := server.Client().ClientList(t.Context()).Val(); strings.Count(text, "\n") == before || strings.Contains(text, "cmd=NULL") {
			return errors.New(text)
		}
		return nil
	})
	cancel()
	select {
	case <-ended:
	case <-time.After(s.Options.ConnectTimeout() / 2):
		t.Error("it goes on")
	}
}
