package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/drawing"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

const (
	shownEvents = 4
	shownWindow = 10 * time.Second
	shownTime   = 36 * time.Second
)

// arrivals are in tenths of a second: bursts around the ends of windows, those
// that a request opens and those of the clock, and some between them.
var arrivals = []int64{
	15, 90, 95, 101, 106, 111, 118, 123, 128, 133, 150, 165, 185,
	275, 280, 285, 290, 295, 302, 307, 312, 317, 322, 337, 352,
}

// durations are how long the requests take, in tenths of a second, in turn.
var durations = []int64{12, 45, 18, 30, 8, 52}

// lane is what one algorithm does with the arrivals.
type lane struct {
	name    string
	allowed []bool
	taken   []int64
	borders []int64
	// ends and slots are those of the requests that were allowed, where they
	// matter.
	ends, slots []int64
}

// tenth is in microseconds.
const tenth = 100_000

func lanes() []lane {
	var list []lane
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
			// It has opened a window.
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

// release gives back the slots of the requests that have ended.
func (l *lane) release(c *counter, now int64) {
	for i, end := range l.ends {
		if end <= now && l.allowed[i] {
			c.do(algorithm.Refund, id(i), epoch+now*tenth)
		}
	}
}

// hold gives the last request the first slot that is free.
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

// draw returns the picture, an SVG.
func draw() string {
	all := lanes()
	height := top + pitch*(len(all)+1) + legend
	p := drawing.New(int(width), height, "What each algorithm allows of the same requests",
		fmt.Sprintf("The same requests, at %d events and a window of %v", shownEvents, shownWindow))
	p.Text(width-right+16, top-8, "allowed; most in "+shownWindow.String())
	drawArrivals(p, top+pitch/2)
	for i, l := range all {
		l.draw(p, top+pitch*(i+1)+pitch/2)
	}
	drawLegend(p, height-legend/2)
	return p.String()
}

func x(at int64) int64 { return left + at*scale }

func drawArrivals(p *drawing.Picture, y int) {
	p.Text(16, y+4, "arrivals")
	p.Axis(left, y, plot)
	for _, at := range arrivals {
		p.Tick(x(at), y-8, 16)
	}
	for at := int64(0); at*10 <= shown; at += 5 {
		p.Number(x(at*10), y-16, strconv.FormatInt(at, 10)+"s")
	}
}

func (l lane) draw(p *drawing.Picture, y int) {
	p.Text(16, y+4, l.name)
	p.Axis(left, y, plot)
	for _, at := range l.borders {
		if at <= shown {
			p.Border(x(at), y-borderReach, 2*borderReach)
		}
	}
	for i, at := range arrivals {
		if l.ends != nil && l.allowed[i] {
			p.Span(x(at), y+4+4*int(l.slots[i]), (min(l.ends[i], shown)-at)*scale, drawing.Blue)
		}
		drawMark(p, x(at), y-4*min(len(l.ends), 1), l.allowed[i])
	}
	text := fmt.Sprintf("%d of %d; %d", len(l.taken), len(arrivals), most(l.taken, int64(shownWindow/(time.Second/10))))
	p.Text(width-right+16, y+4, text)
}

// drawMark draws a disc for what is allowed and a cross for what is refused.
func drawMark(p *drawing.Picture, at int64, y int, allowed bool) {
	if allowed {
		p.Disc(at, y, reach, drawing.Blue)
		return
	}
	p.Cross(at, y, reach-1, drawing.Orange)
}

func drawLegend(p *drawing.Picture, y int) {
	at := int64(left)
	drawMark(p, at, y-4, true)
	p.Text(at+12, y, "allowed")
	drawMark(p, at+90, y-4, false)
	p.Text(at+102, y, "refused")
	p.Border(at+180, y-12, 16)
	p.Text(at+190, y, "a window begins or ends")
	p.Span(at+360, y-4, 24, drawing.Blue)
	p.Text(at+392, y, "it runs, and holds a slot")
}
