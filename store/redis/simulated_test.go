package redis

import (
	"context"
	"encoding"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/simredis"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
	"github.com/shardlimit/caddy-shardlimit/store/storetest"
)

// simulatedStore is a store on a simulated server: the code of this package makes the commands
// and understands the replies, and there are no connections, lanes and timeouts.
type simulatedStore struct {
	// clock is that of the callers.
	clock interface{ Now() time.Time }
	do    func(args ...string) (any, error)
	// primary, if not nil, estimates the server's clock, which then decides; otherwise
	// clock does.
	primary *primaryClock
	// bundles is set if scripts are called for several buckets at once.
	bundles bool
	// remembers is set if callers say until when windows are open, as the ledger does: then
	// most calls need no script, and each has one request, because what follows from one
	// reply comes before the next request.
	remembers bool

	mu sync.Mutex
	// ends are the ends of windows by bucket, as far as replies have told them, or full.
	ends map[string]int64
	// plain counts the charges without a script.
	plain int
}

// full is the end of a bucket that has counted nearly as much as it can, which a charge without
// a script does not heed.
const full = -1

// simulatedTimeout is how long a charge may take to reach the server.
const simulatedTimeout = 100 * time.Millisecond

// newSimulatedStore returns a store on a server that knows the scripts.
func newSimulatedStore(t testing.TB, clock interface{ Now() time.Time }, do func(args ...string) (any, error)) *simulatedStore {
	s := &simulatedStore{clock: clock, do: do, ends: map[string]int64{}}
	for a := range store.Algorithms {
		for script := layoutOf(a).script; script != nil; script = script.bundle {
			_, err := do("SCRIPT", "LOAD", script.source)
			must(t, err)
		}
	}
	return s
}

func (*simulatedStore) keys() bucketKeys { return bucketKeys{prefix: DefaultKeyPrefix} }

func (s *simulatedStore) now() int64 { return s.clock.Now().UnixMicro() }

func (s *simulatedStore) Check(_ context.Context, reqs []store.Request, states []store.State) {
	copy(states, s.call(algorithm.Check, reqs))
}

func (s *simulatedStore) Charge(_ context.Context, reqs []store.Request, states []store.State) {
	copy(states, s.call(algorithm.Charge, reqs))
}

func (s *simulatedStore) Take(_ context.Context, reqs []store.Request, states []store.State) {
	copy(states, s.call(algorithm.Take, reqs))
}

func (s *simulatedStore) Refund(_ context.Context, reqs []store.Request, states []store.State) {
	copy(states, s.call(algorithm.Refund, reqs))
}

func (s *simulatedStore) Penalize(_ context.Context, reqs []store.Request, states []store.State) {
	copy(states, s.call(algorithm.Penalize, reqs))
}

func (s *simulatedStore) Peek(_ context.Context, reqs []store.Request, states []store.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ask(whole(reqs, states), reading(algorithm.Peek, store.RolePrimary, s.now()))
}

func (s *simulatedStore) Reset(_ context.Context, r store.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, limit := range rulesLike(r.Limit) {
		del := newPlain("del", s.keys().key(&limit, r.ClientKey))
		if s.execute([]*command{del}); del.outcome != nil {
			return del.outcome
		}
	}
	return nil
}

// call runs an operation as Store does at a primary without replicas.
func (s *simulatedStore) call(what algorithm.Operation, reqs []store.Request) []store.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	states := make([]store.State, 0, len(reqs))
	size := max(len(reqs), 1)
	if s.remembers {
		size = 1
	}
	for some := range slices.Chunk(slices.Clone(reqs), size) {
		states = append(states, s.callOnce(what, some)...)
	}
	return states
}

func (s *simulatedStore) callOnce(what algorithm.Operation, reqs []store.Request) []store.State {
	g := whole(reqs, make([]store.State, len(reqs)))
	s.recall(what, reqs)
	op := operation{Operation: what, role: store.RolePrimary, clock: s.primary}
	if s.primary == nil {
		op.now = s.now()
	}
	now := s.estimate()
	switch {
	case what == algorithm.Charge && s.remembers && now > 0:
		op.latest = now + (simulatedTimeout + replyTimeout).Microseconds()
	case what == algorithm.Check && s.remembers && now > 0 && g.areOpen(now):
		s.ask(g, reading(what, store.RolePrimary, now))
		g.members = g.where(func(i int) bool { return g.states[i].Err == nil && !g.states[i].Holds(g.reqs[i].Limit) })
	}
	s.ask(g, op)
	for i := range g.states {
		key := s.keys().key(reqs[i].Limit, reqs[i].ClientKey)
		if g.states[i].Used+reqs[i].Cost > store.MaxInteger/2 {
			s.ends[key] = full
		} else if s.ends[key] != full {
			s.ends[key] = g.states[i].Reset
		}
	}
	return g.states
}

// recall sets until when windows are open, as far as is known.
func (s *simulatedStore) recall(what algorithm.Operation, reqs []store.Request) {
	if !s.remembers || what != algorithm.Check && what != algorithm.Charge {
		return
	}
	for i := range reqs {
		r := &reqs[i]
		if r.Cost < store.MaxInteger/2 {
			r.Until = max(s.ends[s.keys().key(r.Limit, r.ClientKey)], 0)
		}
	}
}

// estimate is the time of the clock that decides, or 0 while it is not known.
func (s *simulatedStore) estimate() int64 {
	if s.primary == nil {
		return s.now()
	}
	now, _, ok := s.primary.estimate(s.clock.Now())
	if !ok {
		return 0
	}
	return now
}

// ask runs op on every bucket of g and sets their states.
func (s *simulatedStore) ask(g group, op operation) group {
	var cmds []*command
	for _, i := range g.members {
		cmds = append(cmds, op.command(s.keys(), &g.reqs[i], nil))
	}
	s.execute(cmds)
	for n, i := range g.members {
		r := &g.reqs[i]
		g.states[i] = op.state(cmds[n], r)
		if left, is := cmds[n].missedWindow(r.Cost, &g.states[i]); is {
			again := *r
			again.Cost, again.Until = left, 0
			g.states[i] = s.ask(whole([]store.Request{again}, make([]store.State, 1)), op).states[0]
			if st := &g.states[i]; st.Err == nil {
				// It says whether the cost of r was allowed, and not what was left of it.
				*st = algorithm.View(&st.Content, r, st.Now, true)
			}
		}
	}
	return g
}

// execute is pipeline and exec of a lane, without the connection.
func (s *simulatedStore) execute(cmds []*command) {
	for _, cmd := range cmds {
		if cmd.charge != nil {
			cmd.checkWindow(s.estimate())
		}
		// That has made a script call of it if its window ends soon.
		if cmd.charge != nil {
			s.plain++
		}
	}
	var bundles []*bundle
	others := cmds
	if s.bundles && len(cmds) > 1 {
		bundles, others = newBundles(cmds)
	}
	passed := int64(0)
	if s.primary != nil {
		passed = s.primary.passed(s.clock.Now())
	}
	for _, b := range bundles {
		s.process(b)
		b.share()
	}
	for _, cmd := range others {
		if cmd.asksClock() {
			cmd.stamp(passed)
		}
		cmd.single()
		s.process(cmd)
		if cmd.charge != nil {
			s.process(cmd.window)
		}
	}
	for _, cmd := range cmds {
		cmd.settleOutcome(nil)
	}
	observe(cmds, s.clock.Now(), s.clock.Now())
}

// process runs a command on the server as a client of go-redis would.
func (s *simulatedStore) process(cmd goredis.Cmder) {
	var words []string
	for _, arg := range cmd.Args() {
		words = append(words, wordOf(arg))
	}
	reply, err := s.do(words...)
	if err == nil && reply == nil {
		err = goredis.Nil
	}
	if cmd.SetErr(err); err != nil {
		return
	}
	switch cmd := resultOf(cmd).(type) {
	case *goredis.StringCmd:
		cmd.SetVal(reply.(string))
	case *goredis.IntCmd:
		cmd.SetVal(reply.(int64))
	case *goredis.StringSliceCmd:
		texts := make([]string, len(reply.([]any)))
		for i, text := range reply.([]any) {
			texts[i], _ = text.(string)
		}
		cmd.SetVal(texts)
	case *goredis.Cmd:
		cmd.SetVal(reply)
	default:
		panic(fmt.Sprintf("no reply for %T", cmd))
	}
}

// resultOf is what holds the result of a command.
func resultOf(cmd goredis.Cmder) goredis.Cmder {
	switch cmd := cmd.(type) {
	case *command:
		return cmd.Cmder
	case *bundle:
		return cmd.Cmd
	}
	return cmd
}

// wordOf is what go-redis writes for an argument.
func wordOf(arg any) string {
	switch arg := arg.(type) {
	case string:
		return arg
	case *string:
		return *arg
	case []byte:
		return string(arg)
	case int:
		return strconv.Itoa(arg)
	case int64:
		return strconv.FormatInt(arg, 10)
	case encoding.BinaryMarshaler:
		b, _ := arg.MarshalBinary()
		return string(b)
	}
	panic(fmt.Sprintf("no word for %T", arg))
}

// TestSimulatedServerKeepsTheContract runs the real scripts on a simulated server, which
// lives and decides by the clock of the suite.
func TestSimulatedServerKeepsTheContract(t *testing.T) {
	storetest.Run(t, func(t *testing.T, clock *storetest.Clock) store.Store { return openSimulated(t, clock) })
}

// TestSimulatedServerCountsWithoutScripts charges windows that are known to be open.
func TestSimulatedServerCountsWithoutScripts(t *testing.T) {
	for _, limit := range windowed() {
		var s *simulatedStore
		storetest.History{Limit: limit}.Run(t, func(t *testing.T, clock *storetest.Clock) store.Store {
			s = openSimulated(t, clock)
			s.remembers = true
			return s
		})
		if s.plain < 100 {
			t.Errorf("%d charges did without a script", s.plain)
		}
	}
}

func openSimulated(t *testing.T, clock *storetest.Clock) *simulatedStore {
	s := newSimulatedStore(t, clock, simredis.New(clock.Now, simredis.NewInterpreter()).Do)
	s.primary, s.bundles = newPrimaryClock(), true
	// The suite's clock can run back, and estimates round towards their start.
	s.primary.start = clock.Now().Add(-24 * time.Hour)
	return s
}

// windowed are the limits of which a charge may do without a script.
func windowed() (all []store.Limit) {
	for _, limit := range append(slices.Clone(storetest.Limits), storetest.Days) {
		if layoutOf(limit.Algorithm).isHash {
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
			storetest.History{Limit: limit, Operations: 1_000}.Run(t, func(t *testing.T, clock *storetest.Clock) store.Store {
				s := newSimulatedStore(t, clock, m.do)
				s.bundles, s.remembers = true, remembers
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
	must(m, before.Err())
	must(m, after.Err())
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

// plainReply makes replies of both servers comparable: an error in a list is its text.
func plainReply(reply any) any {
	switch reply := reply.(type) {
	case simredis.Status:
		return string(reply)
	case error:
		return reply.Error()
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
		must(m, err)
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

// TestSimulatedServerRunsTheOtherScripts migrates a bucket and keeps overrides, on both servers.
func TestSimulatedServerRunsTheOtherScripts(t *testing.T) {
	m := newMirror(t, redistest.Start(t))
	m.now = m.client.Time(t.Context()).Val()
	got := otherScripts(t, m.now, m.simulated.Do)
	want := otherScripts(t, m.now, func(args ...string) (any, error) {
		return m.client.Do(t.Context(), boxed(args)...).Result()
	})
	if !slices.Equal(got, want) {
		t.Errorf("replies are\n%q, want\n%q", got, want)
	}
}

// otherScripts returns the replies to calls of them.
func otherScripts(t *testing.T, now time.Time, do func(args ...string) (any, error)) (replies []string) {
	s := newSimulatedStore(t, nil, do)
	send := func(cmd *command) string {
		cmd.single()
		s.process(cmd)
		if err := cmd.Err(); err != nil {
			return err.Error()
		}
		return fmt.Sprint(resultOf(cmd).(interface{ Val() any }).Val())
	}
	call := func(of *script, keys []any, args ...any) string {
		_, err := do("SCRIPT", "LOAD", of.source)
		must(t, err)
		cmd := newScriptCall(of, wordEvalSHA, keys, args...)
		cmd.single()
		if s.process(cmd); cmd.Err() != nil {
			return cmd.Err().Error()
		}
		text, _ := cmd.result()
		return text
	}
	note := func(texts ...string) { replies = append(replies, texts...) }

	expiry := now.Add(time.Hour).UnixMilli()
	note(send(newPlain("hset", "bucket", "c", 7, "r", expiry)), send(newPlain("pexpireat", "bucket", expiry)))
	for _, key := range []any{"bucket", "none"} {
		dumped := call(scriptDump, []any{key})
		note(dumped[:8])
		for range 2 {
			note(call(scriptRestore, []any{"restored", "mark"}, appendPacked(nil, expiry, 1), dumped[8:]))
		}
	}
	note(call(scriptRestore, []any{"broken"}, appendPacked(nil, expiry, 0), "x"))
	note(send(newPlain("hgetall", "restored")), send(newPlain("pexpiretime", "restored")), send(newPlain("pexpiretime", "mark")))

	override := func(op string, args ...any) {
		note(call(scriptOverride, []any{"overrides"}, append([]any{op}, args...)...))
	}
	for _, until := range []time.Duration{time.Hour, 2 * time.Hour, -time.Second} {
		ends := now.Add(until).UnixMilli()
		for _, op := range []string{"set", "keep", "set"} {
			override(op, until.String(), appendPacked(nil, ends, 2), op+" "+until.String())
		}
	}
	override("set", "third", appendPacked(nil, expiry, 2), "x")
	note(send(newPlain("pexpiretime", "overrides")))
	lines := strings.Split(call(scriptOverride, []any{"overrides"}, "read"), "\n")
	slices.Sort(lines[1:])
	note(lines[1:]...)
	for _, name := range []string{"1h0m0s", "1h0m0s", "2h0m0s"} {
		override("remove", name)
	}
	note(send(newPlain("exists", "overrides")), call(scriptOverride, []any{"restored"}, "read"))
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
			s := newSimulatedStore(b, clock, simredis.New(clock.Now, simredis.NewInterpreter()).Do)
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
