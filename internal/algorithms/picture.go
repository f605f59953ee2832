package main

import (
	"fmt"
	"strings"
	"time"

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
	left, right  = 160, 172
	pitch        = 44 // of the rows
	top          = 56
	scale        = 2 // per tenth of a second
	shown        = int64(shownTime / (time.Second / 10))
	plot         = shown * scale
	width        = left + plot + right
	legend       = 40
	blue, orange = "#0072b2", "#d55e00"
	ink, gray    = "#24292f", "#8c959f"
	reach        = 4 // of a mark
	borderReach  = 16
)

// draw returns the picture, an SVG.
func draw() string {
	all := lanes()
	height := top + pitch*(len(all)+1) + legend
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="13" fill="%s" role="img" aria-label="What each algorithm allows of the same requests">`+"\n",
		width, height, width, height, ink)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" rx="6" fill="#ffffff" stroke="#d0d7de"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="16" y="26" font-size="15" font-weight="bold">The same requests, at %d events and a window of %v</text>`+"\n", shownEvents, shownWindow)
	label(&b, width-right+16, top-8, "allowed; most in "+shownWindow.String())
	drawArrivals(&b, top+pitch/2)
	for i, l := range all {
		l.draw(&b, top+pitch*(i+1)+pitch/2)
	}
	drawLegend(&b, height-legend/2)
	b.WriteString("</svg>\n")
	return b.String()
}

func x(at int64) int64 { return left + at*scale }

func label(b *strings.Builder, at int64, y int, text string) {
	fmt.Fprintf(b, `<text x="%d" y="%d">%s</text>`+"\n", at, y, text)
}

func drawAxis(b *strings.Builder, y int) {
	fmt.Fprintf(b, `<path d="M%d %dh%d" stroke="#d0d7de"/>`+"\n", left, y, plot)
}

func drawArrivals(b *strings.Builder, y int) {
	label(b, 16, y+4, "arrivals")
	drawAxis(b, y)
	for _, at := range arrivals {
		fmt.Fprintf(b, `<path d="M%d %dv%d" stroke="%s" stroke-width="2"/>`+"\n", x(at), y-8, 16, ink)
	}
	for at := int64(0); at*10 <= shown; at += 5 {
		fmt.Fprintf(b, `<text x="%d" y="%d" font-size="10" text-anchor="middle" fill="#57606a">%ds</text>`+"\n", x(at*10), y-16, at)
	}
}

func (l lane) draw(b *strings.Builder, y int) {
	label(b, 16, y+4, l.name)
	drawAxis(b, y)
	for _, at := range l.borders {
		if at <= shown {
			fmt.Fprintf(b, `<path d="M%d %dv%d" stroke="%s" stroke-dasharray="3 3"/>`+"\n", x(at), y-borderReach, 2*borderReach, gray)
		}
	}
	for i, at := range arrivals {
		if l.ends != nil && l.allowed[i] {
			fmt.Fprintf(b, `<path d="M%d %dh%d" stroke="%s" stroke-width="2" opacity="0.5"/>`+"\n", x(at), y+4+4*int(l.slots[i]), (min(l.ends[i], shown)-at)*scale, blue)
		}
		drawMark(b, x(at), y-4*min(len(l.ends), 1), l.allowed[i])
	}
	text := fmt.Sprintf("%d of %d; %d", len(l.taken), len(arrivals), most(l.taken, int64(shownWindow/(time.Second/10))))
	label(b, width-right+16, y+4, text)
}

// drawMark draws a disc for what is allowed and a cross for what is refused.
func drawMark(b *strings.Builder, at int64, y int, allowed bool) {
	if allowed {
		fmt.Fprintf(b, `<circle cx="%d" cy="%d" r="%d" fill="%s"/>`+"\n", at, y, reach, blue)
		return
	}
	fmt.Fprintf(b, `<path d="M%d %dl%d %dm0 -%dl-%d %d" stroke="%s" stroke-width="2"/>`+"\n",
		at-reach+1, y-reach+1, 2*reach-2, 2*reach-2, 2*reach-2, 2*reach-2, 2*reach-2, orange)
}

func drawLegend(b *strings.Builder, y int) {
	at := int64(left)
	drawMark(b, at, y-4, true)
	label(b, at+12, y, "allowed")
	drawMark(b, at+90, y-4, false)
	label(b, at+102, y, "refused")
	fmt.Fprintf(b, `<path d="M%d %dv16" stroke="%s" stroke-dasharray="3 3"/>`+"\n", at+180, y-12, gray)
	label(b, at+190, y, "a window begins or ends")
	fmt.Fprintf(b, `<path d="M%d %dh24" stroke="%s" stroke-width="2" opacity="0.5"/>`+"\n", at+360, y-4, blue)
	label(b, at+392, y, "it runs, and holds a slot")
}
