package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
	"unique"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// A server loads this when overrides are first asked for.
var scriptOverride = wire.NewScript(luascripts.Override, "")

// overrideVersion is one of an override, which all shards and processes keep alike. It never changes.
type overrideVersion struct {
	// number is the version; of two with the same one the higher digest counts.
	number int64
	digest uint64
	id     string
	// until is when it ends by this machine's clock, in microseconds, and keep until when it is remembered. No earlier
	// version lasts longer.
	until, keep int64
	content     string
	// override is nil if it was removed, or damaged is not nil.
	override *store.Override
	damaged  error
}

const (
	// highestVersion is the highest one that is believed; sums of digests are less.
	highestVersion = 1 << 52
	// headSize is the size of the numbers before a content.
	headSize = 24
	// earliest is before all instants that are believed, in milliseconds.
	earliest = 1_000_000_000_000
	// sameClock is by how much clocks may differ that are taken for the same.
	sameClock = 5 * time.Second
	// mostAway is how long an override without an end is remembered: a day longer than a shard may be away.
	mostAway = outOfTouch + 24*time.Hour
)

// versionIn reads a value of the hash; nil if it is none of ours. now is the server's time in milliseconds, and
// here this machine's.
func (p *Operator) versionIn(name, value string, now int64, here time.Time) *overrideVersion {
	if len(value) < headSize || !isOurs(idOf(name)) {
		return nil
	}
	numbers, err := wire.Unpack(nil, value[:headSize])
	if err != nil || numbers[0] < 1 || numbers[0] > highestVersion || numbers[1] < 0 || numbers[1] > store.MaxInteger || numbers[2] < earliest || numbers[2] > store.MaxInteger {
		return nil
	}
	// A part of the reply would keep all of it.
	return p.newVersion(name, numbers[0], instantHere(numbers[1], now, here), instantHere(numbers[2], now, here), strings.Clone(value[headSize:]))
}

// instantHere returns an instant of a server, where it is now, by this machine's clock, in microseconds.
func instantHere(instant, now int64, here time.Time) int64 {
	if instant >= store.NoEnd {
		return store.NoEnd
	}
	return here.UnixMicro() + (instant-now)*1000
}

// left returns how long it is until an instant, in milliseconds.
func left(instant int64, now time.Time) int64 {
	if instant >= store.NoEnd {
		return store.NoEnd
	}
	return (instant - now.UnixMicro()) / 1000
}

func (p *Operator) newVersion(name string, number, until, keep int64, content string) *overrideVersion {
	id := versionOf(name + "\n" + string(wire.AppendPacked(nil, number)) + content)
	v := &overrideVersion{number: number, id: id, until: until, keep: keep, content: content}
	v.digest, _ = strconv.ParseUint(id[:13], 16, 64)
	if content == "" {
		return v
	}
	o, err := p.decode(content)
	if err == nil && name != nameUnder(ask.Keys{}, o.ID()) {
		err = fmt.Errorf("%w: the override %.100q has the content of another one", store.ErrDamaged, name)
	}
	if err != nil {
		v.damaged = p.named(err, name)
		return v
	}
	if by := until - o.Until; max(by, -by) > sameClock.Microseconds() {
		if until != store.NoEnd && o.Until != store.NoEnd {
			o.Since += by // by this machine's clock too
		}
		o.Until = until
	}
	o.Version = id
	v.override = o
	return v
}

// isLater reports whether v comes after other, of which there may be none.
func (v *overrideVersion) isLater(other *overrideVersion) bool {
	return other == nil || v.number > other.number || v.number == other.number && v.digest > other.digest
}

// isLive reports whether it is in force at now, in microseconds.
func (v *overrideVersion) isLive(now int64) bool { return v != nil && v.content != "" && v.until > now }

// horizon returns until when a later version has to be remembered.
func (v *overrideVersion) horizon(now time.Time) int64 {
	if v.content != "" && v.until == store.NoEnd {
		return max(v.keep, now.Add(mostAway).UnixMicro())
	}
	return v.keep
}

// isKept reports whether it is remembered at an instant.
func (v *overrideVersion) isKept(at time.Time) bool { return v.horizon(at) > at.UnixMicro() }

// over returns the version that counts, v, which was just read, or before, which may be nil. It is remembered as
// long as either has to be; an end that was read corrects the one that was known.
func (v *overrideVersion) over(before *overrideVersion, now time.Time) *overrideVersion {
	if before == nil {
		return v
	}
	latest, other, by := before, v, v.until-before.until
	if v.isLater(before) || v.id == before.id && max(by, -by) > sameClock.Microseconds() {
		latest, other = v, before
	}
	keep := other.keep
	if v.id != before.id {
		keep = other.horizon(now)
	}
	if keep <= latest.keep+nearEnd.Microseconds() {
		return latest
	}
	longer := *latest
	longer.keep = keep
	return &longer
}

// overrideState is the merged state of a store's overrides, from all shards and this process's changes. Absence on a
// shard removes nothing from it. It is immutable.
type overrideState struct {
	all map[string]*overrideVersion
	// sum is that of the digests, and log has the last changes, the first one first.
	sum uint64
	log []string
	// forgets is when the first version is not remembered any more, and ended are the last 1,000 that were so.
	forgets int64
	ended   []item
}

// learned has versions that were read or made, and their log entries.
type learned struct {
	all map[string]*overrideVersion
	log []string
}

// with returns the state merged with l, or s if nothing differs.
func (s *overrideState) with(l *learned, now time.Time) *overrideState {
	if len(l.all)+len(l.log) == 0 && now.UnixMicro() < s.forgets {
		return s
	}
	next := &overrideState{all: maps.Clone(s.all), log: logWith(s.log, l.log), ended: slices.Clone(s.ended), forgets: math.MaxInt64}
	isNew := !slices.Equal(next.log, s.log)
	for name, v := range l.all {
		before := s.all[name]
		if v = v.over(before, now); v != before && v.isKept(now) {
			isNew, next.all[name] = true, v
		}
	}
	if !isNew && now.UnixMicro() < s.forgets {
		return s
	}
	for name, v := range next.all {
		if v.isKept(now) {
			next.forgets = min(next.forgets, v.horizon(now))
		} else {
			delete(next.all, name)
			next.ended = append(next.ended, item{name: name})
		}
	}
	next.sum, next.ended = sumOf(next.all), next.ended[max(len(next.ended)-5*changesInCall, 0):]
	return next
}

func sumOf(all map[string]*overrideVersion) (sum uint64) {
	for _, v := range all {
		sum = (sum + v.digest) % highestVersion
	}
	return sum
}

// logWith returns the log, ordered by versions, with other changes.
func logWith(log, changes []string) []string {
	if len(changes) == 0 {
		return log
	}
	all := slices.DeleteFunc(slices.Concat(log, changes), func(change string) bool { return strings.Count(change, "\n") != linesOfChange-1 })
	slices.Sort(all)
	all = slices.Compact(all)
	return all[max(len(all)-store.MaxAudited, 0):]
}

// shardOverrides is the state of one shard's hash.
type shardOverrides struct {
	// number is the change up to which it was read, or 0.
	number int64
	// differed is set if it differed from the state at the last look. mended and touched are when this process
	// mended it last, and said that it was in touch.
	differed        bool
	mended, touched time.Time
	// lacks is set if the last reading lacked a known version, or had too early a horizon.
	lacks bool
	// seen is when it was in touch last, in milliseconds.
	seen int64
	// unsound are the names with a value that is none of ours.
	unsound map[string]bool
	// misread is how many looks in a row could not read it although the shard answered.
	misread int
	// excess is why the content is not read again until a time: reading it costs the server much.
	excess error
	until  time.Time
}

// Overrides are the overrides of a store in this process. They outlive configs and connections: a reload while shards
// are down or empty ends none, and does not read unchanged shards again. The zero value is ready
// for use. It is safe for concurrent use.
type Overrides struct {
	mu    sync.Mutex
	state *overrideState
	// at is when clocks were compared last by this machine's clock, and since by the monotonic one.
	at, since time.Time
	// heard is when a shard answered last, by this machine's clock.
	heard time.Time
	// of has the shards that are open. Two configs may reach the same one in two ways.
	of map[*Shard]*shardOverrides
	// set shows the state shown, and unsound values.
	set   *store.OverrideSet
	shown *overrideState
	// mending is held while shards are mended.
	mending sync.Mutex
	// followers are the operators whose configs run.
	followers map[*Operator]bool
}

// Follow notes that the config runs, until stop is called. Only then are shards mended.
func (p *Operator) Follow() (stop func()) {
	o := p.overrides
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.followers == nil {
		o.followers = map[*Operator]bool{}
	}
	o.followers[p] = true
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.followers, p)
	}
}

// standing reports whether p follows the overrides and, if not, whether others do, and have read them. Otherwise the
// config of p may be rejected: nothing of the state may get into its shards and, if others follow, nothing of its shards
// into the state.
func (o *Overrides) standing(p *Operator) (follows, areOthers bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	follows = o.followers[p]
	return follows, !follows && o.state != nil && len(o.followers) > 0
}

// answered records that a shard has answered. After 90 days without an answer the state is dropped: its overrides may
// have been ended, and the tombstones forgotten.
func (o *Overrides) answered(now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.heard.IsZero() && now.UnixMilli()-o.heard.UnixMilli() > outOfTouch.Milliseconds() {
		o.state, o.of = nil, nil
	}
	o.heard = now
}

// remember calls f with the state of a shard, which f may change.
func (p *Operator) remember(shard *Shard, f func(s *shardOverrides)) {
	p.overrides.mu.Lock()
	defer p.overrides.mu.Unlock()
	f(p.overrides.shard(shard))
}

// shard returns the state of a shard. o.mu must be held.
func (o *Overrides) shard(shard *Shard) *shardOverrides {
	if o.of[shard] == nil {
		if o.of == nil {
			o.of = map[*Shard]*shardOverrides{}
		}
		maps.DeleteFunc(o.of, func(other *Shard, _ *shardOverrides) bool { return other.IsClosed() })
		o.of[shard] = &shardOverrides{}
	}
	return o.of[shard]
}

// learn merges l into the state, and returns the state.
func (p *Operator) learn(l *learned) *overrideState {
	o, now := p.overrides, p.now()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.state == nil {
		o.state = &overrideState{all: map[string]*overrideVersion{}, forgets: math.MaxInt64}
		o.at, o.since = now, time.Now()
	}
	if by := time.Duration(now.UnixMicro()-o.at.UnixMicro())*time.Microsecond - time.Since(o.since); max(by, -by) > sameClock {
		// This machine's clock was set, or stood still: the ends are read again.
		o.at, o.since = now, time.Now()
		for _, s := range o.of {
			s.number = 0
		}
	}
	o.state = o.state.with(l, now)
	return o.state
}

// Overrides implements [store.Operable]. It returns the latest versions of all shards, and starts a mending in the
// background if p follows. While another config runs, it returns what that one has read.
func (p *Operator) Overrides(ctx context.Context) (*store.OverrideSet, error) {
	follows, areOthers := p.overrides.standing(p)
	if areOthers {
		return p.shown(), nil
	}
	l, err := p.look(ctx)
	if n := len(l.state.all); n > p.mostKept() {
		err = errors.Join(err, fmt.Errorf("%w: there are %d overrides, with those that have ended: a shard that loses them has no room for all", store.ErrFinal, n))
	}
	if follows {
		p.mend(ctx, l)
	}
	return p.shown(), err
}

// shown returns the overrides in force.
func (p *Operator) shown() *store.OverrideSet {
	o := p.overrides
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.set != nil && o.shown == o.state {
		return o.set
	}
	o.shown = o.state
	now, latest, broken := p.now().UnixMicro(), map[store.OverrideID]*store.Override{}, map[store.OverrideID]error{}
	for name, v := range o.state.all {
		switch {
		case !v.isLive(now):
		case v.damaged != nil:
			broken[idOf(name)] = v.damaged
		default:
			id := v.override.ID()
			if id.ClientKey != "" {
				id.ClientKey = p.asker.Keys.Client(id.ClientKey)
			}
			// One may have been set before there was a key_secret.
			if other := latest[id]; other == nil || v.override.Since > other.Since {
				latest[id] = v.override
			}
		}
	}
	for _, shard := range o.of {
		for name := range shard.unsound {
			if o.state.all[name] == nil {
				broken[idOf(name)] = p.named(fmt.Errorf("%w: an override is of no known kind, or has no version or end", store.ErrDamaged), name)
			}
		}
	}
	o.set = store.NewOverrideSet(latest, broken)
	return o.set
}

// nameOf returns the name of an override in the hash, which has the kept form of the client key.
func (p *Operator) nameOf(o store.OverrideID) string { return nameUnder(p.asker.Keys, o) }

func nameUnder(keys ask.Keys, o store.OverrideID) string {
	if o.ClientKey == "" {
		return string(o.Kind) + ":" + o.Zone + ":"
	}
	return string(o.Kind) + ":" + o.Zone + ":" + keys.Client(o.ClientKey)
}

// idOf returns the ID of the override that has a name.
func idOf(name string) store.OverrideID {
	kind, rest, _ := strings.Cut(name, ":")
	zone, clientKey, _ := strings.Cut(rest, ":")
	return store.OverrideID{Kind: store.OverrideKind(kind), Zone: zone, ClientKey: clientKey}
}

// keptOverride is an override as the hash has it.
type keptOverride struct {
	store.Override
	// Secret is the ID of the key_secret of the client key, if that is an HMAC.
	Secret string `json:"secret,omitempty"`
}

// isOurs reports whether an ID is of a kind that this program knows: commands can end it.
func isOurs(id store.OverrideID) bool {
	isKind := slices.Contains([]store.OverrideKind{store.OverrideBlock, store.OverrideGrant, store.OverrideLimit, store.OverrideZone}, id.Kind)
	return isKind && id.Zone != "" && (id.ClientKey == "") == (id.Kind == store.OverrideZone)
}

// named returns the error of an override with its name in the hash, which has the client key for a command that
// ends it, or with what ends it if none can.
func (p *Operator) named(err error, name string) error {
	if !isOurs(idOf(name)) {
		return fmt.Errorf("%w: end it by redis-cli HDEL %s %.100q", err, p.asker.Keys.Overrides(), name)
	}
	return fmt.Errorf("%w, under the name %.100q", err, name)
}

// decode reads the content of an override.
func (p *Operator) decode(content string) (*store.Override, error) {
	var o keptOverride
	if err := json.Unmarshal([]byte(content), &o); err != nil {
		return nil, fmt.Errorf("%w: decode the override %.100q: %w", store.ErrDamaged, content, err)
	}
	if err := o.Check(); err != nil {
		return nil, err
	}
	if o.Secret != "" && o.Secret != p.asker.Keys.SecretID() {
		return nil, fmt.Errorf("%w: the %s of %s in zone %s was written under another key_secret, so it holds for nobody", store.ErrDamaged, o.Kind, o.ClientKey, o.Zone)
	}
	// Many have these in common.
	o.Kind, o.Zone, o.By, o.Reason = unique.Make(o.Kind).Value(), unique.Make(o.Zone).Value(), unique.Make(o.By).Value(), unique.Make(o.Reason).Value()
	return &o.Override, nil
}

// encode returns the content of an override.
func (p *Operator) encode(o *store.Override) (string, error) {
	kept := keptOverride{Override: *o}
	if len(p.asker.Keys.Secret) > 0 && o.ClientKey != "" || !utf8.ValidString(o.ClientKey) {
		kept.ClientKey = p.asker.Keys.Client(o.ClientKey)
	}
	if ask.IsSecret(kept.ClientKey) {
		kept.Secret = p.asker.Keys.SecretID()
	}
	content, err := json.Marshal(kept)
	if err != nil {
		return "", fmt.Errorf("encode an override: %w", err)
	}
	return string(content), nil
}

// shards returns the shards of the store, and those before a resharding.
func (p *Operator) shards() (all []*Shard) {
	for _, m := range slices.Concat(p.members, p.previous) {
		if !slices.Contains(all, m.Shard) {
			all = append(all, m.Shard)
		}
	}
	return all
}

func (p *Operator) shardName(shard *Shard) string {
	all := slices.Concat(p.members, p.previous)
	if i := slices.IndexFunc(all, func(m Member) bool { return m.Shard == shard }); i >= 0 {
		return all[i].Name
	}
	return ""
}

// atShards calls f for each shard at the same time.
func (p *Operator) atShards(shards []*Shard, f func(shard *Shard) error) error {
	errs := make([]error, len(shards))
	var wg sync.WaitGroup
	for i, shard := range shards {
		wg.Go(func() {
			if err := contain.Run(func() error { return f(shard) }); err != nil {
				errs[i] = fmt.Errorf("shard %s: %w", p.shardName(shard), err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// frame is a part of a reply of the script: a word and two texts, which are counted because others may have
// written them, with any bytes.
type frame struct {
	word  string
	texts [2]string
}

var errFrames = fmt.Errorf("%w: the reply of the script of overrides has no such parts", wire.ErrReply)

// framesOf reads a reply of the script.
func framesOf(reply string) (all []frame, err error) {
	for reply != "" {
		var f frame
		var lengths [len(f.texts)]string
		f.word, reply, _ = strings.Cut(reply, " ")
		for i := range lengths {
			lengths[i], reply, _ = strings.Cut(reply, " ")
		}
		for i, length := range lengths {
			n, err := strconv.Atoi(length)
			if err != nil || n < 0 || n > len(reply) {
				return nil, errFrames
			}
			f.texts[i], reply = reply[:n], reply[n:]
		}
		var isWhole bool
		if reply, isWhole = strings.CutPrefix(reply, "\n"); !isWhole {
			return nil, errFrames
		}
		all = append(all, f)
	}
	return all, nil
}

// runOverride runs the script of overrides in a shard.
func (p *Operator) runOverride(ctx context.Context, shard *Shard, op string, args ...any) (reply string, err error) {
	cmd, err := p.ask(ctx, shard, p.asker.Keys.Overrides(), op == opPage || op == opChanges, func(isReplica bool) *wire.Command {
		// Some proxies hide EVALSHA_RO, which replicas alone need.
		keys := []any{p.asker.Keys.Overrides(), p.asker.Keys.OverrideLog()}
		return wire.NewEval(scriptOverride, isReplica, keys, append([]any{op}, args...)...)
	})
	if err != nil {
		return "", err
	}
	return cmd.Result()
}

// askOwner sends a command about a key of a shard that is no bucket to the primary or, to read while
// that is away, to a replica.
func (p *Operator) askOwner(ctx context.Context, shard *Shard, key string, reads bool, about func(isReplica bool) *wire.Command) (cmd *wire.Command, err error) {
	ctx, cancel := p.withinTimeout(ctx)
	defer cancel()
	at, err := ownerOf(ctx, shard, key)
	if err != nil {
		return nil, err
	}
	lanes := []*wire.Lane{at.Checks}
	if replica := at.Replica(); reads && replica != nil {
		lanes = append(lanes, replica)
	}
	for i, l := range lanes {
		cmd = about(i > 0)
		if err = doWithin(ctx, l, cmd, len(lanes)-i); err == nil {
			break
		}
	}
	return cmd, err
}

// ownerOf returns the servers that have a key of a shard that is no bucket, once they are found.
func ownerOf(ctx context.Context, shard *Shard, key string) (*wire.Servers, error) {
	shard.Await(ctx)
	if at := shard.Owner(wire.SlotOf([]byte(key))); at != nil {
		return at, nil
	}
	return nil, store.NotExecuted(wire.ErrNoServers)
}

// doWithin runs a command in a part of the time that ctx leaves, of which there are so
// many.
func doWithin(ctx context.Context, l *wire.Lane, cmd *wire.Command, parts int) error {
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(parts))
	defer cancel()
	return l.DoApart(ctx, cmd)
}
