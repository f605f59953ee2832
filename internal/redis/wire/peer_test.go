package wire

import (
	"testing"
	"time"
)

// TestPeer covers what a new connection can show.
func TestPeer(t *testing.T) {
	const hour = time.Hour
	of := func(id, lineage string, uptime time.Duration) Server {
		return Server{ID: id, Marks: []string{id, lineage}, Uptime: uptime}
	}
	type step struct {
		after  time.Duration
		server Server
		want   meeting
	}
	for name, steps := range map[string][]step{
		"the same":                     {{0, of("a", "A", hour), metSame}, {time.Second, of("a", "A", hour), metSame}},
		"a restart":                    {{0, of("a", "A", hour), metSame}, {5 * time.Second, of("b", "B", time.Second), metRestarted}, {time.Second, of("b", "B", 2*time.Second), metSame}},
		"a virtual IP at its replica":  {{0, of("a", "A", hour), metSame}, {time.Second, of("b", "A", hour), metSuccessor}},
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
		if p.takesTurns(now) {
			t.Errorf("%s: it takes turns", name)
		}
	}
}

// TestPeersInTurn are found after some connections, and are none any more once new connections reach one server.
func TestPeersInTurn(t *testing.T) {
	var p peer
	now := time.Unix(1_800_000_000, 0)
	a, b := Server{ID: "a", Uptime: time.Hour}, Server{ID: "b", Uptime: time.Hour}
	for n := range 2 * turnsMost {
		if p.takesTurns(now) != (n > turnsMost) {
			t.Errorf("after %d connections: %v", n, p.takesTurns(now))
		}
		now = now.Add(time.Second)
		if n%2 == 0 {
			p.meet(&a, now)
		} else {
			p.meet(&b, now)
		}
	}
	if now = now.Add(turnsPeriod); p.takesTurns(now) {
		t.Error("turns are not forgotten")
	}
	p.isVague = true
	for range turnsMost {
		p.meet(&a, now)
		if p.meet(&b, now) != metSame || p.takesTurns(now) {
			t.Error("IDs that say nothing count")
		}
	}
}
