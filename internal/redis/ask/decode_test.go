package ask

import (
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// FuzzReply decodes any reply to an error or to a state that makes sense.
func FuzzReply(f *testing.F) {
	f.Add(replyBytes(100, 1, 3, 200, 0), int64(100), "3")
	f.Add(replyBytes(0, 0, -1, 200, 100), int64(100), "")
	f.Add(replyBytes(1, 100, 1000, 1, 2, 1000, 5, 0), int64(0), "x")
	f.Add(replyBytes(1<<60, 1, 1<<60, 7, 0, 0), int64(100), "\x00\x00\x00\x00\x00\x00\xf0\x3f")
	f.Add([]byte{}, int64(0), "9007199254740993")
	// Of gcra, a rest of ages.
	f.Add(replyBytes(1, 100, 768, 109951162777832, 1, 2, 1000, 5, 0), int64(0), "x")
	f.Fuzz(func(t *testing.T, data []byte, now int64, text string) {
		var reply []int64
		for ; len(data) >= 8; data = data[8:] {
			reply = append(reply, int64(binary.BigEndian.Uint64(data)))
		}
		for _, limit := range storetest.Limits {
			l := layoutOf(limit.Algorithm)
			r := &store.Request{Limit: &limit, Events: 10, Cost: 3, ID: "id"}
			for op := algorithm.Check; op <= algorithm.Penalize; op++ {
				makesSense(t, Op{Operation: op}.replied(l, r, reply, now))
			}
			if l.isSet {
				continue
			}
			for _, texts := range [][]string{{text}, {text, text, text}, {text[:len(text)/2], text[len(text)/2:], ""}} {
				makesSense(t, l.read(r, texts, now))
			}
		}
	})
}

func makesSense(t *testing.T, st store.State) {
	t.Helper()
	if st.Err == nil && (st.Used < 0 || st.Remaining < 0 || st.Remaining > 10 || st.RetryAfter < 0 ||
		st.Reset < 0 || !st.Allowed && st.Penalty == 0 && st.Remaining > 3) {
		t.Fatalf("a reply is decoded as %+v", st)
	}
}

func replyBytes(values ...int64) (b []byte) {
	for _, v := range values {
		b = binary.BigEndian.AppendUint64(b, uint64(v)) //nolint:gosec // the bits matter
	}
	return b
}

// TestEveryAlgorithmHasALayout of its own, with which keys begin, and a script.
func TestEveryAlgorithmHasALayout(t *testing.T) {
	codes := map[string]store.Algorithm{}
	for a := range store.Algorithms {
		l := layoutOf(a)
		if l.code == "" || l.script == nil || l.arguments == nil || l.count == 0 {
			t.Errorf("%s has the layout %+v", a, l)
			continue
		}
		if other, is := codes[l.code]; is {
			t.Errorf("%s and %s have keys with %s", a, other, l.code)
		}
		codes[l.code] = a
	}
}

// TestReplyRepeatsTheInstant that it was asked to judge by: a damaged one changes nothing.
func TestReplyRepeatsTheInstant(t *testing.T) {
	limit := store.Limit{Zone: "zone", Algorithm: store.SlidingLog, Window: time.Minute}
	r := store.Request{Limit: &limit, Events: 10, Cost: 1}
	now := time.Now().UnixMicro()
	op := Reading(algorithm.Check, store.RoleReplica, now)
	for _, said := range []int64{now, 4 * now, now / 4, 0} {
		st := op.replied(layoutOf(limit.Algorithm), &r, []int64{said, 0, 3, now, now, 0}, 0)
		if st.Err != nil || st.Now != now || st.Used != 3 || st.Reset != now+limit.Window.Microseconds() {
			t.Errorf("a reply of the instant %d, asked for at %d: %+v", said, now, st)
		}
	}
}

// TestPanicsAreOutcomes: what was asked gets an answer, and what was written may count.
func TestPanicsAreOutcomes(t *testing.T) {
	for op, want := range map[algorithm.Operation]error{algorithm.Charge: store.ErrUncertain, algorithm.Check: contain.ErrPanic} {
		// A request without a limit is a fault of a caller.
		st, repair := Op{Operation: op}.Outcome(wire.NewRead("hmget", "key", "c"), &store.Request{})
		if !errors.Is(st.Err, want) || !errors.Is(st.Err, contain.ErrPanic) || repair.Needed {
			t.Errorf("%v: %v", op, st.Err)
		}
	}
}
