package main

// occurrence is what happens at an instant.
type occurrence uint8

// The order is that of what happens at the same instant.
const (
	// replicated: a replica has what the primary has.
	replicated occurrence = iota
	// atServer: a check has arrived at a server, answered: its answer here.
	atServer
	answered
	// charged: a charge has arrived at the primary, confirmed: its answer here.
	charged
	confirmed
	// taken and told are the same for a take, refunded and returned for a refund.
	taken
	told
	refunded
	returned
	// settled: a request has ended.
	settled
	// reaped: idle batches are looked for.
	reaped
	occurrences
)

// delays are how long after its cause each happens, which is always the same: so
// what is to happen is in a line for each of them.
var delays = [occurrences]int64{
	replicated: lag, atServer: travel, answered: travel, charged: linger + travel, confirmed: travel,
	taken: travel, told: travel, refunded: linger + travel, returned: travel, settled: serving, reaped: reapPause,
}

// event is something that is to happen.
type event struct {
	at      int64
	process int
	// word is what a server says, at the instant said, to what was asked at.
	word            window
	said, asked     int64
	cost            int64
	replica, allows bool
}

// line is events in the order in which they happen.
type line struct {
	events []event
	head   int
}

func (l *line) push(e event) {
	if l.head > 64 && 2*l.head > len(l.events) {
		l.events = l.events[:copy(l.events, l.events[l.head:])]
		l.head = 0
	}
	l.events = append(l.events, e)
}

func (l *line) isEmpty() bool { return l.head == len(l.events) }

// schedule is what is to happen.
type schedule struct{ lines [occurrences]line }

func (s *schedule) push(what occurrence, now int64, e event) {
	e.at = now + delays[what]
	s.lines[what].push(e)
}

// next returns what happens next, and whether anything does before an instant.
func (s *schedule) next(before int64) (what occurrence, ok bool) {
	for o := range s.lines {
		if l := &s.lines[o]; !l.isEmpty() && l.events[l.head].at < before {
			what, before, ok = occurrence(o), l.events[l.head].at, true
		}
	}
	return what, ok
}

func (s *schedule) pop(what occurrence) event {
	l := &s.lines[what]
	l.head++
	return l.events[l.head-1]
}
