package ask

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Outcome returns what the outcome of cmd, a command of op, means to r, and what repair a
// plain charge needs.
func (op Op) Outcome(cmd *wire.Command, r *store.Request) (st store.State, repair Repair) {
	if cmd.Outcome != nil {
		return store.State{Err: cmd.Outcome}, Repair{Needed: !cmd.IsScript() && wire.Says(cmd.Outcome, wire.Uncountable), left: r.Cost}
	}
	// Callers are in goroutines of their own, and have to report something.
	if err := contain.Run(func() error {
		st, repair = op.decoded(cmd, r)
		return nil
	}); err != nil {
		st, repair = store.State{Err: err}, Repair{}
	}
	st.Replica = op.Role == store.RoleReplica
	if op.Operation != algorithm.Take {
		// Nobody gives back what was charged.
		st.Receipt = store.Receipt{}
	}
	if st.Err != nil && !op.reads() {
		// It ran, with an unknown effect.
		st.Err = fmt.Errorf("%w: %w", store.ErrUncertain, st.Err)
	}
	return st, repair
}

// decoded reads the reply to a command.
func (op Op) decoded(cmd *wire.Command, r *store.Request) (st store.State, repair Repair) {
	l := &layouts[r.Limit.Algorithm]
	switch {
	case cmd.IsScript():
		// A script that did without the clock was given an instant that has passed.
		return op.replied(l, r, cmd.Numbers(), cmd.Passed()), Repair{}
	case op.reads():
		texts, err := cmd.Texts()
		if err != nil {
			// The window may be open, and is not shown.
			return store.State{Err: store.NotExecuted(err)}, Repair{}
		}
		return l.read(r, texts, op.Now), Repair{}
	default:
		return l.charged(r, cmd)
	}
}

// Repair is what the script has to do about a plain charge that did not count in an open
// window.
type Repair struct {
	// Needed is set if the script has to charge what is left.
	Needed bool
	left   int64
	// isHidden is set if the server refuses to show the window.
	isHidden bool
}

// Rest returns what is left of r.
func (p Repair) Rest(r *store.Request) store.Request {
	again := *r
	again.Cost, again.Until = p.left, 0
	return again
}

// charged is what the replies to a plain charge mean to r, and the repair that it needs, as
// far as they show: nothing is left of an orphan, which the charge made if there was no
// bucket, or if the server has counted it and does not show the window; all if the window
// was over, as on a promoted server with an old copy, or is not believed.
func (l *layout) charged(r *store.Request, cmd *wire.Command) (store.State, Repair) {
	window, err := cmd.Texts()
	if err != nil {
		isHidden := wire.Says(err, wire.Lacking)
		return store.State{Err: err}, Repair{Needed: isHidden, isHidden: isHidden}
	}
	end := parseNumber(window[0])
	numbers := [...]int64{cmd.Number(), end, parseNumber(window[1])}
	if slices.ContainsFunc(numbers[:], isUnsound) || cmd.Number() < r.Cost {
		return store.State{}, Repair{Needed: true, left: r.Cost}
	}
	now := cmd.Passed()
	st := l.state(r, now, true, numbers[:])
	switch {
	case st.Err != nil:
		return st, Repair{}
	case window[0] == "":
		return st, Repair{Needed: true}
	default:
		return st, Repair{Needed: end <= now || !algorithm.Believes(end, now, r.Limit.Window), left: r.Cost}
	}
}

// replied is what a script's reply means to r. fallback is the instant of a script
// that did not need to know it.
func (op Op) replied(l *layout, r *store.Request, reply []int64, fallback int64) store.State {
	if len(reply) < 2 {
		return store.State{Err: fmt.Errorf("%w: a reply of %d numbers", wire.ErrReply, len(reply))}
	}
	now := reply[0]
	switch {
	case op.ReadOnly && op.Now != 0:
		// The reply can only repeat it.
		now = op.Now
	case now == 0:
		now = fallback
	}
	held := int64(0)
	if op.Hears(r) {
		last := len(reply) - 1
		if last < 2 {
			return store.State{Err: fmt.Errorf("%w: a reply of %d numbers", wire.ErrReply, len(reply))}
		}
		held, reply = reply[last], reply[:last]
	}
	numbers, born := reply[2:], int64(0)
	if last := len(numbers) - 1; l.isBorn && last >= 0 {
		numbers, born = numbers[:last], numbers[last]
	}
	st := l.state(r, now, reply[1] == 1, numbers)
	switch {
	case isUnsound(born), held < -algorithm.MostHeld, held > algorithm.MostHeld:
		return store.State{Err: fmt.Errorf("%w: %d at %d", wire.ErrReply, slices.Clone(reply), now)}
	case op.Operation == algorithm.Take && l.isBorn && st.Receipt.Period != 0:
		st.Receipt.Position = born
	}
	if st.Err == nil {
		algorithm.ShowHeld(&st, r, max(held, -held))
		st.IsHeld = held < 0
	}
	switch op.Operation {
	case algorithm.Check, algorithm.Charge, algorithm.Take:
		// A late charge opens none, if its own is over.
		isLate := op.Operation == algorithm.Charge && r.Ends != 0
		if st.Err == nil && !op.ReadOnly && !isLate && isUnopened(r, &st) {
			st = store.State{Err: fmt.Errorf("%w: no window is open in %d", wire.ErrReply, reply)}
		}
	}
	return st
}

// isUnopened reports whether st shows no open window where one is needed.
func isUnopened(r *store.Request, st *store.State) bool {
	return st.Reset == 0 && algorithm.Of(r.Limit.Algorithm).Windowed()
}

// read is what a bucket that was read without a script means to r at now. Nothing of it is
// believed if one of its numbers cannot be: it is an empty one, as the scripts have it.
func (l *layout) read(r *store.Request, texts []string, now int64) store.State {
	numbers, err := l.numbers(texts)
	if err != nil {
		return store.State{Err: err}
	}
	if slices.ContainsFunc(numbers, isUnsound) {
		clear(numbers)
	}
	return l.state(r, now, false, numbers[:min(l.count, len(numbers))])
}

// numbers are those of a bucket that was read, with unsound for those that cannot be.
func (l *layout) numbers(texts []string) (numbers []int64, err error) {
	if l.isHash {
		numbers = make([]int64, len(texts))
		for i, text := range texts {
			numbers[i] = parseNumber(text)
		}
		return numbers, nil
	}
	count := l.count
	if l.isBorn {
		count++
	}
	return unpackNumbers(texts, count)
}

// unsound stands for what is no integer.
const unsound = -1

// parseNumber reads a field of a hash, as the scripts do. A missing or empty field is 0.
func parseNumber(text string) int64 {
	if text == "" || text == "0" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || text[0] < '1' || text[0] > '9' {
		return unsound
	}
	return n
}

// unpackNumbers reads a string of count packed doubles. A missing key is all
// zeros.
func unpackNumbers(texts []string, count int) ([]int64, error) {
	if len(texts) == 1 && texts[0] == "" {
		return make([]int64, count), nil
	}
	if len(texts) != 1 || len(texts[0]) != 8*count {
		return nil, fmt.Errorf("%w: %q, want %d packed numbers", wire.ErrReply, texts, count)
	}
	numbers := make([]int64, 0, count)
	for i := range count {
		n, err := wire.Unpack(nil, texts[0][8*i:8*i+8])
		if err != nil {
			n = []int64{unsound}
		}
		numbers = append(numbers, n...)
	}
	return numbers, nil
}

// state is what the numbers of a bucket mean to r; an error unless they can be
// those of a bucket at now.
func (l *layout) state(r *store.Request, now int64, spent bool, numbers []int64) store.State {
	if len(numbers) != l.count {
		return store.State{Err: fmt.Errorf("%w: %d numbers, want %d", wire.ErrReply, len(numbers), l.count)}
	}
	if isUnsound(now) || slices.ContainsFunc(numbers, isUnsound) {
		return store.State{Err: fmt.Errorf("%w: %d at %d", wire.ErrReply, slices.Clone(numbers), now)}
	}
	var content store.Content
	copy(content[:], numbers)
	return algorithm.View(&content, r, now, spent)
}

func isUnsound(n int64) bool { return n < 0 || n > store.MaxInteger }
