package redis

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// layout is the form in which Redis holds the buckets of an algorithm: a string of packed
// numbers, unless it says otherwise.
type layout struct {
	// code names the algorithm in keys.
	code   string
	script *script
	// isHash is set if it is a hash, with the numbers in its fields c, r and p. A charge of
	// an open window adds to c, and so can be plain.
	isHash bool
	// isSet is set if it is a sorted set, which only the script reads.
	isSet bool
	// arguments adds the arguments after the instant to a call of the script.
	arguments func(c *scriptCommand, op algorithm.Operation, r *store.Request)
	// count is how many numbers there are of a bucket.
	count int
	// endsEarly is set if an operation, such as a refund, can bring the bucket's end
	// forward: it may then end at its new owner while the previous copy exists.
	endsEarly bool
}

var layouts = [...]layout{
	store.FixedWindow:   {code: "fw", script: bundled("fixed_window"), arguments: addWindow, count: 3, isHash: true},
	store.SlidingWindow: {code: "sw", script: bundled("sliding_window"), arguments: addSlidingWindow, count: 4},
	store.SlidingLog:    {code: "sl", script: single("members", "sliding_log"), arguments: addMembers, count: 4, isSet: true, endsEarly: true},
	store.GCRA:          {code: "gcra", script: bundled("gcra"), arguments: addRate, count: 7, endsEarly: true},
	store.Concurrency:   {code: "cc", script: single("members", "concurrency"), arguments: addMembers, count: 1, isSet: true},
}

// Without the last row this does not compile, and without another one tests fail.
const _ = uint(len(layouts) - int(store.Algorithms))

func layoutOf(a store.Algorithm) *layout { return &layouts[a] }

func addWindow(c *scriptCommand, op algorithm.Operation, r *store.Request) {
	window, align := r.Limit.Window.Microseconds(), oneIf(r.Limit.Align)
	if r.Limit.Calendar.Unit != "" {
		window, align = c.calendarWindow(r.Limit.Calendar)
	}
	c.add(window)
	addCounting(c, op, r)
	c.add(align, r.Limit.Window.Microseconds(), algorithm.LongestPenalty(r).Microseconds())
	c.mayGuess = c.clock != nil && (op == algorithm.Charge || op == algorithm.Take)
}

// calendarMargin is by how much the clock that decides may be behind the caller's
// or ahead of it without a window being taken for another. Two of it are shorter than any
// day.
const calendarMargin = 10 * time.Hour

// calendarWindow returns the end of the window that is open or ended a short while ago,
// and the length of the one that follows it. The script chooses, because the clock that
// decides may be on the other side of the end.
func (c *scriptCommand) calendarWindow(calendar store.Calendar) (next, end int64) {
	now := c.ints[placeOfNow]
	if now <= 0 {
		now = c.primaryNow()
	}
	end = calendar.End(now - calendarMargin.Microseconds())
	return calendar.End(end) - end, end
}

func addSlidingWindow(c *scriptCommand, op algorithm.Operation, r *store.Request) {
	window := r.Limit.Window.Microseconds()
	c.add(window)
	addCounting(c, op, r)
	c.add(algorithm.WeightUnit(window), algorithm.LongestPenalty(r).Microseconds())
}

func addCounting(c *scriptCommand, op algorithm.Operation, r *store.Request) {
	switch op {
	case algorithm.Take:
		c.add(r.Cost, r.Capacity())
	case algorithm.Refund:
		c.add(r.Cost, r.Receipt.Period)
	case algorithm.Penalize:
		c.add(r.Until, 0)
	default:
		c.add(r.Cost, 0)
	}
}

func oneIf(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

func addRate(c *scriptCommand, op algorithm.Operation, r *store.Request) {
	c.add(r.Limit.Window.Microseconds(), r.Events)
	if op == algorithm.Penalize {
		c.add(r.Until, 0, 0, 0, 0, 0, algorithm.LongestPenalty(r).Microseconds())
		return
	}
	micros, rest := algorithm.DrainTime(r, r.Cost)
	c.add(r.Cost, micros, rest)
	switch op {
	case algorithm.Take:
		micros, rest = algorithm.Tolerance(r, r.Cost)
		c.add(micros, rest, r.Capacity())
	case algorithm.Refund:
		c.add(r.Receipt.Period, r.Receipt.Position, r.Capacity())
	default:
		c.add(0, 0, 0)
	}
	c.add(algorithm.LongestPenalty(r).Microseconds())
}

func addMembers(c *scriptCommand, op algorithm.Operation, r *store.Request) {
	cost := r.Cost
	if op == algorithm.Check || op == algorithm.Peek {
		cost = r.Need()
	}
	c.add(r.Limit.Window.Microseconds(), cost, r.Capacity())
	c.addID(r.ID)
}

// read returns a command that reads the bucket without a script.
func (l *layout) read(key string) *command {
	if l.isHash {
		return newRead(wordHMGet, key, wordCount, wordReset, wordPenalty)
	}
	return newRead(wordMGet, key)
}

// numbers decodes the reply to read.
func (l *layout) numbers(texts []string) ([]int64, error) {
	if l.isHash {
		return parseNumbers(make([]int64, 0, len(texts)), texts)
	}
	return unpackNumbers(texts, l.count)
}

var errReply = errors.New("this is not a bucket of ours")

// state is what the numbers of a bucket mean to r; an error unless they can be
// those of a bucket at now.
func (l *layout) state(r *store.Request, now int64, spent bool, numbers []int64) store.State {
	if len(numbers) != l.count {
		return store.State{Err: fmt.Errorf("%w: %d numbers, want %d", errReply, len(numbers), l.count)}
	}
	sane := isSane(now)
	for _, n := range numbers {
		sane = sane && isSane(n)
	}
	if !sane {
		return store.State{Err: fmt.Errorf("%w: %d at %d", errReply, numbers, now)}
	}
	var content store.Content
	copy(content[:], numbers)
	return algorithm.View(&content, r, now, spent)
}

func isSane(n int64) bool { return n >= 0 && n <= store.MaxInteger }

// parseNumbers appends the fields of a hash. A missing field is 0.
func parseNumbers(numbers []int64, texts []string) ([]int64, error) {
	for _, text := range texts {
		n := int64(0)
		if text != "" {
			var err error
			if n, err = strconv.ParseInt(text, 10, 64); err != nil {
				return nil, fmt.Errorf("%w: %q", errReply, text)
			}
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

// unpackNumbers reads a string of count packed doubles. A missing key is all
// zeros.
func unpackNumbers(texts []string, count int) ([]int64, error) {
	if len(texts) == 1 && texts[0] == "" {
		return make([]int64, count), nil
	}
	if len(texts) != 1 || len(texts[0]) != 8*count {
		return nil, fmt.Errorf("%w: %q, want %d packed numbers", errReply, texts, count)
	}
	return unpack(nil, texts[0])
}

// unpack appends packed doubles that are integers.
func unpack(numbers []int64, packed string) ([]int64, error) {
	if len(packed)%8 != 0 {
		return nil, fmt.Errorf("%w: %q", errReply, packed)
	}
	numbers = slices.Grow(numbers, len(packed)/8)
	for ; packed != ""; packed = packed[8:] {
		var b [8]byte
		copy(b[:], packed)
		f := math.Float64frombits(binary.LittleEndian.Uint64(b[:]))
		n := int64(f)
		if float64(n) != f {
			return nil, fmt.Errorf("%w: %v", errReply, f)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

func appendPacked(b []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(float64(n)))
	}
	return b
}
