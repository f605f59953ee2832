package algorithms

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/lab/picture"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// resultText is the summary of the document.
func resultText(found scores) string {
	differ := func(a store.Algorithm) string {
		all := found.of(a)
		s := all[len(all)-1]
		return percent(s.differ, s.requests) + " %"
	}
	return fmt.Sprintf("**Result.** `sliding_log` and `concurrency` decide exactly. With the log's history, %s of the decisions of `fixed_window`, %s of `sliding_window` and %s of `gcra` differ from the log's. No algorithm admits more in one window than its bound.\n",
		differ(store.FixedWindow), differ(store.SlidingWindow), differ(store.GCRA))
}

func accuracyTable(found scores) string {
	var b strings.Builder
	over := func(s score) string { return percent(s.over, s.requests) }
	log, running := found.of(store.SlidingLog), found.of(store.Concurrency)
	all := log[len(log)-1].requests
	fmt.Fprintf(&b, "%d requests of %d clients in a day, a third of the clients with each traffic, seed %d; %d events in %v.",
		all, all/requestsPerClient, seed, events, window)
	fmt.Fprintf(&b, " By the log %s %% are over the limit.", cells(log, over))
	fmt.Fprintf(&b, " concurrency: %d at a time that take %v each on average, leases of %v renewed every %v, against a count of what runs, by which %s %% are over the limit.",
		slots, duration, lease, renewal, cells(running, over))
	var names []string
	for _, t := range traffics {
		names = append(names, t.name)
	}
	fmt.Fprintf(&b, " Always in this order: %s, **all together**.\n\n", strings.Join(names, ", "))
	t := report.NewTable("algorithm", "% wrongly refused", "% wrongly admitted", "% that differ on the log's history", "most admitted in one window ÷ events")
	for i, w := range ways {
		share := func(of func(score) int) string {
			return cells(found[i], func(s score) string { return percent(of(s), s.requests) })
		}
		t.Row(w.name,
			share(func(s score) int { return s.refused }), share(func(s score) int { return s.admitted }), share(func(s score) int { return s.differ }),
			cells(found[i], func(s score) string { return fmt.Sprintf("%.2f", s.worst(w)) }))
	}
	return b.String() + t.String()
}

func cells(list []score, text func(score) string) string {
	texts := make([]string, len(list))
	for i, s := range list {
		texts[i] = text(s)
	}
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + ", **" + texts[last] + "**"
}

func percent(n, of int) string { return fmt.Sprintf("%.2f", 100*float64(n)/float64(of)) }

func costTable(costs map[string]*cost) string {
	head := fmt.Sprintf("%s. Bytes: MEMORY USAGE of a bucket that has had so many events. Microseconds: CPU time of redis-server, the median of %d rounds of %d calls by %d callers with pipelining, on %d buckets of 5 to %d events; in parentheses the ratio to fixed_window.\n\n",
		report.Machine(), measuredRounds, measuredCalls, measuredCallers, measuredClients, measuredTimes*len(measured))
	columns := []string{"algorithm"}
	for _, size := range sizes {
		columns = append(columns, fmt.Sprintf("bytes, events: %d", size))
	}
	for _, op := range measured {
		columns = append(columns, fmt.Sprintf("µs per %s", op))
	}
	t := report.NewTable(columns...)
	base := costs[ways[0].name]
	for _, w := range apart() {
		c := costs[w.name]
		cells := []string{w.name}
		for _, n := range c.bytes {
			cells = append(cells, strconv.FormatInt(n, 10))
		}
		for i := range measured {
			m := report.SpreadOf(c.micros[i]).Median
			cells = append(cells, fmt.Sprintf("%.1f (%.1f)", m, m/report.SpreadOf(base.micros[i]).Median))
		}
		t.Row(cells...)
	}
	return head + t.String()
}

const (
	shownEvents = 4
	shownWindow = 10 * time.Second
	shownTime   = 36 * time.Second
)

// arrivals are in tenths of a second: bursts around the ends of windows that a request
// opens and of windows of the clock, and some between them.
var arrivals = []int64{
	15, 90, 95, 101, 106, 111, 118, 123, 128, 133, 150, 165, 185,
	275, 280, 285, 290, 295, 302, 307, 312, 317, 322, 337, 352,
}

// durations are the durations of requests, in tenths of a second, in turn.
var durations = []int64{12, 45, 18, 30, 8, 52}

// lane is the decisions of one algorithm about the arrivals.
type lane struct {
	name        string
	allowed     []bool
	taken       []int64
	borders     []int64 // of windows
	ends, slots []int64 // of requests, for concurrency
}

// tenth is in microseconds.
const tenth = 100_000

func lanes() (list []lane) {
	for _, w := range ways {
		if w.burst == 0 {
			list = append(list, runLane(w))
		}
	}
	return list
}

func runLane(w way) lane {
	l := lane{name: w.name}
	c := newCounter(w.limit(shownWindow), shownEvents, 0)
	for i, at := range arrivals {
		if w.algorithm == store.Concurrency {
			l.release(c, at)
		}
		s := c.do(algorithm.Take, id(i), epoch+at*tenth)
		l.allowed = append(l.allowed, s.Allowed)
		if s.Allowed {
			l.taken = append(l.taken, at)
		}
		if w.algorithm == store.Concurrency {
			l.hold(at+durations[i%len(durations)], at)
		}
		if n := len(l.borders); w.algorithm == store.FixedWindow && !w.align && (n == 0 || l.borders[n-1] <= at) {
			// The request has opened a window.
			l.borders = append(l.borders, at, (s.Reset-epoch)/tenth)
		}
	}
	if w.align || w.algorithm == store.SlidingWindow {
		for at := shownWindow; at < shownTime; at += shownWindow {
			l.borders = append(l.borders, int64(at/(time.Second/10)))
		}
	}
	return l
}

func (l *lane) release(c *counter, now int64) {
	for i, end := range l.ends {
		if end <= now && l.allowed[i] {
			c.do(algorithm.Refund, id(i), epoch+now*tenth)
		}
	}
}

func (l *lane) hold(end, now int64) {
	slot := int64(0)
	for i := 0; i < len(l.slots); i++ {
		if l.allowed[i] && l.ends[i] > now && l.slots[i] == slot {
			slot++
			i = -1
		}
	}
	l.ends, l.slots = append(l.ends, end), append(l.slots, slot)
}

// The sizes of the picture.
const (
	left, right = 160, 172
	pitch       = 44 // of the rows
	top         = 56
	scale       = 2 // per tenth of a second
	shown       = int64(shownTime / (time.Second / 10))
	plot        = shown * scale
	width       = left + plot + right
	legend      = 40
	reach       = 4 // of a mark
	borderReach = 16
)

func draw() *picture.Picture {
	all := lanes()
	height := top + pitch*(len(all)+1) + legend
	p := picture.New(int(width), height, "What each algorithm allows of the same requests",
		fmt.Sprintf("The same requests, at %d events and a window of %v", shownEvents, shownWindow))
	p.Text(width-right+16, top-8, "allowed; most in "+shownWindow.String())
	drawArrivals(p, top+pitch/2)
	for i, l := range all {
		l.draw(p, top+pitch*(i+1)+pitch/2)
	}
	drawLegend(p, height-legend/2)
	return p
}

func x(at int64) int64 { return left + at*scale }

func drawArrivals(p *picture.Picture, y int) {
	p.Text(16, y+4, "arrivals")
	p.Axis(left, y, plot)
	for _, at := range arrivals {
		p.Tick(x(at), y-8, 16)
	}
	for at := int64(0); at*10 <= shown; at += 5 {
		p.Number(x(at*10), y-16, strconv.FormatInt(at, 10)+"s")
	}
}

func (l lane) draw(p *picture.Picture, y int) {
	p.Text(16, y+4, l.name)
	p.Axis(left, y, plot)
	for _, at := range l.borders {
		if at <= shown {
			p.Border(x(at), y-borderReach, 2*borderReach)
		}
	}
	for i, at := range arrivals {
		if l.ends != nil && l.allowed[i] {
			p.Span(x(at), y+4+4*int(l.slots[i]), (min(l.ends[i], shown)-at)*scale, picture.Blue)
		}
		drawMark(p, x(at), y-4*min(len(l.ends), 1), l.allowed[i])
	}
	text := fmt.Sprintf("%d of %d; %d", len(l.taken), len(arrivals), most(l.taken, int64(shownWindow/(time.Second/10))))
	p.Text(width-right+16, y+4, text)
}

func drawMark(p *picture.Picture, at int64, y int, allowed bool) {
	if allowed {
		p.Disc(at, y, reach, picture.Blue)
	} else {
		p.Cross(at, y, reach-1, picture.Orange)
	}
}

func drawLegend(p *picture.Picture, y int) {
	at := int64(left)
	drawMark(p, at, y-4, true)
	p.Text(at+12, y, "allowed")
	drawMark(p, at+90, y-4, false)
	p.Text(at+102, y, "refused")
	p.Border(at+180, y-12, 16)
	p.Text(at+190, y, "a window begins or ends")
	p.Span(at+360, y-4, 24, picture.Blue)
	p.Text(at+392, y, "it runs, and holds a slot")
}
