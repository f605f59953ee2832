package scaling

import (
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
)

// book is one process's knowledge of the client's bucket: a reduced copy of the ledger's
// entry, for requests that cost 1 and a store that always answers. The names are the
// ledger's; an instant of 0 is none.
type book struct {
	known                    window
	trusted, confirmed       int64
	alone, asked             int64
	flight, refunds, waiting int64
	met                      bool  // set once the process remembers the bucket
	asking, next             int64 // the requests of the check in flight, and those that arrived since
	sent                     bool  // set while a charge is in flight
	isHeld, ticks            bool  // set while charges wait for a tick, and while there is one to come
	sentCost, sentAt         int64
	base, heard              window // known at sentAt, and the latest window in a reply since then
	held                     int64  // requests that wait for the reply to the charge
	reservation
}

// judgement is a book's decision about a request.
type judgement uint8

const (
	fits judgement = iota
	full
	unclear
)

// spent is what counts, what has to fit beside that, and the part of the latter that may
// count already.
func (b *book) spent(now int64) (used, ahead, open int64) {
	used, ahead = b.known.spent(now), b.flight
	switch {
	case b.sent && b.base.isOpen(now) && b.base.reset == b.known.reset:
		return max(b.base.used+b.sentCost, b.known.used) + b.waiting, ahead, 0
	case b.sent:
		ahead, open = ahead+b.sentCost, b.sentCost
	}
	if b.known.isOpen(now) {
		return used + b.waiting, ahead, open
	}
	return used, ahead + b.waiting, open
}

func (b *book) judge(now, limit int64) (j judgement, left int64) {
	used, ahead, open := b.spent(now)
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

// holds reports whether a charge may wait for the next tick.
func (b *book) holds(s *setting, now, cost int64) bool {
	if s.atOnce || b.refunds > 0 || b.known.reset-now <= 2*hold {
		return false
	}
	used, ahead, _ := b.spent(now)
	return 2*(s.limit-used-ahead-cost) >= s.limit
}

func (b *book) trusts(now int64) bool { return b.trusted != 0 && now-b.trusted <= trust }

// refuses reports whether the bucket is known to be full.
func (b *book) refuses(now, limit int64) bool {
	j, _ := b.judge(now, limit)
	return j == full && b.trusts(now)
}

// fitsUnasked reports whether a request needs no check because the process is the sole
// writer.
func (b *book) fitsUnasked(s *setting, now int64) bool {
	if b.alone == 0 || b.refunds > 0 || !b.known.isOpen(now) {
		return false
	}
	j, left := b.judge(now, s.limit)
	return j == fits && 2*(left-1) >= s.limit && b.reliesOn(s, now)
}

// reliesOn reports whether the primary's last answer is recent enough. Beyond the time of
// trust one request uses it up.
func (b *book) reliesOn(s *setting, now int64) bool {
	if b.trusts(now) && now-b.alone >= trust {
		return true
	}
	quiet := min(b.trusted-b.alone, s.window/trustPart)
	if s.checked || b.trusted == 0 || quiet < trust || now-b.trusted >= quiet || b.flight > 0 || b.sent || b.waiting > 0 {
		return false
	}
	b.trusted = 0
	return true
}

// wantsPrimary reports whether only the primary can decide.
func (b *book) wantsPrimary(now, limit int64) bool {
	j, _ := b.judge(now, limit)
	return j == full && !b.trusts(now)
}

// hear takes in a server's reply, and reports whether a replica is behind the book.
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

func (b *book) send(cost, now int64) {
	b.sent, b.sentCost, b.sentAt, b.base, b.heard = true, cost, now, b.known, window{}
}

// conclude takes in the primary's reply to a charge, which it counted at the instant said.
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

// reservation is a batch that a process has taken in advance, like the ledger's.
type reservation struct {
	tokens            int64
	ends              int64 // the end of the tokens' window
	size, began, used int64
	short             int64
	coming, claimed   int64 // the batch in flight, and the requests that wait for it
	isReaped          bool  // set while a search for idle tokens is scheduled
}

func (v *reservation) use(now int64) bool {
	if v.tokens == 0 || now >= v.ends {
		return false
	}
	v.tokens--
	v.used = now
	return true
}

// isServed reports whether the process has a token or a batch in flight.
func (v *reservation) isServed(now int64) bool {
	return v.coming > 0 || v.tokens > 0 && now < v.ends
}

func (v *reservation) learn(s *setting, now int64) {
	switch {
	case v.tokens > 0 && now >= v.ends:
		v.waste()
	case v.tokens == 0 && v.began != 0:
		v.size = ledger.GrownBatch(s.request(), v.size, s.sharers(), now-v.began)
		v.began = 0
	}
}

func (v *reservation) waste() (tokens int64) {
	tokens, v.tokens = v.tokens, 0
	v.size = max(v.size/2, 1)
	return tokens
}

func (v *reservation) add(size, ends, now int64) (leftover int64) {
	if v.tokens > 0 && v.ends != ends {
		leftover = v.waste()
	}
	v.tokens += size
	v.ends, v.size, v.began, v.used = ends, size, now, now
	return leftover
}

func (v *reservation) shortfall(s *setting, word window, now int64) {
	left := max(s.limit-word.used, 0)
	v.size = max(min(v.size, left)/2, 1)
	if s.batch != store.BatchAuto || left <= 1 {
		v.short = min(word.reset, now+s.window/shortPart)
	}
}

// surplus returns how many tokens go back: all if they are idle.
func (v *reservation) surplus(s *setting, now int64) int64 {
	switch {
	case v.tokens == 0 || v.coming > 0:
		return 0
	case now-v.used >= idleBatch:
		return v.waste()
	case s.batch == store.BatchAuto && v.tokens > s.ration(v.size):
		more := v.tokens - s.ration(v.size)
		v.tokens -= more
		return more
	default:
		return 0
	}
}
