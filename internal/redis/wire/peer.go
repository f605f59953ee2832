package wire

import (
	"context"
	"strconv"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// revisitPeriod is the time between two new connections that look which server an address leads to.
	revisitPeriod = 10 * time.Second
	// settlePeriod is the least time between two moves of the connections to an address, and between two changes that
	// count: the endpoints of a failover may overlap for a moment.
	settlePeriod = time.Second
	// turnsMost is after how many changes an address leads to several servers in turn, and turnsEnd how many looks in a
	// row have to agree until it does not.
	turnsMost = 5
	turnsEnd  = 10
)

// ErrTurns is the fault of an address whose connections reach several servers.
var ErrTurns = &Fault{
	Problem: "its connections reach several servers in turn",
	Remedy:  "give an address that leads to the primary alone, and write the replicas as such",
}

// ErrVague is the fault of an address at which nothing shows another server.
var ErrVague = &Fault{
	Problem: "its run ID, or the IDs of its cluster's nodes, are missing or differ between two replies, so nothing shows whether it is another server than before",
	Remedy:  "give the address of a Redis server in place of a proxy's, or accept it",
}

// Server says who a server is, as INFO has it.
type Server struct {
	// ID is its run ID, and Marks are all its IDs, as [MarksIn] returns them.
	ID    string
	Marks []string
	// Uptime is how long it has run.
	Uptime time.Duration
	// IsReplica is set if it follows a primary.
	IsReplica bool
}

// ServerIn returns the server that INFO describes.
func ServerIn(field func(name string) string) Server {
	seconds, _ := strconv.Atoi(field("uptime_in_seconds"))
	return Server{ID: field("run_id"), Marks: MarksIn(field), Uptime: time.Duration(seconds) * time.Second, IsReplica: field("role") == "slave"}
}

// meeting is what a new connection shows.
type meeting int

const (
	// metSame: it reaches the server of the other connections.
	metSame meeting = iota
	// metRestarted: it reaches a server that has started since the one before was heard from, or a connection has
	// reached another one than the others.
	metRestarted
	// metSuccessor: it reaches another server, which has the data of the one before.
	metSuccessor
	// metStranger: it reaches another server, which has nothing in common with the one before.
	metStranger
)

// peer is the server to which the connections to an address lead.
type peer struct {
	mu sync.Mutex
	// now is that server; it has all marks that it was known by. Its ID is empty until INFO was read there.
	now Server
	// heard is when the server was heard from last.
	heard time.Time
	// moved is when another server took its place, and hasStray is set if a connection reached another one just then.
	moved    time.Time
	hasStray bool
	// last is the server that the last look reached, at looked; agreed counts the looks in a row that reached it, and
	// turns the looks before that reached another server than the look before them, which had not just started.
	last          string
	looked        time.Time
	turned        time.Time
	turns, agreed int
	// hasStrangers is set if one of the servers had nothing in common with the others, until looks agree.
	hasStrangers bool
	// visited is when a new connection looked last.
	visited time.Time
	// differing is how many visits in a row had two replies with different IDs on one connection.
	differing int
}

// mostDiffering is how many of these are from which that is a fault.
const mostDiffering = 2

// hear notes what INFO says on a connection that was in use before.
func (p *peer) hear(s *Server, now time.Time) {
	if p.now.ID == "" {
		p.now = *s
	}
	if p.now.ID == s.ID {
		p.now.Marks = newest(appendNew(p.now.Marks, s.Marks...))
		p.heard = now
	}
}

// meet notes what INFO says on a new connection.
func (p *peer) meet(s *Server, now time.Time) meeting {
	if p.now.ID == "" || p.differing > 0 {
		p.hear(s, now)
		return metSame
	}
	hasSettled := now.Sub(p.moved) >= settlePeriod
	switch {
	case s.IsReplica && s.ID != p.now.ID && meet(s.Marks, p.now.Marks):
		// It takes no writes before it has become a primary.
		return metSame
	case s.ID != p.now.ID && !hasSettled:
		p.hasStray = true
		p.hasStrangers = p.hasStrangers || !meet(s.Marks, p.now.Marks)
		return metSame
	case s.ID == p.now.ID && p.hasStray && hasSettled:
		p.hear(s, now)
		p.moved, p.hasStray = now, false
		return metRestarted
	case s.ID == p.now.ID:
		p.hear(s, now)
		return metSame
	}
	shares, marks, isRestart := meet(s.Marks, p.now.Marks), p.now.Marks, s.startedAfter(p.heard, now)
	p.now, p.heard, p.moved, p.hasStray = *s, now, now, false
	switch {
	case shares:
		p.now.Marks = newest(appendNew(marks, s.Marks...))
		return metSuccessor
	case isRestart:
		return metRestarted
	default:
		p.hasStrangers = true
		return metStranger
	}
}

// startedAfter reports whether the server has started after an instant.
func (s *Server) startedAfter(at, now time.Time) bool { return now.Add(-s.Uptime).After(at) }

// look notes the server that a regular look reached, before it meets the other connections. Looks alone count, because many
// connections are made at once, but also what these reached meanwhile: looks may always come in the same turn.
func (p *peer) look(s *Server, now time.Time) {
	if isSame := s.ID == p.now.ID && !p.hasStray; p.last == "" || p.last == s.ID && isSame {
		if p.agreed++; p.agreed >= turnsEnd {
			p.turns, p.hasStrangers = 0, false
		}
	} else {
		p.agreed = 0
		if !s.startedAfter(p.looked, now) && now.Sub(p.turned) >= settlePeriod {
			p.turns++
			p.turned = now
		}
	}
	p.last, p.looked = s.ID, now
}

// takesTurns reports whether the address leads to several servers.
func (p *peer) takesTurns() bool { return p.turns >= turnsMost }

// newest returns the last of the marks.
func newest(marks []string) []string { return marks[max(len(marks)-mostMarks, 0):] }

// peerOf returns the peer at an address, or one of which nothing is known.
func (s *Shard) peerOf(addr string) *peer {
	if p, ok := s.peers.Load(addr); ok {
		return p.(*peer)
	}
	return new(peer)
}

// Hear notes who a primary says that it is, on a connection that was in use before. A Redis Cluster knows its nodes.
func (s *Shard) Hear(addr string, server *Server) {
	if s.InCluster || server.ID == "" || s.topology.Load().ledBy(addr) == nil {
		return
	}
	known, _ := s.peers.LoadOrStore(addr, new(peer))
	p := known.(*peer)
	p.mu.Lock()
	p.hear(server, time.Now())
	marks := p.now.Marks
	p.mu.Unlock()
	if sentinel, ok := s.finder.(*Sentinel); ok {
		sentinel.meet(addr, marks)
	}
}

// TurnFault returns the fault of an address whose connections reach several servers in turn, or nil.
func (s *Shard) TurnFault(addr string) error {
	p := s.peerOf(addr)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.takesTurns() {
		return ErrTurns
	}
	return nil
}

// CountApart reports whether one of the servers to which an address leads in turn has nothing in common with the others,
// so that counts would be split. Of those that share a history one takes writes.
func (s *Shard) CountApart(addr string) bool {
	p := s.peerOf(addr)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hasStrangers
}

// IdentityFault returns the fault of a primary that says it has that run ID, if nothing shows who it is, or nil.
func (s *Shard) IdentityFault(addr, id string) error {
	isVague := id == ""
	if c, ok := s.finder.(*Cluster); ok {
		isVague = c.IsVague()
	} else {
		p := s.peerOf(addr)
		p.mu.Lock()
		isVague = isVague || p.differing >= mostDiffering
		p.mu.Unlock()
	}
	if isVague {
		return ErrVague
	}
	return nil
}

// asksWho reports whether new connections to an address ask for INFO: at primaries alone, because a name may lead to all
// replicas, and only where it was of use, because some proxies close a connection on what they do not know.
func (s *Shard) asksWho(addr string) bool {
	if s.topology.Load().ledBy(addr) == nil {
		return false
	}
	p := s.peerOf(addr)
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.visited.IsZero() && p.differing == 0
}

// meet compares the server of a new connection, which says text in INFO, with that of the others. They follow it
// together: a name, or a virtual IP, may lead elsewhere by now, and a new process would count there.
func (s *Shard) meet(addr, text string) {
	server := ServerIn(func(name string) string { return fieldOf(text, name) })
	if server.ID == "" {
		return
	}
	p := s.peerOf(addr)
	p.mu.Lock()
	met := p.meet(&server, time.Now())
	takesTurns := p.takesTurns()
	p.mu.Unlock()
	if met == metSame {
		return
	}
	s.renew(addr)
	switch {
	case met == metRestarted, takesTurns:
		return
	case met == metSuccessor:
		s.Emit(Event{Kind: PrimaryChanged, Addr: addr})
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.Standing()
	now.Replaced = time.Now()
	now.Since = now.Replaced
	s.standing.Store(&now)
	s.Emit(Event{Kind: Replaced, Addr: addr})
}

// Revisit looks by a new connection, from time to time, which server the address of the lane leads to: those in use
// show only to which it led.
func (l *Lane) Revisit(ctx context.Context) {
	p, now := l.Shard.peerOf(l.Addr), time.Now()
	p.mu.Lock()
	isUnsure := p.turns > 0 || p.hasStray || p.differing == 1
	isDue := p.now.ID != "" && (now.Sub(p.visited) >= revisitPeriod || now.Sub(p.moved) < revisitPeriod || isUnsure)
	if isDue {
		p.visited = now
	}
	p.mu.Unlock()
	if !isDue {
		return
	}
	_ = l.Shard.Contain(l.Addr, func() error {
		client := NewClient(l.Addr, &l.Shard.Options, l.persistent)
		defer closeWith(ctx, client)()
		first, err := client.Info(ctx).Result()
		if err != nil {
			return err
		}
		second, err := client.Info(ctx).Result()
		if err != nil {
			return err
		}
		server := ServerIn(func(name string) string { return fieldOf(second, name) })
		isSame := fieldOf(first, "run_id") == server.ID
		p.mu.Lock()
		takesTurns := p.visit(&server, isSame, time.Now())
		p.mu.Unlock()
		if takesTurns {
			l.Shard.forgetReplaced()
		}
		if isSame {
			l.Shard.meet(l.Addr, second)
		}
		return nil
	})
}

// visit notes what two replies on one connection say, and reports whether the address leads to several servers.
func (p *peer) visit(s *Server, isSame bool, now time.Time) (takesTurns bool) {
	if !isSame {
		p.differing++
		return false
	}
	if p.differing >= mostDiffering {
		// What the IDs have said so far was nothing.
		p.now, p.last, p.turns = *s, "", 0
	}
	p.differing = 0
	p.look(s, now)
	return p.takesTurns()
}

// forgetReplaced notes that no servers took the place of others: one address leads to both.
func (s *Shard) forgetReplaced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.Standing()
	now.Replaced = time.Time{}
	s.standing.Store(&now)
}

func (l *Lane) newClient() *goredis.Client {
	return newClient(l.Addr, &l.Shard.Options, l.persistent, l.Shard)
}
