//go:build check

package wire_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/simredis"
	"github.com/shardlimit/caddy-shardlimit/internal/simstore"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// simulatedStore is a store on a simulated server. Its commands run as those of a lane do.
type simulatedStore struct {
	*simstore.Server
	wire.Offline
	// remembers is set if callers say until when windows are open, as the ledger does: then
	// most calls need no script, and each has one request, because what follows from one
	// reply comes before the next request.
	remembers bool

	mu sync.Mutex
	// ends are the ends of windows by bucket, as far as replies have told them, or full.
	ends map[string]int64
}

// full is the end of a bucket that has counted nearly as much as it can, which a charge without
// a script does not heed.
const full = -1

// newSimulatedStore returns a store on a server. The clock that decides is that of the callers,
// unless Clock is set.
func newSimulatedStore(clock interface{ Now() time.Time }, do func(args ...string) (any, error)) *simulatedStore {
	s := &simulatedStore{Server: simstore.New(do), ends: map[string]int64{}}
	s.Offline = wire.Offline{To: s.Pipe(), Now: clock.Now, Estimate: s.estimate}
	s.Server.Now, s.Server.Execute = s.estimate, s.Offline.Execute
	return s
}

// estimate is the time of the clock that decides, or 0 while it is not known.
func (s *simulatedStore) estimate() int64 {
	if s.Clock == nil {
		return s.Offline.Now().UnixMicro()
	}
	now, _, ok := s.Clock.Estimate(s.Offline.Now())
	if !ok {
		return 0
	}
	return now
}

func (s *simulatedStore) Check(_ context.Context, asks []*store.Ask) {
	s.call(algorithm.Check, asks)
}

func (s *simulatedStore) Charge(_ context.Context, asks []*store.Ask) {
	s.call(algorithm.Charge, asks)
}

func (s *simulatedStore) Take(_ context.Context, asks []*store.Ask) {
	s.call(algorithm.Take, asks)
}

func (s *simulatedStore) Refund(_ context.Context, asks []*store.Ask) {
	s.call(algorithm.Refund, asks)
}

func (s *simulatedStore) Penalize(_ context.Context, asks []*store.Ask) {
	s.call(algorithm.Penalize, asks)
}

func (s *simulatedStore) Peek(_ context.Context, asks []*store.Ask) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.askAll(ask.Reading(algorithm.Peek, store.RolePrimary, s.Offline.Now().UnixMicro()), asks)
}

func (s *simulatedStore) Reset(_ context.Context, r store.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Empty(r)
}

// call runs an operation as Store does at a primary without replicas.
func (s *simulatedStore) call(what algorithm.Operation, asks []*store.Ask) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op := ask.Op{Operation: what, Role: store.RolePrimary, Clock: s.Clock}
	if s.Clock == nil {
		op.Now = s.Offline.Now().UnixMicro()
	}
	if !s.remembers {
		s.askAll(op, asks)
		return
	}
	for _, a := range asks {
		a.State = s.recall(op, a.Request)
	}
}

func (s *simulatedStore) askAll(op ask.Op, asks []*store.Ask) {
	var reqs []store.Request
	for _, a := range asks {
		reqs = append(reqs, a.Request)
	}
	for i, st := range s.Ask(op, reqs...) {
		asks[i].State = st
	}
}

// recall runs an operation on a bucket until whose end, as far as is known, is said.
func (s *simulatedStore) recall(op ask.Op, r store.Request) store.State {
	bucket := fmt.Sprintf("%+v %s", *r.Limit, r.ClientKey)
	isSmall := r.Cost < store.MaxInteger/2
	if isSmall && (op.Operation == algorithm.Check || op.Operation == algorithm.Charge) {
		r.Until = max(s.ends[bucket], 0)
	}
	st := s.RunAs(op, r)
	if st.Used+r.Cost > store.MaxInteger/2 {
		s.ends[bucket] = full
	} else if s.ends[bucket] != full {
		s.ends[bucket] = st.Reset
	}
	return st
}

// TestSimulatedServerKeepsTheContract runs the real scripts on a simulated server, which
// lives and decides by the clock of the suite.
func TestSimulatedServerKeepsTheContract(t *testing.T) {
	storetest.Run(t, func(_ *testing.T, clock *storetest.Clock) store.Store { return openSimulated(clock) })
}

// TestSimulatedServerCountsWithoutScripts charges windows that are known to be open.
func TestSimulatedServerCountsWithoutScripts(t *testing.T) {
	for _, limit := range windowed() {
		var s *simulatedStore
		storetest.History{Limit: limit}.Run(t, func(_ *testing.T, clock *storetest.Clock) store.Store {
			s = openSimulated(clock)
			s.remembers = true
			return s
		})
		if s.Plain < 100 {
			t.Errorf("%d charges did without a script", s.Plain)
		}
	}
}

func openSimulated(clock *storetest.Clock) *simulatedStore {
	s := newSimulatedStore(clock, simredis.New(clock.Now, simredis.NewInterpreter()).Do)
	// The suite's clock can run back, and estimates round towards their start.
	s.Clock, s.Bundles = wire.NewClock(clock.Now().Add(-24*time.Hour), clock.Now), true
	return s
}

// windowed are the limits of which a charge may do without a script.
func windowed() (all []store.Limit) {
	for _, limit := range append(slices.Clone(storetest.Limits), storetest.Days) {
		if limit.Algorithm == store.FixedWindow {
			all = append(all, limit)
		}
	}
	return all
}

// TestSimulatedServerRepliesAsRedis sends each command of histories to a real server too, and
// compares the replies and, in the end, the content.
func TestSimulatedServerRepliesAsRedis(t *testing.T) {
	run := func(limit store.Limit, remembers bool) {
		t.Run(fmt.Sprint(limit.Algorithm, limit.Align, limit.Calendar.Unit, remembers), func(t *testing.T) {
			m := newMirror(t, redistest.Start(t))
			storetest.History{Limit: limit, Operations: 1_000}.Run(t, func(_ *testing.T, clock *storetest.Clock) store.Store {
				s := newSimulatedStore(clock, m.do)
				s.Bundles, s.remembers = true, remembers
				return s
			})
			m.compareContent()
		})
	}
	for _, limit := range append(slices.Clone(storetest.Limits), storetest.Days) {
		run(limit, false)
	}
	for _, limit := range windowed() {
		run(limit, true)
	}
}

// mirror is a simulated server, and a real one that gets the same commands.
type mirror struct {
	*testing.T
	simulated *simredis.Server
	client    *goredis.Client
	// now is the simulated server's clock, which is the real one's shortly before a command.
	now time.Time
	// slack is the longest that the real one took.
	slack time.Duration
}

func newMirror(t *testing.T, server *redistest.Server) *mirror {
	opts := *server.Client().Options()
	opts.Protocol = 2
	m := &mirror{T: t, client: goredis.NewClient(&opts), slack: time.Millisecond}
	t.Cleanup(func() { m.client.Close() })
	m.simulated = simredis.New(func() time.Time { return m.now }, simredis.NewInterpreter())
	return m
}

func (m *mirror) do(args ...string) (any, error) {
	pipe := m.client.Pipeline()
	before, cmd, after := pipe.Time(m.Context()), pipe.Do(m.Context(), boxed(args)...), pipe.Time(m.Context())
	_, _ = pipe.Exec(m.Context())
	redistest.Must(m, before.Err())
	redistest.Must(m, after.Err())
	m.now, m.slack = before.Val(), max(m.slack, after.Val().Sub(before.Val())+time.Millisecond)
	reply, err := m.simulated.Do(args...)
	want, wantErr := cmd.Result()
	if errors.Is(wantErr, goredis.Nil) {
		wantErr = nil
	}
	if fmt.Sprint(err) != fmt.Sprint(wantErr) || !reflect.DeepEqual(plainReply(reply), plainReply(want)) {
		m.Errorf("%q:\n got %q, %v\nwant %q, %v", args, reply, err, want, wantErr)
	}
	return reply, err
}

func boxed(args []string) (words []any) {
	for _, arg := range args {
		words = append(words, arg)
	}
	return words
}

// plainReply makes replies of both servers comparable: an error in a list is its text, and a large
// score a number, because servers write it with 16 or 17 digits.
func plainReply(reply any) any {
	switch reply := reply.(type) {
	case simredis.Status:
		return string(reply)
	case error:
		return reply.Error()
	case string:
		if n, err := strconv.ParseFloat(reply, 64); err == nil && strings.Contains(reply, "e+") {
			return n
		}
	case []any:
		all := []any{}
		for _, one := range reply {
			all = append(all, plainReply(one))
		}
		return all
	}
	return reply
}

// compareContent compares the buckets that do not expire meanwhile.
func (m *mirror) compareContent() {
	m.Helper()
	m.now = m.client.Time(m.Context()).Val()
	soon := m.now.Add(20 * time.Second).UnixMilli()
	compared := 0
	for _, key := range m.simulated.Keys() {
		got, err := m.simulated.Do("pexpiretime", key)
		redistest.Must(m, err)
		if got.(int64) < soon {
			continue
		}
		compared++
		want := m.client.PExpireTime(m.Context(), key).Val().Milliseconds()
		if late := want - got.(int64); late < 0 || late > m.slack.Milliseconds() {
			m.Errorf("%s expires %d ms later, want at most %v", key, late, m.slack)
		}
		for _, read := range [][]string{{"get", key}, {"hgetall", key}, {"zrange", key, "0", "-1", "withscores"}} {
			_, _ = m.do(read...)
		}
	}
	if compared == 0 {
		m.Error("there are no buckets")
	}
	for _, key := range m.client.Keys(m.Context(), "*").Val() {
		if reply, _ := m.simulated.Do("exists", key); reply == int64(0) && m.client.PExpireTime(m.Context(), key).Val().Milliseconds() > soon {
			m.Errorf("the simulated server lacks %s", key)
		}
	}
}

// TestSimulatedServerRunsTheOtherScripts keeps overrides on both servers.
func TestSimulatedServerRunsTheOtherScripts(t *testing.T) {
	m := newMirror(t, redistest.Start(t))
	m.now = m.client.Time(t.Context()).Val()
	got := otherScripts(m.simulated.Do)
	want := otherScripts(func(args ...string) (any, error) {
		return m.client.Do(t.Context(), boxed(args)...).Result()
	})
	// Products name the script or not.
	for _, replies := range [][]string{got, want} {
		for i, reply := range replies {
			replies[i] = digests.ReplaceAllString(reply, "")
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("replies are\n%q, want\n%q", got, want)
	}
}

// clocks matches numbers that differ with the clocks, and digests the names of scripts in errors.
var (
	clocks  = regexp.MustCompile(`[0-9]{10,}`)
	digests = regexp.MustCompile(`\b[0-9a-f]{40}, `)
)

// otherScripts returns the replies to calls of them.
func otherScripts(do func(args ...string) (any, error)) (replies []string) {
	s := simstore.New(do)
	send := func(words ...any) string { return fmt.Sprint(s.Send(words...)) }
	call := func(source string, keys []any, args ...any) string {
		return send(slices.Concat([]any{"eval", source, len(keys)}, keys, args)...)
	}
	note := func(texts ...string) { replies = append(replies, texts...) }

	override := func(op string, args ...any) string {
		return call(luascripts.Override, []any{"overrides", "log"}, append([]any{op}, args...)...)
	}
	// noteReply notes a reply, but for numbers that differ with the clocks.
	noteReply := func(reply string) { note(clocks.ReplaceAllString(reply, "?")) }
	// noteValues notes how many values a reply has, and what there is under the names.
	names := []string{"hour", "day", "second", "fourth"}
	noteValues := func(reply string) {
		note(fmt.Sprint(strings.Count(reply, "\n= ")))
		for _, name := range names {
			note(send("hget", "overrides", name)[24:])
		}
	}
	change := func(name string, lasts time.Duration, content, expected string) {
		millis := lasts.Milliseconds()
		if content != "" && lasts == 0 {
			millis = store.NoEnd
		}
		noteReply(override("change", 9, name, "", "", "", wire.AppendPacked(nil, millis), content, expected, "{}"))
	}
	put := func(name string, version, lasts, kept int64, content string) {
		noteReply(override("change", 9, name, wire.AppendPacked(nil, version, lasts, kept), content, "1\n2\n"+name+"\n{}\n\n"+content, "", "", "", ""))
	}
	const highest, hour = 1 << 52, 3_600_000
	for _, name := range names {
		change(name, time.Hour, "first", "0")
		change(name, time.Hour, "first", "")
		change(name, 2*time.Hour, "second", "another")
		change(name, 0, "third", "")
		put(name, 1, hour, hour, "earlier")
		put(name, highest-1, hour, hour, "later "+name)
		put(name, highest-1, hour, hour, "later, and of another digest")
		put(name, highest, hour, -1, "that has ended")
	}
	number := send("hget", "overrides", "v")
	change("day", 0, "", "0")
	change("day", 0, "", "")
	change("day", 0, "", "")
	note(send("hset", "overrides", "damaged", "x"))
	noteValues(override("page", "0"))
	noteValues(override("changes", number))
	note(override("changes", "7"), override("changes", "x"), send("zcard", "log"), override("log", "5\nx", "5\n6\nx"), send("zcard", "log"))
	for i := range 5 {
		change(fmt.Sprint("another", i), time.Hour, "one more", "")
	}
	note(override("seen", "0", "5", "0"), send("hget", "overrides", "s"), override("seen", "9", "4", "0"), send("hget", "overrides", "s"))
	note(override("seen", "9", "4", "5"), send("exists", "overrides"), send("hset", "overrides", "o", "5"), override("seen", "9", "4", "9"), send("exists", "overrides"), override("seen", "9", "4", "0"), send("exists", "overrides"))
	return replies
}

// BenchmarkSimulatedServer is how long a call takes a simulation, its commands and replies
// included.
func BenchmarkSimulatedServer(b *testing.B) {
	for _, limit := range storetest.Limits {
		if limit.Align {
			continue
		}
		b.Run(limit.Algorithm.String(), func(b *testing.B) {
			clock := storetest.NewClock(time.UnixMilli(1_800_000_000_000))
			s := newSimulatedStore(clock, simredis.New(clock.Now, simredis.NewInterpreter()).Do)
			limit.Zone = "bench"
			reqs := []store.Request{{Limit: &limit, ClientKey: "client", Events: 100, Cost: 1}}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				reqs[0].ID = strconv.Itoa(i)
				if st := store.Answers(b.Context(), s.Take, reqs)[0]; st.Err != nil {
					b.Fatal(st.Err)
				}
				clock.Advance(100 * time.Millisecond)
			}
		})
	}
}
