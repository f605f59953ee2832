//go:build check

package simredis_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/simredis"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

// twins are a server of the package and a real one that get the same calls.
type twins struct {
	*testing.T
	server *simredis.Server
	real   *goredis.Client
	// now is the clock of server: that of the real one shortly before a call.
	now time.Time
	// slack is by how much an instant can be later in the real one, which takes its time.
	slack time.Duration
}

func newTwins(t *testing.T) *twins {
	tw := &twins{T: t, slack: time.Millisecond}
	opts := *redistest.Start(t).Client().Options()
	opts.Protocol = 2
	tw.real = goredis.NewClient(&opts)
	t.Cleanup(func() { tw.real.Close() })
	tw.server = simredis.New(func() time.Time { return tw.now }, simredis.NewInterpreter())
	return tw
}

func (tw *twins) realTime() time.Time {
	tw.Helper()
	now, err := tw.real.Time(tw.Context()).Result()
	if err != nil {
		tw.Fatal(err)
	}
	return now
}

// do sends a call to both, and requires equal replies.
func (tw *twins) do(args ...string) {
	tw.Helper()
	tw.now = tw.realTime()
	got := replyOf(tw.server.Do(args...))
	words := make([]any, len(args))
	for i, arg := range args {
		words[i] = arg
	}
	want := replyOf(tw.real.Do(tw.Context(), words...).Result())
	tw.slack = max(tw.slack, tw.realTime().Sub(tw.now)+time.Millisecond)
	if !tw.equal(got, want) {
		tw.Errorf("%q:\n got %#v\nwant %#v", args, got, want)
	}
}

// replyOf makes replies of both comparable.
func replyOf(reply any, err error) any {
	if errors.Is(err, goredis.Nil) {
		return nil
	}
	if err != nil {
		return errors.New(ownWords.ReplaceAllString(err.Error(), "$1"))
	}
	switch reply := reply.(type) {
	case simredis.Status:
		return string(reply)
	case error:
		return replyOf(nil, reply)
	case []any:
		all := make([]any, len(reply))
		for i, one := range reply {
			all[i] = replyOf(one, nil)
		}
		return all
	}
	return reply
}

// ownWords are those of Lua, and the line, which it does not count alike in all errors.
var ownWords = regexp.MustCompile(`(?s)(user_script:\d+: |new function\): ).*|, on @user_script.*`)

// equal compares replies. An instant, and what is left of a span, may differ by the slack.
func (tw *twins) equal(got, want any) bool {
	some, isList := got.([]any)
	if others, both := want.([]any); isList && both {
		return slices.EqualFunc(some, others, tw.equal)
	}
	a, isNumber := got.(int64)
	b, other := want.(int64)
	if isNumber && other && a > 1e6 && a < 1e15 {
		return max(a-b, b-a) <= tw.slack.Milliseconds()
	}
	return reflect.DeepEqual(got, want)
}

// TestRepliesAreThoseOfRedis sends random commands, from clients and scripts, to both servers,
// and compares all replies and, in the end, all content.
func TestRepliesAreThoseOfRedis(t *testing.T) {
	const seed, calls = 20261127, 20_000
	tw, random := newTwins(t), rand.New(rand.NewPCG(seed, 0))
	for i := 0; i < calls && !t.Failed(); i++ {
		tw.do(wrap(random, randomCommand(random))...)
		if random.IntN(50) == 0 {
			tw.move(pick(random, keys), pick(random, keys))
		}
		if random.IntN(500) == 0 {
			tw.compareContent()
		}
	}
	tw.compareContent()
}

var (
	keys   = []string{"a", "b", "c", "d"}
	names  = []string{"c", "r", "p", "", "\x00\xff", "id:1", "id:2"}
	texts  = []string{"0", "1", "-7", "9007199254740993", "9223372036854775807", "1.5", "x", "", "\r\n\x00"}
	scores = []string{"0", "1", "-3", "2.5", "1795258977534988", "1.6169934e+31", "4e+31", "(1", "-inf", "+inf", "(2.5", "(-3", "0.10000000000000001", "x", "nan"}
	ranks  = []string{"0", "1", "2", "-1", "-2", "-100", "100", "x"}
	spans  = []string{"100000000", "300000000", "-5", "0", "x", "1.5"}
)

// shapes are the commands by what may be in the place of their words.
var shapes = [][]any{
	{"EXISTS", keys}, {"EXISTS", keys, keys}, {"DEL", keys}, {"DEL", keys, keys}, {"PTTL", keys}, {"PEXPIRETIME", keys},
	{"PEXPIRE", keys, spans}, {"PEXPIRE", keys, spans, "nx"}, {"PEXPIRE", keys, spans, "xyz"}, {"HSETNX", keys, names, texts}, {"PEXPIREAT", keys, []string{"99999999999999", "1000", "0", "x"}},
	{"GET", keys}, {"MGET", keys, keys, keys}, {"SET", keys, texts}, {"SET", keys, texts, "PX", spans}, {"SET", keys, texts, "pxat", []string{"99999999999999", "1000", "x"}},
	{"SET", keys, texts, "PY", spans},
	{"HGET", keys, names}, {"HMGET", keys, names, names}, {"HGETALL", keys}, {"HSET", keys, names, texts}, {"HSET", keys, names, texts, names, texts},
	{"HSET", keys, names, texts, names}, {"HDEL", keys, names}, {"HDEL", keys, names, names}, {"HINCRBY", keys, names, texts}, {"hincrby", keys, names, texts},
	{"ZADD", keys, scores, names}, {"ZADD", keys, scores, names, scores, names}, {"ZADD", keys, scores, names, scores}, {"ZREM", keys, names, names},
	{"ZREMRANGEBYRANK", keys, ranks, ranks}, {"ZCARD", keys}, {"ZCOUNT", keys, scores, scores}, {"ZMSCORE", keys, names, names},
	{"ZRANGE", keys, ranks, ranks}, {"ZRANGE", keys, ranks, ranks, "WITHSCORES"}, {"ZRANGE", keys, ranks, ranks, "REV"},
	{"ZRANGE", keys, scores, scores, "BYSCORE"}, {"ZRANGE", keys, scores, scores, "BYSCORE", "REV", "LIMIT", ranks, ranks, "WITHSCORES"},
	{"ZRANGE", keys, scores, scores, "BYSCORE", "LIMIT", ranks, ranks}, {"ZRANGE", keys, ranks, ranks, "LIMIT", ranks, ranks}, {"ZRANGE", keys, ranks, ranks, "WITH"},
	{"RESTORE", keys, spans, "x"}, {"DUMP"}, {"NONE", keys}, {"HSET", keys}, {"ZCOUNT", keys, scores}, {"TIME", "x"},
}

func pick[T any](random *rand.Rand, from []T) T { return from[random.IntN(len(from))] }

func randomCommand(random *rand.Rand) (args []string) {
	for _, word := range pick(random, shapes) {
		switch word := word.(type) {
		case string:
			args = append(args, word)
		case []string:
			args = append(args, pick(random, word))
		}
	}
	return args
}

// wrap lets a script call a command.
func wrap(random *rand.Rand, args []string) []string {
	switch random.IntN(6) {
	case 0:
		return append([]string{"EVAL", "return redis.call(unpack(ARGV))", "0"}, args...)
	case 1:
		return append([]string{"eval", "local r = redis.pcall(unpack(ARGV)) return {type(r), r, type(r) == 'table' and #r or 0}", "0"}, args...)
	case 2:
		return append([]string{"EVAL_RO", "local ok, r = pcall(redis.call, unpack(ARGV)) return {tostring(ok), type(r), r}", "0"}, args...)
	default:
		return args
	}
}

// move dumps a key and restores it as another one, in both.
func (tw *twins) move(from, to string) {
	tw.Helper()
	tw.now = tw.realTime()
	got, err := tw.server.Do("DUMP", from)
	if err != nil {
		tw.Fatal(err)
	}
	want, err := tw.real.Dump(tw.Context(), from).Result()
	if (got == nil) != errors.Is(err, goredis.Nil) {
		tw.Fatalf("dump of %s: got %q, want %q", from, got, want)
	}
	if got == nil {
		return
	}
	mine := replyOf(tw.server.Do("RESTORE", to, "99999999999999", got.(string), "ABSTTL"))
	theirs := replyOf(tw.real.Do(tw.Context(), "RESTORE", to, "99999999999999", want, "ABSTTL").Result())
	if !reflect.DeepEqual(mine, theirs) {
		tw.Fatalf("restore of %s: got %v, want %v", to, mine, theirs)
	}
}

func (tw *twins) compareContent() {
	tw.Helper()
	all, err := tw.real.Keys(tw.Context(), "*").Result()
	if err != nil {
		tw.Fatal(err)
	}
	tw.now = tw.realTime()
	slices.Sort(all)
	if got := tw.server.Keys(); !slices.Equal(got, all) {
		tw.Fatalf("keys are %q, want %q", got, all)
	}
	for _, key := range all {
		tw.do("PEXPIRETIME", key)
		tw.do("GET", key)
		tw.do("HGETALL", key)
		tw.do("ZRANGE", key, "0", "-1", "WITHSCORES")
	}
}

// TestLuaIsThatOfRedis runs what the scripts use of Lua and of Redis's libraries, and its edges.
func TestLuaIsThatOfRedis(t *testing.T) {
	tw := newTwins(t)
	for _, text := range []string{
		"return 3.99", "return -3.99", "return true", "return false", "return nil", "return {1, 2.5, 'x', false, nil, 4}", "return {{1}, {ok = 'fine'}, {err = 'BAD thing'}}",
		"return {ok = 'fine'}", "return {err = 'BAD thing'}", "return redis.status_reply('fine')",
		"return redis.error_reply('BAD thing')", "return redis.error_reply('-BAD thing')", "return redis.error_reply('thing')", "return redis.error_reply('-thing')",
		"return redis.error_reply('REFUSED ' .. string.gsub('-x y', '^%-', ''))",
		"return {redis.error_reply('BAD thing'), redis.error_reply('thing'), 'x'}",
		"local r = redis.error_reply('BAD thing') return r.err", "local r = redis.status_reply('fine') return r.ok",
		"return redis.sha1hex('x')", "return redis.sha1hex('')", "return redis.sha1hex(12.5)", "return redis.sha1hex({})", "return redis.sha1hex(nil)",
		"return redis.call('SET', 'k', 'v')", "return redis.call('SET', 'k', 'v').ok", "return type(redis.call('GET', 'none'))", "return redis.call('GET', 12.5)",
		"redis.call('SET', 'n', 2^53 + 2) return redis.call('GET', 'n')", "redis.call('SET', 'n', 0.1) return redis.call('GET', 'n')",
		"redis.call('SET', 'n', 1e17) return redis.call('GET', 'n')", "redis.call('SET', 'n', 123456789012345678) return redis.call('GET', 'n')",
		"redis.call('SET', 'n', -0.0) return redis.call('GET', 'n')", "redis.call('SET', 'n', 1 / 0) return redis.call('GET', 'n')", "redis.call('SET', 'n', 2^500) return redis.call('GET', 'n')",
		"redis.call('SET', 'n', 1e-7) return redis.call('GET', 'n')",
		"return redis.call()", "return redis.call({})", "return redis.call('GET')", "return redis.call('NONE')", "return redis.call('GET', true)", "return redis.pcall('NONE')",
		"return {redis.pcall('NONE').err}", "local ok, e = pcall(redis.call, 'NONE') return {type(e), e}", "local ok, e = pcall(error, {err = 'X y', a = 1}) return {type(e), e}",
		"local ok, e = pcall(error, {a = 'b'}) return {type(e), e.a}", "local ok, e = pcall(error, 'text', 0) return {type(e), e}",
		"local ok, e = pcall(function() assert(false, 'NOPERM x') end) return e", "return {pcall(function(...) return ... end, 1, 2, 3)}",
		"return tostring(redis.acl_check_cmd('PEXPIRE', 'k', 1))", "return redis.acl_check_cmd('NONE', 'k')",
		"assert(false, 'NOPERM the user may not')", "error('thing')", "error({err = 'BAD thing'})", "local x = nil + 1", "local x = {} < 1", "x = 1", "return x", "return {", "nothing.at.all()",
		"return struct.pack('<ddd', 1, -2.5, 2^53)", "return struct.pack('<d', '7')", "local a, b, c = struct.unpack('<dd', ARGV[1]) return {a, b, c}", "return struct.unpack('<d', 'short')",
		"return {tonumber('1e+16'), tonumber('4e3'), tonumber(' 12 '), tonumber('0x1F'), tonumber('010'), tonumber('1_0') == nil and 1, tonumber('x') == nil and 1, tonumber('') == nil and 1, tonumber(5)}",
		"return {tonumber('1.5e300') == 1.5e300, tonumber('inf') == 1 / 0, tonumber('-7.9'), tonumber({}) == nil, tonumber(false) == nil}",
		"return {'a' .. 1, 'a' .. 16, 12 .. '', tostring(100000), tostring(-3), tostring(1.5)}",
		"return {string.format('(%.17g', 0.5), string.format('%.17g', 2^53 * 1795258977534988), string.format('%.0f', 1795258977534.0), string.format('%.17g', 1795258977534988)}",
		"return {math.frexp(8), math.floor(-2.5), math.ceil(2.1), math.fmod(7, 3), math.fmod(-7, 3), -7 % 3, 7 % -3, 2 ^ 10, math.max(1, 2, 3), math.min(4, 2)}",
		"return {#'\\0\\255', string.sub('hello', 2, 3), string.sub('hello', -2), string.rep('ab', 3), string.byte('a'), string.char(0, 255)}",
		"local t = {3, 1, 2} table.sort(t, function(a, b) return a > b end) return t", "return {unpack({1, 2, 3})}", "return table.concat({1, 'b', 3}, ',')", "return #ARGV + #KEYS", "return next({}) == nil",
		"local t = redis.call('TIME') return {#t, type(t[1]), type(t[2])}", "return type(redis.call('TIME')[1] * 1000000)",
		"local r = {} for i, v in ipairs({5, 6}) do r[i] = v * 2 end return r", "return select('#', 1, nil, 3)", "return {KEYS[1] or 'none', ARGV[1]}",
		"redis.call('HSET', 'h', 'c', 9007199254740992) return redis.call('HINCRBY', 'h', 'c', 1)", "redis.call('HINCRBY', 'h', 'c', 1.5)", "redis.call('SET', 'k', 'v') redis.call('HGET', 'k', 'f')",
		"local ok, e = pcall(redis.call, 'HGET', 'k', 'f') return e", "redis.call('SET', 'half', 1) error('later')", "return redis.call('GET', 'half')",
	} {
		tw.do("EVAL", text, "0", strings.Repeat("\x00\x00\x00\x00\x00\x00\xf0?", 2))
	}
	for _, args := range [][]string{
		{"EVAL"}, {"EVAL", "return 1"}, {"EVAL", "return 1", "x"}, {"EVAL", "return 1", "1"}, {"EVAL", "return 1", "-1"}, {"EVAL_RO", "redis.call('DEL', 'k')", "0"},
		{"EVALSHA", strings.Repeat("0", 40), "0"}, {"SCRIPT", "LOAD", "return 7"}, {"EVALSHA", "E4E37F0C7AB5B9AB2D1AB1AA7DB2E45A6C4C7B2A", "0"},
		{"EVALSHA_RO", "none", "0"}, {"evalsha", "7f923f79fe76194c868d7e1d0820de36700eb649", "0"}, {"GET", "k"}, {"get"}, {"none"},
	} {
		tw.do(args...)
	}
	tw.compareContent()
}

// clock is a simulation's.
type clock struct{ now time.Time }

func newClock() *clock                    { return &clock{time.UnixMilli(1_800_000_000_000)} }
func (c *clock) Now() time.Time           { return c.now }
func (c *clock) advance(d time.Duration)  { c.now = c.now.Add(d) }
func (c *clock) server() *simredis.Server { return simredis.New(c.Now, simredis.NewInterpreter()) }

func want(t *testing.T, s *simredis.Server, reply any, args ...string) {
	t.Helper()
	if got, err := s.Do(args...); err != nil && !reflect.DeepEqual(err, reply) || err == nil && !reflect.DeepEqual(got, reply) {
		t.Fatalf("%q: got %#v, %v, want %#v", args, got, err, reply)
	}
}

func TestKeysExpireByTheClock(t *testing.T) {
	c := newClock()
	s := c.server()
	want(t, s, simredis.Status("OK"), "SET", "k", "v", "PX", "1000")
	want(t, s, int64(1_800_000_001_000), "PEXPIRETIME", "k")
	c.advance(time.Second)
	want(t, s, int64(0), "PTTL", "k")
	want(t, s, "v", "GET", "k")
	s.Ahead = time.Hour
	want(t, s, nil, "GET", "k")
	want(t, s, []any{"1800003601", "0"}, "TIME")
}

// TestExpiredKeysTakeNoRoom opens buckets for longer than any of them lives.
func TestExpiredKeysTakeNoRoom(t *testing.T) {
	c := newClock()
	s := c.server()
	replica := c.server()
	replica.ReplicaOf(s)
	for i := range 100_000 {
		want(t, s, simredis.Status("OK"), "SET", strconv.Itoa(i), "v", "PX", "1000")
		c.advance(time.Millisecond)
		replica.Apply(c.now)
	}
	for name, server := range map[string]*simredis.Server{"primary": s, "replica": replica} {
		if n := simredis.Held(server); n > 5000 {
			t.Errorf("the %s holds %d keys", name, n)
		}
	}
}

// TestReplicaHasTheEffectsOfScripts: what was random or read from a clock is the same, and
// what is not applied yet is not seen.
func TestReplicaHasTheEffectsOfScripts(t *testing.T) {
	c := newClock()
	primary, replica := c.server(), c.server()
	want(t, primary, simredis.Status("OK"), "SET", "before", "v")
	replica.ReplicaOf(primary)
	replica.Ahead = time.Minute
	script := "redis.call('HSET', KEYS[1], 'r', redis.call('TIME')[1]) redis.call('PEXPIRE', KEYS[1], 90000) redis.call('ZADD', KEYS[2], 7, 'm')"
	first := c.now
	if _, err := primary.Eval(script, []string{"h", "z"}, nil); err != nil {
		t.Fatal(err)
	}
	c.advance(time.Second)
	want(t, primary, int64(1), "HINCRBY", "h", "c", "1")
	want(t, replica, "v", "GET", "before")
	want(t, replica, []any{}, "HGETALL", "h")
	replica.Apply(first.Add(-1))
	want(t, replica, []any{}, "HGETALL", "h")
	replica.Apply(first)
	want(t, replica, []any{"r", "1800000000"}, "HGETALL", "h")
	want(t, replica, int64(1_800_000_090_000), "PEXPIRETIME", "h")
	want(t, replica, []any{"m", "7"}, "ZRANGE", "z", "0", "-1", "WITHSCORES")
	replica.Apply(c.now)
	want(t, replica, []any{"r", "1800000000", "c", "1"}, "HGETALL", "h")

	// A replica shows no expired key, and removes none.
	c.advance(time.Minute)
	want(t, replica, []any{}, "HGETALL", "h")
	want(t, primary, int64(2), "HINCRBY", "h", "c", "1")
	replica.Apply(c.now)
	replica.Ahead = 0
	want(t, replica, []any{"r", "1800000000", "c", "2"}, "HGETALL", "h")
}

func TestPromotedReplicaLosesWhatItDidNotApply(t *testing.T) {
	c := newClock()
	primary, replica, third := c.server(), c.server(), c.server()
	replica.ReplicaOf(primary)
	third.ReplicaOf(replica)
	want(t, primary, simredis.Status("OK"), "SET", "k", "1")
	replica.Apply(c.now)
	c.advance(time.Second)
	want(t, primary, simredis.Status("OK"), "SET", "k", "2")
	want(t, replica, simredis.Error("READONLY You can't write against a read only replica."), "SET", "k", "3")
	third.Apply(c.now)
	want(t, third, "1", "GET", "k")

	replica.Promote()
	replica.Apply(c.now)
	want(t, replica, "1", "GET", "k")
	want(t, replica, simredis.Status("OK"), "SET", "k", "4")
	primary.ReplicaOf(replica)
	want(t, primary, "4", "GET", "k")
	third.Apply(c.now)
	want(t, third, "4", "GET", "k")
}

// TestReplicaIsAsInRedis compares a replica with a real one after random commands.
func TestReplicaIsAsInRedis(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	opts := *sh.Primary.Client().Options()
	opts.Protocol = 2
	tw := newTwins(t)
	tw.real = goredis.NewClient(&opts)
	defer tw.real.Close()
	replica := simredis.New(func() time.Time { return tw.now }, simredis.NewInterpreter())
	replica.ReplicaOf(tw.server)
	random := rand.New(rand.NewPCG(20261128, 0))
	for i := 0; i < 3000 && !t.Failed(); i++ {
		tw.do(wrap(random, randomCommand(random))...)
		if random.IntN(10) == 0 {
			replica.Apply(tw.now)
		}
	}
	if err := sh.WaitReplicated(t.Context()); err != nil {
		t.Fatal(err)
	}
	replica.Apply(tw.now)
	opts = *sh.Replicas[0].Client().Options()
	opts.Protocol = 2
	other := &twins{T: t, server: replica, real: goredis.NewClient(&opts), now: tw.now, slack: tw.slack}
	defer other.real.Close()
	other.compareContent()
	for _, args := range [][]string{
		{"SET", "a", "1"}, {"DEL", "none"}, {"EVAL", "return redis.call('SET', 'a', 1)", "0"}, {"EVAL", "return redis.pcall('SET', 'a', 1).err", "0"},
		{"EVAL_RO", "return redis.pcall('SET', 'a', 1).err", "0"}, {"EVAL", "return redis.call('EXISTS', 'a')", "0"},
	} {
		other.do(args...)
	}
}

// TestServersShareAnInterpreter: a script is known only where it was loaded.
func TestServersShareAnInterpreter(t *testing.T) {
	c, in := newClock(), simredis.NewInterpreter()
	servers := map[string]*simredis.Server{}
	for i := range 3 {
		servers[fmt.Sprint(i)] = simredis.New(c.Now, in)
	}
	sum, err := servers["0"].Do("SCRIPT", "LOAD", "return redis.call('HINCRBY', KEYS[1], 'c', 1)")
	if err != nil {
		t.Fatal(err)
	}
	want(t, servers["0"], int64(1), "EVALSHA", sum.(string), "1", "k")
	want(t, servers["1"], simredis.Error("NOSCRIPT No matching script. Please use EVAL."), "EVALSHA", sum.(string), "1", "k")
	for _, name := range slices.Sorted(maps.Keys(servers)) {
		if _, err := servers[name].Eval("return redis.call('HINCRBY', KEYS[1], 'c', 1)", []string{"k"}, nil); err != nil {
			t.Fatal(err)
		}
	}
	want(t, servers["0"], "2", "HGET", "k", "c")
	want(t, servers["2"], "1", "HGET", "k", "c")
}

// BenchmarkCharge charges a fixed window that is open.
func BenchmarkCharge(b *testing.B) {
	s := newClock().server()
	sum, err := s.Do("SCRIPT", "LOAD", luascripts.Single("fixed_window"))
	if err != nil {
		b.Fatal(err)
	}
	numbers := ""
	for _, n := range []float64{0, 3600e6, 1, 0, 0, 3600e6, 0, 0} {
		numbers += string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(n)))
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Do("evalsha", sum.(string), "1", "key", "charge", numbers); err != nil {
			b.Fatal(err)
		}
	}
}
