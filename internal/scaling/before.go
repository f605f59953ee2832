package main

// claim decides about a request of charge before that comes to a process, or
// makes it take, or wait for what is being taken.
func (c *client) claim(p int) {
	b := &c.books[p]
	if (c.batch == 0 || !b.isServed(c.now)) && c.refusesTake(b) {
		return
	}
	if c.batch == 0 {
		c.take(p, 0)
		return
	}
	b.met = true
	switch {
	case b.use(c.now):
		c.pass(1)
	case b.coming > 0 && b.claimed < b.coming:
		b.claimed++
	case b.coming > 0:
		c.take(p, 0)
	default:
		b.learn(c.setting, c.now)
		size := c.ration(b.size)
		if size < 1 || c.now < b.short {
			c.take(p, 0)
			return
		}
		b.coming, b.claimed = size, 1
		c.take(p, size)
	}
}

// refusesTake tells whether a request is refused by what is known. Once trust has
// run out one is let through.
func (c *client) refusesTake(b *book) bool {
	if j, _ := b.judge(c.now, c.limit); !b.met || j != full {
		return false
	}
	if !b.trusts(c.now) && (b.asked == 0 || c.now-b.asked > trust) {
		b.asked = c.now
		return false
	}
	return true
}

// take takes a batch, or for one request if the size is 0.
func (c *client) take(p int, size int64) {
	c.call(take)
	c.push(taken, c.now, event{process: p, cost: size, asked: c.now})
}

// serve is what the primary does about a take.
func (c *client) serve(e *event) {
	cost := max(e.cost, 1)
	answer := *e
	answer.allows, answer.said = c.primary.spent(c.now)+cost <= c.limit, c.now
	if answer.allows {
		c.write(cost)
		c.fetched += cost
	}
	answer.word = c.primary
	c.push(told, c.now, answer)
}

// tell is what a process does about what a take was told.
func (c *client) tell(b *book, e *event) {
	if !e.allows || b.met {
		b.met = true
		b.hear(e.word, false, e.asked)
		b.confirmed = c.now
	}
	if e.cost == 0 {
		c.wait(1)
		if e.allows {
			c.pass(1)
		}
		return
	}
	claims := b.claimed
	b.coming, b.claimed = 0, 0
	if e.allows {
		ends := b.ends
		c.giveBack(b, e.process, b.add(e.cost, e.word.reset, c.now), ends)
	} else {
		b.shortfall(c.setting, e.word, e.said)
	}
	for range claims {
		if e.allows && b.use(c.now) {
			c.wait(1)
			c.pass(1)
		} else {
			c.take(e.process, 0)
		}
	}
	if b.tokens > 0 && !b.isReaped {
		b.isReaped = true
		c.push(reaped, c.now, event{process: e.process})
	}
}

// giveBack refunds tokens of the window that ends at an instant.
func (c *client) giveBack(b *book, p int, tokens, ends int64) {
	if tokens == 0 {
		return
	}
	b.refunds++
	c.given += tokens
	c.call(refund)
	c.push(refunded, c.now, event{process: p, cost: tokens, word: window{reset: ends}})
}

// reap gives back what is idle.
func (c *client) reap(b *book, p int) {
	if tokens := b.surplus(c.setting, c.now); c.now < b.ends {
		c.giveBack(b, p, tokens, b.ends)
	}
	b.isReaped = b.tokens > 0
	if b.isReaped {
		c.push(reaped, c.now, event{process: p})
	}
}
