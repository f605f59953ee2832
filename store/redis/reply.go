package redis

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/shardlimit/caddy-shardlimit/store"
)

var errReply = errors.New("this is not a bucket of ours")

// parseNumbers reads the fields of a hash. A field that is missing is 0.
func parseNumbers(texts []string) ([]int64, error) {
	numbers := make([]int64, len(texts))
	for i, text := range texts {
		if text == "" {
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: %q", errReply, text)
		}
		numbers[i] = n
	}
	return numbers, nil
}

// unpackNumbers reads a string of count packed doubles. A key that is missing
// is as many zeros.
func unpackNumbers(texts []string, count int) ([]int64, error) {
	if len(texts) == 1 && texts[0] == "" {
		return make([]int64, count), nil
	}
	if len(texts) != 1 || len(texts[0]) != 8*count {
		return nil, fmt.Errorf("%w: %q, want %d packed numbers", errReply, texts, count)
	}
	return unpack(texts[0])
}

// unpack reads packed doubles that are integers.
func unpack(packed string) ([]int64, error) {
	if len(packed)%8 != 0 {
		return nil, fmt.Errorf("%w: %q", errReply, packed)
	}
	numbers := make([]int64, len(packed)/8)
	for i := range numbers {
		var b [8]byte
		copy(b[:], packed[8*i:])
		f := math.Float64frombits(binary.LittleEndian.Uint64(b[:]))
		if numbers[i] = int64(f); float64(numbers[i]) != f {
			return nil, fmt.Errorf("%w: %v", errReply, f)
		}
	}
	return numbers, nil
}

// check returns an error unless numbers can be those of a bucket at now.
func (l *layout) check(now int64, numbers []int64) error {
	if len(numbers) != l.count {
		return fmt.Errorf("%w: %d numbers, want %d", errReply, len(numbers), l.count)
	}
	sane := isSane(now)
	for _, n := range numbers {
		sane = sane && isSane(n)
	}
	if !sane {
		return fmt.Errorf("%w: %d at %d", errReply, numbers, now)
	}
	return nil
}

func isSane(n int64) bool { return n >= 0 && n <= store.MaxInteger }
