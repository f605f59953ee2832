package main

// admit decides about a request of charge after that comes to a process, or
// makes it wait for an answer.
func (c *client) admit(p int) {
	b := &c.books[p]
	switch {
	case b.refuses(c.now, c.limit):
	case b.fitsUnasked(c.now, c.limit):
		c.hold(b, p)
	case b.asking > 0:
		b.next++
	default:
		c.ask(b, p, 1)
	}
}

// hold lets a request pass, and settles it when it has ended.
func (c *client) hold(b *book, p int) {
	b.flight++
	c.pass(1)
	c.push(settled, c.now, event{process: p})
}

// ask asks a replica for some requests, or the primary where only that can
// answer.
func (c *client) ask(b *book, p int, requests int64) {
	b.asking = requests
	c.askServer(p, !b.wantsPrimary(c.now, c.limit), c.now)
}

func (c *client) askServer(p int, replica bool, asked int64) {
	if replica {
		c.call(check)
	} else {
		c.call(open)
	}
	c.push(atServer, c.now, event{process: p, replica: replica, asked: asked})
}

// reply is what a server does about a check.
func (c *client) reply(e *event) {
	answer := *e
	answer.said = c.now
	if answer.word = c.replica; !e.replica {
		if !c.primary.isOpen(c.now) {
			c.write(0)
		}
		answer.word = c.primary
	}
	c.push(answered, c.now, answer)
}

// answer is what a process does about an answer.
func (c *client) answer(b *book, e *event) {
	if e.replica && !e.word.isOpen(e.said) {
		// The store asks the primary to open a window.
		c.askServer(e.process, false, e.asked)
		return
	}
	if b.hear(e.word, e.replica, e.asked) && !b.trusts(c.now) {
		c.askServer(e.process, false, c.now)
		return
	}
	asking, next := b.asking, b.next
	b.asking, b.next = 0, 0
	c.wait(asking)
	for range asking {
		switch j, _ := b.judge(c.now, c.limit); j {
		case fits:
			c.hold(b, e.process)
		case unclear:
			b.held++
		case full:
		}
	}
	if next == 0 {
		return
	}
	if b.refuses(c.now, c.limit) {
		c.wait(next)
		return
	}
	c.ask(b, e.process, next)
}

// deliver sends what waits to be charged, unless a charge is on its way.
func (c *client) deliver(b *book, p int) {
	if b.sent || b.waiting == 0 {
		return
	}
	b.send(b.waiting, c.now)
	b.waiting = 0
	c.call(charge)
	c.push(charged, c.now, event{process: p, cost: b.sentCost})
}
