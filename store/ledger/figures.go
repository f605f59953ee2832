package ledger

// Figures tell how the books are, and what was done with them. Those that count
// what happened begin with the books.
type Figures struct {
	// Buckets are those that are remembered.
	Buckets int64
	// InFlight is the cost of the requests that were admitted and are not
	// settled.
	InFlight int64
	// Unsent is how many requests' charges wait to be sent.
	Unsent int64
	// Uncertain is of how many buckets something may have been spent or not,
	// which the primary has not been asked yet.
	Uncertain int64
	// LocalRefusals are requests that were refused without a call,
	// UnaskedAdmissions those that were admitted without a check.
	LocalRefusals, UnaskedAdmissions int64
	// Fetches are the batches that the store was asked for. TokensFetched are the
	// events that it gave, TokensReturned those that went back to it, and
	// TokensExpired those that were lost with their window.
	Fetches, TokensFetched, TokensReturned, TokensExpired int64
}

// counts are those of one page. Its lock guards them.
type counts struct {
	inFlight, unsent, unsure            int64
	refusals, admissions                int64
	fetches, fetched, returned, expired int64
}

// Figures adds up those of all pages.
func (b *Books) Figures() Figures {
	f := Figures{Buckets: b.count.Load()}
	now := b.now()
	for i := range b.pages {
		p := &b.pages[i]
		p.mu.Lock()
		p.settleUnsure(now)
		c := &p.counts
		f.InFlight += c.inFlight
		f.Unsent += c.unsent
		f.Uncertain += c.unsure
		f.LocalRefusals += c.refusals
		f.UnaskedAdmissions += c.admissions
		f.Fetches += c.fetches
		f.TokensFetched += c.fetched
		f.TokensReturned += c.returned
		f.TokensExpired += c.expired
		p.mu.Unlock()
	}
	return f
}

// Figures are those of the books.
func (l *Ledger) Figures() Figures { return l.books.Figures() }

// settleUnsure ends the doubt about what no longer counts. p is locked.
func (p *page) settleUnsure(now int64) {
	if p.counts.unsure == 0 {
		return
	}
	for _, e := range p.ring {
		if e.unsure && e.until <= now {
			e.noteUnsure(false)
		}
	}
}

// noteUnsure notes whether something may have been spent or not.
func (e *entry) noteUnsure(unsure bool) {
	switch {
	case e.unsure == unsure:
	case unsure:
		e.page.counts.unsure++
	default:
		e.page.counts.unsure--
	}
	e.unsure = unsure
}

// hold adds to what is in flight.
func (e *entry) hold(cost int64) {
	e.flight += cost
	e.page.counts.inFlight += cost
}

// setWaiting makes a charge wait, or none.
func (e *entry) setWaiting(w *debt) {
	d := e.debts
	if d.waiting != nil {
		e.page.counts.unsent -= d.waiting.requests
	}
	if d.waiting = w; w != nil {
		e.page.counts.unsent += w.requests
	}
}

// addWaiting adds to the charge that waits.
func (e *entry) addWaiting(cost, requests, expires int64) {
	e.debts.waiting.add(cost, requests, expires)
	e.page.counts.unsent += requests
}
