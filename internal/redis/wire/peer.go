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

// meeting is the relation of a new connection's server to the server of the others.
type meeting int

const (
	// metSame: it reaches the server of the other connections.
	metSame meeting = iota
	// metRestarted: it reaches a server that has started since the former one last answered, or another connection
	// has reached another server.
	metRestarted
	// metSuccessor: it reaches another server, with the data of the former one.
	metSuccessor
	// metStranger: it reaches another server, without that data.
	metStranger
)

// peer is the server behind an address.
type peer struct {
	mu sync.Mutex
	// now is the server, with all marks that it has had. Its ID is empty until INFO was read.
	now Server
	// heard is when the server last answered.
	heard time.Time
	// moved is when another server took its place, and hasStray is set if a connection reached another one just then.
	moved    time.Time
	hasStray bool
	// last is the server that the last look reached, at looked. agreed is the number of looks in a row that reached it.
	// turns is the number of changes between two looks, apart from restarts.
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

// mostDiffering is the number of such visits that makes a fault.
const mostDiffering = 2

// hear notes the server of a connection that was in use before.
func (p *peer) hear(s *Server, now time.Time) {
	if p.now.ID == "" {
		p.now = *s
	}
	if p.now.ID == s.ID {
		p.now.Marks = newest(appendNew(p.now.Marks, s.Marks...))
		p.heard = now
	}
}

// meet notes the server of a new connection.
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

// look notes the server that a regular look reached, before the other connections follow it. Connections do not count,
// because many are made at once; but servers that they reached between two looks do, because the looks may always reach
// the same one.
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

// Hear notes the server of a primary's connection that was in use before. In a Redis Cluster the nodes know each other.
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

// CountApart reports whether the servers behind an address share no data, so that counts would be split. Of servers with a
// common history only one takes writes.
func (s *Shard) CountApart(addr string) bool {
	p := s.peerOf(addr)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hasStrangers
}

// IdentityFault returns the fault of a primary, with that run ID in INFO, whose replacement would go unnoticed, or nil.
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

// meet compares the server of a new connection, by its reply to INFO, with the server of the others. All connections
// follow it together: a name or a virtual IP may have moved, and a new process would count there.
func (s *Shard) meet(addr, text string) {
	server := ServerIn(fieldsOf(text))
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

// Revisit connects to the lane's address from time to time, to find out which server it leads to now: open connections
// show only the server that it led to.
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
		server := ServerIn(fieldsOf(second))
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
		// The IDs of the visits before mean nothing.
		p.now, p.last, p.turns = *s, "", 0
	}
	p.differing = 0
	p.look(s, now)
	return p.takesTurns()
}

// forgetReplaced notes that no server was replaced: one address leads to both servers.
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
