package wire

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

const (
	// revisitPeriod is the time between two new connections that look which server an address leads to.
	revisitPeriod = 10 * time.Second
	// turnsPeriod is the time in which an address that leads to turnsMost other servers leads to several in turn.
	turnsPeriod = 30 * time.Second
	turnsMost   = 5
)

// ErrTurns is the fault of an address whose connections reach several servers.
var ErrTurns = &Fault{
	Problem: "its connections reach several servers in turn, so it is left out",
	Remedy:  "give an address that leads to the primary alone, and write the replicas as such",
}

// errVague is the fault of an address at which nothing shows another server.
var errVague = &Fault{
	Problem: "its run ID differs between replies on one connection, so nothing shows whether it is another server than before",
	Remedy:  "give the address of a Redis server in place of a proxy's, or accept it",
}

// Server says who a server is, as INFO has it.
type Server struct {
	// ID is its run ID, and Marks are all its IDs, as [MarksIn] returns them.
	ID    string
	Marks []string
	// Uptime is how long it has run.
	Uptime time.Duration
}

// ServerIn returns the server that INFO describes.
func ServerIn(field func(name string) string) Server {
	seconds, _ := strconv.Atoi(field("uptime_in_seconds"))
	return Server{ID: field("run_id"), Marks: MarksIn(field), Uptime: time.Duration(seconds) * time.Second}
}

// meeting is what a new connection shows.
type meeting int

const (
	// metSame: it reaches the server of the other connections.
	metSame meeting = iota
	// metRestarted: it reaches a server that has started since the one before was heard from.
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
	// changes are when new connections reached another server than the one before, last, which had not just started.
	changes []time.Time
	last    string
	// visited is when a new connection looked last.
	visited time.Time
	// isVague is set if its ID differs between two replies on one connection: then IDs say nothing.
	isVague bool
}

// hear notes what INFO says on a connection that was in use before.
func (p *peer) hear(s *Server, now time.Time) {
	if p.now.ID == "" {
		p.now, p.last = *s, s.ID
	}
	if p.now.ID == s.ID {
		p.now.Marks = newest(appendNew(p.now.Marks, s.Marks...))
		p.heard = now
	}
}

// meet notes what INFO says on a new connection.
func (p *peer) meet(s *Server, now time.Time) meeting {
	if p.now.ID == "" || p.isVague {
		p.hear(s, now)
		return metSame
	}
	p.changes = slices.DeleteFunc(p.changes, func(at time.Time) bool { return now.Sub(at) >= turnsPeriod })
	was, isRestart := p.last, now.Add(-s.Uptime).After(p.heard)
	if p.last = s.ID; p.last != was && !isRestart {
		p.changes = append(p.changes, now)
	}
	if s.ID == p.now.ID {
		p.hear(s, now)
		return metSame
	}
	shares, marks := meet(s.Marks, p.now.Marks), p.now.Marks
	p.now, p.heard = *s, now
	switch {
	case shares:
		p.now.Marks = newest(appendNew(marks, s.Marks...))
		return metSuccessor
	case isRestart:
		return metRestarted
	default:
		return metStranger
	}
}

// takesTurns reports whether new connections reach several servers.
func (p *peer) takesTurns(now time.Time) bool {
	n := 0
	for _, at := range p.changes {
		if now.Sub(at) < turnsPeriod {
			n++
		}
	}
	return n >= turnsMost
}

// newest returns the last of the marks.
func newest(marks []string) []string { return marks[max(len(marks)-mostMarks, 0):] }

// peerOf returns the peer at an address.
func (s *Shard) peerOf(addr string) *peer {
	p, _ := s.peers.LoadOrStore(addr, new(peer))
	return p.(*peer)
}

// Hear notes who a primary says that it is, on a connection that was in use before. A Redis Cluster knows its nodes.
func (s *Shard) Hear(addr string, server *Server) {
	if s.InCluster || server.ID == "" || s.topology.Load().ledBy(addr) == nil {
		return
	}
	p := s.peerOf(addr)
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
	if p.takesTurns(time.Now()) {
		return ErrTurns
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
	return !p.visited.IsZero() && !p.isVague
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
	takesTurns := p.takesTurns(time.Now())
	p.mu.Unlock()
	if takesTurns || met != metSuccessor && met != metStranger {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, l := range s.lanes {
		if key.addr == addr {
			l.renew()
		}
	}
	if met == metSuccessor {
		s.Emit(Event{Kind: PrimaryChanged, Addr: addr})
		return
	}
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
	isDue := p.now.ID != "" && !p.isVague && (now.Sub(p.visited) >= revisitPeriod || p.takesTurns(now))
	if isDue {
		p.visited = now
	}
	p.mu.Unlock()
	if !isDue {
		return
	}
	_ = l.Shard.Contain(l.Addr, func() error {
		client := NewClient(l.Addr, &l.Shard.Options, l.persistent)
		defer func() { _ = client.Close() }()
		first, err := client.Info(ctx).Result()
		if err != nil {
			return err
		}
		second, err := client.Info(ctx).Result()
		if err != nil {
			return err
		}
		if fieldOf(first, "run_id") == fieldOf(second, "run_id") {
			l.Shard.meet(l.Addr, second)
			return nil
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if !p.isVague {
			p.isVague = true
			l.Shard.Emit(Event{Kind: Misconfigured, Addr: l.Addr, Err: errVague})
		}
		return nil
	})
}

func (l *Lane) newClient() *goredis.Client {
	return newClient(l.Addr, &l.Shard.Options, l.persistent, l.Shard)
}
