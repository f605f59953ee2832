package ask

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Op is what a command does with a bucket. It needs no server: Command encodes it, and
// Outcome decodes the reply.
type Op struct {
	algorithm.Operation
	// Role is that of the server that is asked.
	Role store.Role
	// ReadOnly is set if it must not write.
	ReadOnly bool
	// Now is the instant that decides, in microseconds since 1970; 0 leaves it to the
	// server's clock.
	Now int64
	// Clock, if a primary's clock decides, learns the time from the reply.
	Clock *wire.Clock
	// Latest is the latest instant at which the operation can run, or 0. A window
	// that ends later can be charged without a script.
	Latest int64
	// Exact is set for a Peek that tells another program's data from no bucket, which costs a script.
	Exact bool
	// Opens is set for a Check that may open a window without a script, at Now by Clock.
	Opens bool
}

// Reading returns the operation Peek, or a Check that opens nothing, at an instant.
func Reading(op algorithm.Operation, role store.Role, now int64) Op {
	return Op{Operation: op, Role: role, ReadOnly: true, Now: now}
}

// Inspecting returns a Peek that sees what requests run into.
func Inspecting(role store.Role, now int64) Op {
	op := Reading(algorithm.Peek, role, now)
	op.Exact = true
	return op
}

// Opening returns a Check that opens windows without a script, at an instant by the primary's
// clock.
func Opening(now int64, clock *wire.Clock) Op {
	return Op{Operation: algorithm.Check, Role: store.RolePrimary, Now: now, Clock: clock, Opens: true}
}

// reads reports whether the operation neither spends nor gives back.
func (op Op) reads() bool {
	return op.Operation == algorithm.Check || op.Operation == algorithm.Peek
}

// Command returns the command that runs op on the bucket of r. A call of a script uses the
// room of call, or its own if that is nil.
func (op Op) Command(keys Keys, r *store.Request, call *wire.ScriptCall) *wire.Command {
	l, key := layoutOf(r.Limit.Algorithm), keys.Key(r.Limit, r.ClientKey)
	if op.Latest != 0 && l.isHash && r.Until > op.Latest && r.Cost > 0 {
		return wire.NewWrite((*plainCharge)(r), key, [...]any{wordHIncrBy, wordCount, r.Cost}, [...]any{wordHMGet, wordReset, wordPenalty}, op.Now, op.Clock)
	}
	if op.Opens {
		return op.open(key, r)
	}
	// With an instant to judge by, the bucket is read, and layout.state judges it.
	// Without one, the script runs for the server's own time, and only the script knows what is held.
	switch reads := op.ReadOnly && op.Now != 0 && !op.Exact && !op.Hears(r); {
	case reads && l.isHash:
		return wire.NewRead(wordHMGet, key, wordCount, wordReset, wordPenalty)
	case reads && !l.isSet:
		return wire.NewRead(wordMGet, key)
	}
	if call == nil {
		call = new(wire.ScriptCall)
	}
	op.callScript(l, call, key, r)
	return &call.Command
}

// The words of commands that call no script, and the fields of a hash, boxed.
var (
	wordHSetNX  any = "hsetnx"
	wordPExpire any = "pexpire"
	wordNX      any = "nx"
	wordHMGet   any = "hmget"
	wordMGet    any = "mget"
	wordHIncrBy any = "hincrby"
	wordCount   any = "c"
	wordReset   any = "r"
	wordPenalty any = "p"
)

// plainCharge is a charge of a window that the caller knows to be open. It calls no script:
// it is HINCRBY with HMGET of the window. The reply shows whether the bucket is as the caller
// knows it; Post repairs one that is not.
type plainCharge store.Request

// Latest implements [wire.Write].
func (c *plainCharge) Latest() int64 { return c.Until }

// CallScript implements [wire.Write].
func (c *plainCharge) CallScript(call *wire.ScriptCall, key string, clock *wire.Clock) {
	Op{Operation: algorithm.Charge, Clock: clock}.callScript(layoutOf(c.Limit.Algorithm), call, key, (*store.Request)(c))
}

// plainOpening opens a window that ends at an instant, unless the bucket has one. It calls no script:
// it is HSETNX of the window, with PEXPIRE of a key that never expires, HLEN, which shows what is not
// ours, and HMGET. So it also
// gives a window to an orphan.
//
// It has a copy of the request: an abandoned call may become a script after its caller has gone on.
type plainOpening struct {
	r   store.Request
	end int64
}

// Latest implements [wire.Write].
func (o *plainOpening) Latest() int64 { return o.end }

// CallScript implements [wire.Write].
func (o *plainOpening) CallScript(call *wire.ScriptCall, key string, clock *wire.Clock) {
	Op{Operation: algorithm.Check, Clock: clock}.callScript(layoutOf(o.r.Limit.Algorithm), call, key, &o.r)
}

// IsForeign implements [wire.Opening]. As for the script, an orphan's count and a penalty are ours, if
// there is nothing else.
func (o *plainOpening) IsForeign(made bool, fields int64, texts []string) bool {
	count, reset, penalty := parseNumber(texts[0]), parseNumber(texts[1]), parseNumber(texts[2])
	if !made {
		return reset == unsound
	}
	own := 1 + min(max(count, 0), 1) + min(max(penalty, 0), 1)
	return fields > own
}

// CanOpen reports whether a check of r, which may take that long, can open a window without a script:
// one that is not known, as one that is over may be there for a while, that begins when it is
// opened, and that cannot be over by then: an orphan that got it would be lost.
func CanOpen(r *store.Request, takes time.Duration) bool {
	return layoutOf(r.Limit.Algorithm).isHash && r.Until == 0 && r.Ends == 0 && !r.Limit.Align && r.Limit.Calendar.Unit == "" &&
		r.Limit.Window > takes+wire.ReplyTimeout+wire.ClockPeriod
}

func (op Op) open(key string, r *store.Request) *wire.Command {
	o := &plainOpening{*r, op.Now + r.Limit.Window.Microseconds()}
	return wire.NewOpening(o, key, [...]any{wordHSetNX, wordReset, o.end}, [...]any{wordPExpire, lifetime(o.end - op.Now), wordNX},
		[...]any{wordHMGet, wordCount, wordReset, wordPenalty}, op.Now, op.Clock)
}

// lifetime is how many milliseconds a bucket lives whose content ends in so many microseconds: a
// second more, as in the scripts.
func lifetime(left int64) int64 { return (left+999)/1000 + 1001 }

func (op Op) callScript(l *layout, call *wire.ScriptCall, key string, r *store.Request) {
	word := words[op.Operation]
	if op.ReadOnly {
		word = words[algorithm.Peek]
	}
	// Some proxies hide EVALSHA_RO, which replicas alone need.
	call.Begin(l.script, word, op.ReadOnly && op.Role == store.RoleReplica, key)
	// What only ends a hold may run twice.
	call.Clock, call.Reads = op.Clock, op.reads() || op.Operation == algorithm.Refund && r.Cost == 0
	call.Add(op.Now)
	l.arguments(call, op, r)
	if op.Hears(r) {
		call.Add(int64(r.Hold))
	}
	call.Ready()
}

// words are those of the operations, boxed.
var words = [...]any{
	algorithm.Check: "check", algorithm.Charge: "charge", algorithm.Take: "take",
	algorithm.Refund: "refund", algorithm.Penalize: "penalize", algorithm.Peek: "peek",
}

const (
	// LayoutVersion is part of every key, so that programs which disagree about a bucket's
	// content do not meet.
	LayoutVersion = "3"
	// digestBytes is the length of the SHA-256 prefix that replaces a client key.
	// 192 bits keep even an attacker from finding two client keys that share a
	// bucket.
	digestBytes = 24
	// Client keys that start with one of these bytes are never stored as they are.
	digestMark = '#'
	secretMark = '$'
)

// Keys builds the Redis keys of buckets. No other code knows their form:
//
//	<prefix>:<layout version>:<zone>:<algorithm and window>:<client key>
//
// In a Redis Cluster the client key is in braces, as the hash tag: all buckets of
// a client are in one slot.
type Keys struct {
	Prefix string
	// Secret, if not empty, replaces client keys by their HMAC.
	Secret []byte
	// Tagged is set for a Redis Cluster.
	Tagged bool
}

// In returns the keys in a shard.
func (k Keys) In(shard *wire.Shard) Keys {
	k.Tagged = shard.InCluster
	return k
}

// Key returns the key of a bucket. Two buckets never share a key.
func (k Keys) Key(limit *store.Limit, clientKey string) string {
	var scratch [160]byte
	b := append(scratch[:0], k.Prefix...)
	b = append(b, ":"+LayoutVersion+":"...)
	b = append(b, limit.Zone...)
	b = append(b, ':')
	b = appendRule(b, limit)
	b = append(b, ':')
	if k.Tagged {
		b = append(b, '{')
	}
	b = k.appendClient(b, clientKey)
	if k.Tagged {
		b = append(b, '}')
	}
	return string(b)
}

// Like returns the keys of a client's buckets of the same zone and window under all
// algorithms, which other processes may have in an older or newer configuration.
func (k Keys) Like(limit *store.Limit, clientKey string) (all []string) {
	if limit.Calendar.Unit != "" {
		return []string{k.Key(limit, clientKey)}
	}
	like := *limit
	for like.Algorithm = range store.Algorithms {
		if like.Align = false; algorithm.Of(like.Algorithm).Windowed() {
			aligned := like
			aligned.Align = true
			all = append(all, k.Key(&aligned, clientKey))
		}
		all = append(all, k.Key(&like, clientKey))
	}
	return all
}

// appendRule appends the algorithm, and the window in the largest unit that holds
// it exactly.
func appendRule(b []byte, limit *store.Limit) []byte {
	b = append(b, layoutOf(limit.Algorithm).code...)
	if limit.Calendar.Unit != "" {
		return appendCalendar(b, limit.Calendar)
	}
	if limit.Align {
		b = append(b, 'a')
	}
	switch w := limit.Window; {
	case w%time.Second == 0:
		return append(strconv.AppendInt(b, int64(w/time.Second), 10), 's')
	case w%time.Millisecond == 0:
		return append(strconv.AppendInt(b, w.Milliseconds(), 10), "ms"...)
	default:
		return append(strconv.AppendInt(b, w.Microseconds(), 10), "us"...)
	}
}

// appendCalendar appends the unit of a calendar, with an s if weeks begin on Sunday,
// and the time zone.
func appendCalendar(b []byte, c store.Calendar) []byte {
	b = append(b, c.Unit...)
	if c.SundayFirst {
		b = append(b, 's')
	}
	if c.TimeZone != "" {
		b = append(append(b, '@'), c.TimeZone...)
	}
	return b
}

// appendClient appends the form in which a client key is stored.
func (k Keys) appendClient(b []byte, clientKey string) []byte {
	switch {
	case len(k.Secret) > 0:
		mac := hmac.New(sha256.New, k.Secret)
		mac.Write([]byte(clientKey))
		return appendDigest(b, secretMark, mac.Sum(nil))
	case isPlain(clientKey):
		return append(b, clientKey...)
	default:
		sum := sha256.Sum256([]byte(clientKey))
		return appendDigest(b, digestMark, sum[:])
	}
}

// isPlain reports whether a client key can be stored as it is: printable, without
// spaces, without the braces of a hash tag, and unlike a digest.
func isPlain(key string) bool {
	if len(key) == 0 || key[0] == digestMark || key[0] == secretMark {
		return false
	}
	for i := range len(key) {
		if c := key[i]; c <= ' ' || c >= 0x7f || c == '{' || c == '}' {
			return false
		}
	}
	return true
}

func appendDigest(b []byte, mark byte, sum []byte) []byte {
	return base64.RawURLEncoding.AppendEncode(append(b, mark), sum[:digestBytes])
}

// Servers returns the servers in a shard that hold a client's buckets, or nil while none
// are known.
func (k Keys) Servers(shard *wire.Shard, clientKey string) *wire.Servers {
	if !shard.InCluster {
		return shard.Owner(0)
	}
	return shard.Owner(k.slot(clientKey))
}

func (k Keys) slot(clientKey string) uint16 {
	var scratch [store.MaxClientKey]byte
	return wire.SlotOf(k.appendClient(scratch[:0], clientKey))
}

// Overrides returns the key of the overrides, with the version of their layout. It is never that of
// a bucket, because no prefix contains a #.
func (k Keys) Overrides() string { return k.Prefix + ":#overrides2" }

// OverrideMender returns the key of who mends the overrides of a shard, which is in their slot.
func (k Keys) OverrideMender() string { return k.Prefix + ":#mender{" + k.Overrides() + "}" }

// OverrideLog returns the key of the changes of overrides, which is in the slot of these.
func (k Keys) OverrideLog() string { return k.Prefix + ":#log{" + k.Overrides() + "}" }

// Held returns the key of what takes hold of a bucket, as held.lua has it.
func Held(bucket string) string { return bucket + " held" }

// Presence returns the key of the processes that use a shard.
func (k Keys) Presence() string { return k.Prefix + ":#present" }

// Details returns the key of a part of a config, of which that is the digest.
func (k Keys) Details(digest string) string { return k.Prefix + ":#config:" + digest }

// Records returns the key of the records of a shard. Programs that disagree about their content do not meet.
func (k Keys) Records() string { return k.Prefix + ":#records" + LayoutVersion }

// Record returns the form in which a record is kept, which shows whose share of the room it takes.
func (k Keys) Record(id string) string {
	share, own, is := strings.Cut(id, "\n")
	if !is {
		return k.Client(id)
	}
	return share + "\n" + k.Client(own)
}

// RecordsDue returns the key of the instants at which records are due, which is in their slot.
func (k Keys) RecordsDue() string { return k.Prefix + ":#due{" + k.Records() + "}" }

// Client returns the form in which a client key is stored. A key in that form stays: the
// limiter's client keys begin with a tag.
func (k Keys) Client(clientKey string) string {
	kept := k.appendClient(nil, clientKey)
	if clientKey != "" && (clientKey[0] == secretMark || clientKey[0] == digestMark) && len(clientKey) == len(kept) {
		return clientKey
	}
	return string(kept)
}

// IsSecret reports whether a kept client key is the HMAC of one.
func IsSecret(kept string) bool { return kept != "" && kept[0] == secretMark }

// SecretID tells secrets apart, and nothing about them; "" without one.
func (k Keys) SecretID() string {
	if len(k.Secret) == 0 {
		return ""
	}
	mac := hmac.New(sha256.New, k.Secret)
	mac.Write([]byte("the secret of a store's overrides"))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil)[:6])
}

// layout is the form in which Redis holds the buckets of an algorithm: a string of packed
// numbers, unless it says otherwise.
type layout struct {
	// code names the algorithm in keys.
	code   string
	script *wire.Script
	// isHash is set if it is a hash, with the numbers in its fields c, r, p and b. A charge of
	// an open window adds to c, and so can be plain.
	isHash bool
	// isSet is set if it is a sorted set, which only the script reads.
	isSet bool
	// arguments adds the arguments after the instant to a call of the script.
	arguments func(c *wire.ScriptCall, op Op, r *store.Request)
	// count is how many numbers there are of a bucket's content.
	count int
	// isBorn is set if replies, and what is stored as a string, have one more number: when the bucket was made,
	// or 0.
	isBorn bool
}

var layouts = [...]layout{
	store.FixedWindow:   {code: "fw", script: bundled("fixed_window"), arguments: addWindow, count: 3, isBorn: true, isHash: true},
	store.SlidingWindow: {code: "sw", script: bundled("sliding_window"), arguments: addSlidingWindow, count: 4, isBorn: true},
	store.SlidingLog:    {code: "sl", script: single("members", "sliding_log"), arguments: addMembers, count: 4, isSet: true},
	store.GCRA:          {code: "gcra", script: bundled("gcra"), arguments: addRate, count: 7},
	store.Concurrency:   {code: "cc", script: single("members", "concurrency"), arguments: addMembers, count: 1, isSet: true},
}

// Without the last row this does not compile, and without another one tests fail.
const _ = uint(len(layouts) - int(store.Algorithms))

func layoutOf(a store.Algorithm) *layout { return &layouts[a] }

// bundled returns a script of these files that is run for several buckets as well, and
// single one that is not.
func bundled(names ...string) *wire.Script {
	return wire.NewScript(luascripts.Single(names...), luascripts.Bundle(names...))
}
func single(names ...string) *wire.Script { return wire.NewScript(luascripts.Single(names...), "") }

// Scripts returns those of the algorithms, with which a server is warmed up.
func Scripts() []*wire.Script {
	all := make([]*wire.Script, len(layouts))
	for i := range layouts {
		all[i] = layouts[i].script
	}
	return all
}

func addWindow(c *wire.ScriptCall, op Op, r *store.Request) {
	window, align := r.Limit.Window.Microseconds(), oneIf(r.Limit.Align)
	if r.Limit.Calendar.Unit != "" {
		window, align = calendarWindow(op, r.Limit.Calendar)
	}
	c.Add(window)
	addCounting(c, op, r)
	c.Add(align, r.Limit.Window.Microseconds(), algorithm.LongestPenalty(r).Microseconds())
	addIdentity(c, op, r)
	c.MayGuess = c.Clock != nil && (op.Operation == algorithm.Charge || op.Operation == algorithm.Take)
}

// calendarMargin is by how much the clock that decides may be behind the caller's
// or ahead of it without a window being taken for another. Two of it are shorter than any
// day.
const calendarMargin = 10 * time.Hour

// calendarWindow returns the end of the window that is open or ended a short while ago,
// and the length of the one that follows it. The script chooses, because the clock that
// decides may be on the other side of the end.
func calendarWindow(op Op, calendar store.Calendar) (next, end int64) {
	now := op.Now
	if now <= 0 {
		now = op.Clock.Now()
	}
	end = calendar.End(now - calendarMargin.Microseconds())
	return calendar.End(end) - end, end
}

func addSlidingWindow(c *wire.ScriptCall, op Op, r *store.Request) {
	window := r.Limit.Window.Microseconds()
	c.Add(window)
	addCounting(c, op, r)
	c.Add(algorithm.WeightUnit(window), algorithm.LongestPenalty(r).Microseconds())
	addIdentity(c, op, r)
}

func addCounting(c *wire.ScriptCall, op Op, r *store.Request) {
	switch op.Operation {
	case algorithm.Take:
		c.Add(r.Cost, r.Capacity())
	case algorithm.Refund:
		c.Add(r.Cost, r.Receipt.Period)
	case algorithm.Penalize:
		c.Add(r.Until, 0)
	default:
		c.Add(r.Cost, 0)
	}
}

// addIdentity adds what says to which bucket a refund belongs, and to which window what else is late.
func addIdentity(c *wire.ScriptCall, op Op, r *store.Request) {
	if op.Operation == algorithm.Refund {
		c.Add(r.Receipt.Position)
		return
	}
	addEnds(c, r)
}

func addEnds(c *wire.ScriptCall, r *store.Request) {
	if r.Ends < 0 {
		c.AddCountdown(-r.Ends)
		return
	}
	c.Add(r.Ends)
}

func oneIf(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

func addRate(c *wire.ScriptCall, op Op, r *store.Request) {
	c.Add(r.Limit.Window.Microseconds(), r.Events)
	if op.Operation == algorithm.Penalize {
		c.Add(r.Until, 0, 0, 0, 0, 0, algorithm.LongestPenalty(r).Microseconds(), 0)
		return
	}
	micros, rest := algorithm.DrainTime(r, r.Cost)
	c.Add(r.Cost, micros, rest)
	switch op.Operation {
	case algorithm.Take:
		micros, rest = algorithm.Tolerance(r, r.Cost)
		c.Add(micros, rest, r.Capacity())
	case algorithm.Refund:
		c.Add(r.Receipt.Period, r.Receipt.Position, r.Capacity())
	default:
		micros, _ = algorithm.Tolerance(r, 0)
		c.Add(micros, 0, 0)
	}
	c.Add(algorithm.LongestPenalty(r).Microseconds())
	addEnds(c, r)
}

func addMembers(c *wire.ScriptCall, op Op, r *store.Request) {
	cost := r.Cost
	if op.Operation == algorithm.Check || op.Operation == algorithm.Peek {
		cost = r.Need()
	}
	c.Add(r.Limit.Window.Microseconds(), cost, r.Capacity())
	if !algorithm.Of(r.Limit.Algorithm).Lease {
		addEnds(c, r)
	}
	c.AddID(r.ID)
}
