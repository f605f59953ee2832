package main

// book is what one process knows of the client's bucket: a copy in short of the
// ledger's entry, for requests that cost 1 and a store that always answers. The
// names are the ledger's; an instant of 0 is none.
type book struct {
	known                    window
	trusted, confirmed       int64
	alone, asked             int64
	flight, refunds, waiting int64
	// met is set once the process remembers the bucket.
	met bool
	// asking is how many requests the question is for that is on its way, and
	// next how many came since.
	asking, next int64
	// sent is set while a charge of sentCost is on its way, sentAt from then on,
	// when base was known; heard is what was said since.
	sent     bool
	sentCost int64
	sentAt   int64
	base     window
	heard    window
	// held wait for that charge, which decides about them.
	held int64
	reservation
}

// judgement is what a book says to a request.
type judgement uint8

const (
	fits judgement = iota
	full
	unclear
)

// judge also tells how much is left.
func (b *book) judge(now, limit int64) (j judgement, left int64) {
	used, ahead, open := b.known.spent(now), b.flight, int64(0)
	switch {
	case !b.sent:
	case b.base.isOpen(now) && b.base.reset == b.known.reset:
		used = max(b.base.used+b.sentCost, b.known.used) + b.waiting
	case b.known.isOpen(now):
		used, ahead, open = used+b.waiting, ahead+b.sentCost, b.sentCost
	default:
		ahead, open = ahead+b.sentCost+b.waiting, b.sentCost
	}
	left = limit - used - (ahead - open)
	switch {
	case used+ahead < limit:
		return fits, left
	case left > 0:
		return unclear, left
	default:
		return full, left
	}
}

func (b *book) trusts(now int64) bool { return b.trusted != 0 && now-b.trusted <= trust }

// refuses tells whether a check is not needed because it is known to be full.
func (b *book) refuses(now, limit int64) bool {
	j, _ := b.judge(now, limit)
	return j == full && b.trusts(now)
}

// fitsUnasked tells whether a check is not needed because the process is alone.
func (b *book) fitsUnasked(now, limit int64) bool {
	if b.alone == 0 || now-b.alone < trust || !b.trusts(now) || b.refunds > 0 || !b.known.isOpen(now) {
		return false
	}
	j, left := b.judge(now, limit)
	return j == fits && 2*(left-1) >= limit
}

// wantsPrimary tells whether only the primary can answer.
func (b *book) wantsPrimary(now, limit int64) bool {
	j, _ := b.judge(now, limit)
	return j == full && !b.trusts(now)
}

// hear takes in what a server said, and tells whether a replica says less than
// is known.
func (b *book) hear(word window, replica bool, asked int64) (less bool) {
	before := b.known
	if overlaps := b.sent || b.refunds > 0 || asked < b.confirmed; !replica && !overlaps {
		b.confirm(word, asked)
	} else {
		less = b.known.raise(word) && replica
		if b.sent {
			b.heard.raise(word)
		}
	}
	if b.known != before && !b.sent {
		b.alone = 0
	}
	return less
}

func (b *book) confirm(word window, asked int64) {
	b.known, b.base, b.trusted = word, word, asked
}

// send notes that a charge is on its way.
func (b *book) send(cost, now int64) {
	b.sent, b.sentCost, b.sentAt, b.base, b.heard = true, cost, now, b.known, window{}
}

// conclude takes in the primary's answer to a charge, which it counted at the
// instant said.
func (b *book) conclude(s *setting, word window, said, now int64) {
	expected := b.base
	if !expected.isOpen(said) {
		expected = s.open(said)
	}
	expected.used += b.sentCost
	switch {
	case word != expected:
		b.alone = 0
	case b.alone == 0:
		b.alone = now
	}
	b.sent, b.sentCost, b.confirmed = false, 0, now
	b.confirm(word, b.sentAt)
	if b.heard.reset != 0 {
		if b.known.raise(b.heard); b.known != word {
			b.alone = 0
		}
	}
}
