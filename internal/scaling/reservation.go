package main

import "github.com/shardlimit/caddy-shardlimit/store"

// reservation is what a process has taken in advance, as the ledger's is.
type reservation struct {
	tokens int64
	// ends is when the window of the tokens does.
	ends              int64
	size, began, used int64
	short             int64
	// coming is how much is being fetched, for so many claims.
	coming, claimed int64
	// isReaped is set while idle tokens are looked for.
	isReaped bool
}

// use spends a token.
func (v *reservation) use(now int64) bool {
	if v.tokens == 0 || now >= v.ends {
		return false
	}
	v.tokens--
	v.used = now
	return true
}

// isServed tells whether the process has a token, or is likely to get one.
func (v *reservation) isServed(now int64) bool {
	return v.coming > 0 || v.tokens > 0 && now < v.ends
}

// learn prepares for the next batch.
func (v *reservation) learn(s *setting, now int64) {
	switch {
	case v.tokens > 0 && now >= v.ends:
		v.waste()
	case v.tokens == 0 && v.began != 0:
		share := float64(s.window) * float64(v.size) * float64(s.sharers()) / float64(s.limit)
		if v.size > 0 && float64(now-v.began) <= share {
			v.size += (v.size + 1) / 2
		}
		v.began = 0
	}
}

// waste drops the tokens, and returns how many there were.
func (v *reservation) waste() (tokens int64) {
	tokens, v.tokens = v.tokens, 0
	v.size = max(v.size/2, 1)
	return tokens
}

// add takes in a batch, and returns leftovers of another window.
func (v *reservation) add(size, ends, now int64) (leftover int64) {
	if v.tokens > 0 && v.ends != ends {
		leftover = v.waste()
	}
	v.tokens += size
	v.ends, v.size, v.began, v.used = ends, size, now, now
	return leftover
}

// shortfall learns from a batch that was refused.
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
