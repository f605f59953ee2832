package operate

import (
	"cmp"
	"context"
	"crypto/sha1"
	"encoding/hex"
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

// overrideVersion is one of an override, which all shards and processes keep alike.
type overrideVersion struct {
	// number is the version; of two with the same one the higher digest counts.
	number int64
	digest uint64
	id     string
	// until is when it ends by this machine's clock, in microseconds, and keep until when it is remembered, in
	// milliseconds. No earlier version lasts longer.
	until, keep int64
	content     string
	// override is nil if it was removed, or damaged is not nil.
	override *store.Override
	damaged  error
}

// highestVersion is the highest one that is believed; sums of digests are less.
const highestVersion = 1 << 52

// headSize is the size of the numbers before a content.
const headSize = 24

// versionIn reads a value of the hash; nil if it is none of ours. now is the server's time in milliseconds, and
// here this machine's.
func (p *Operator) versionIn(name, value string, now int64, here time.Time) *overrideVersion {
	if len(value) < headSize {
		return nil
	}
	numbers, err := wire.Unpack(nil, value[:headSize])
	if err != nil || numbers[0] < 1 || numbers[0] > highestVersion || numbers[1] < 0 || numbers[1] > store.MaxInteger || numbers[2] < earliest || numbers[2] > store.MaxInteger {
		return nil
	}
	// A part of the reply would keep all of it.
	return p.newVersion(name, numbers[0], untilOf(numbers[1], now, here), here.UnixMilli()+numbers[2]-now, strings.Clone(value[headSize:]))
}

// earliest is before all instants that are believed, in milliseconds.
const earliest = 1_000_000_000_000

// untilOf returns when by this machine's clock something ends that ends at an instant by the server's.
func untilOf(till, now int64, here time.Time) int64 {
	if till >= store.NoEnd {
		return store.NoEnd
	}
	return here.UnixMicro() + (till-now)*1000
}

func (p *Operator) newVersion(name string, number, until, keep int64, content string) *overrideVersion {
	sum := sha1.Sum(slices.Concat([]byte(name+"\n"), wire.AppendPacked(nil, number), []byte(content))) //nolint:gosec // no secret: Redis has no other one
	v := &overrideVersion{number: number, id: hex.EncodeToString(sum[:]), until: until, keep: keep, content: content}
	v.digest, _ = strconv.ParseUint(v.id[:13], 16, 64)
	if content == "" {
		return v
	}
	if v.override, v.damaged = p.decode(content); v.damaged == nil && name != nameUnder(ask.Keys{}, v.override.ID()) {
		v.damaged = fmt.Errorf("%w: the override %.100q has the content of another one", store.ErrDamaged, name)
	}
	if v.damaged != nil {
		v.override, v.damaged = nil, p.named(v.damaged, name)
		return v
	}
	v.override.Version = v.id
	v.shift(0)
	return v
}

// sameClock is by how much clocks may differ that are taken for the same.
const sameClock = 5 * time.Second

// shift moves the end by so many microseconds, because this machine's clock was set. It changes v.
func (v *overrideVersion) shift(by int64) {
	v.keep += by / 1000
	if v.until != store.NoEnd {
		v.until += by
	}
	if v.override == nil {
		return
	}
	o := v.override
	if by := v.until - o.Until; max(by, -by) > sameClock.Microseconds() {
		if v.until != store.NoEnd && o.Until != store.NoEnd {
			o.Since += by
		}
		o.Until = v.until
	}
}

// isLater reports whether v comes after other, of which there may be none.
func (v *overrideVersion) isLater(other *overrideVersion) bool {
	return other == nil || v.number > other.number || v.number == other.number && v.digest > other.digest
}

// isLive reports whether it is in force at now, in microseconds.
func (v *overrideVersion) isLive(now int64) bool { return v != nil && v.content != "" && v.until > now }

// isKept reports whether it is remembered at an instant, in milliseconds.
func (v *overrideVersion) isKept(at int64) bool {
	return v.keep > at || v.content != "" && v.until == store.NoEnd
}

// overrideState is what a process knows of a store's overrides, from any shard and its own changes. Absence on a shard removes
// nothing from it. It never changes.
type overrideState struct {
	all map[string]*overrideVersion
	// sum is that of the digests, and log has the last changes, the first one first.
	sum uint64
	log []logged
	// at is when this was made by this machine's clock, and since by the monotonic one.
	at, since time.Time
	// seen is when a shard was in touch last, and forgets when the first version is not remembered any more, in
	// milliseconds.
	seen, forgets int64
}

// logged is a change as the sets of changes have it.
type logged struct {
	version int64
	text    string
}

func (a logged) compare(b logged) int {
	return cmp.Or(cmp.Compare(a.version, b.version), cmp.Compare(a.text, b.text))
}

// learned is what was read or made.
type learned struct {
	all  map[string]*overrideVersion
	log  []string
	seen int64
}

// with returns the state with what was learned, or s if it has that.
func (s *overrideState) with(l *learned, now time.Time) *overrideState {
	next := *s
	isCopied := false
	set := func(name string, v *overrideVersion) {
		if !isCopied {
			isCopied, next.all = true, maps.Clone(s.all)
			if next.all == nil {
				next.all = map[string]*overrideVersion{}
			}
		}
		if before := next.all[name]; before != nil {
			next.sum -= before.digest
		}
		delete(next.all, name)
		if v != nil {
			next.all[name] = v
			next.sum, next.forgets = next.sum+v.digest, min(next.forgets, v.keep)
		}
		next.sum %= highestVersion
	}
	for name, v := range l.all {
		if v.isKept(now.UnixMilli()) && v.isLater(s.all[name]) {
			set(name, v)
		}
	}
	if now.UnixMilli() >= next.forgets {
		next.forgets = math.MaxInt64
		for name, v := range next.all {
			if !v.isKept(now.UnixMilli()) {
				set(name, nil)
			} else if v.keep > now.UnixMilli() {
				next.forgets = min(next.forgets, v.keep)
			}
		}
	}
	isNew := next.note(l.log)
	if next.seen = max(s.seen, l.seen); !isCopied && !isNew && next.seen == s.seen && next.forgets == s.forgets {
		return s
	}
	return &next
}

// note adds changes to the log of s, and reports whether it lacked any. It changes s, and no log.
func (s *overrideState) note(texts []string) (isNew bool) {
	if len(texts) == 0 {
		return false
	}
	log := slices.Clone(s.log)
	for _, text := range texts {
		first, _, _ := strings.Cut(text, "\n")
		if version := believed(first); version > 0 && strings.Count(text, "\n") == linesOfChange-1 {
			log = append(log, logged{version, strings.Clone(text)})
		}
	}
	slices.SortFunc(log, logged.compare)
	log = slices.Compact(log)
	log = log[max(len(log)-store.MaxAudited, 0):]
	if isNew = !slices.Equal(log, s.log); isNew {
		s.log = slices.Clone(log)
	}
	return isNew
}

// stepped returns the state after this machine's clock was set, by which its versions end at other times.
func (s *overrideState) stepped(now time.Time) *overrideState {
	by := now.UnixMicro() - s.at.UnixMicro() - time.Since(s.since).Microseconds()
	if max(by, -by) <= sameClock.Microseconds() {
		return s
	}
	next := *s
	next.at, next.since, next.all = now, time.Now(), make(map[string]*overrideVersion, len(s.all))
	for name, v := range s.all {
		moved := *v
		if v.override != nil {
			o := *v.override
			moved.override = &o
		}
		moved.shift(by)
		next.all[name] = &moved
	}
	return &next
}

// shardOverrides is what is known of a shard's hash. It outlives configs: a reload while the shard is down ends
// no override, and one that has not changed is not read again.
type shardOverrides struct {
	// state is what the last look at the shard knew.
	state *overrideState
	// isRead is set once the hash was read, up to the change of that number.
	isRead bool
	number int64
	// unequal is how it differed from the state at the last look, if it did.
	unequal string
	// unsound are the names with a value that is none of ours.
	unsound map[string]bool
}

// overrideStates are those of stores, by key_prefix and key_secret.
type overrideStates struct {
	mu sync.Mutex
	of map[string]*shardOverrides
}

func (s *overrideStates) at(key string) *shardOverrides {
	if s.of == nil {
		s.of = map[string]*shardOverrides{}
	}
	if s.of[key] == nil {
		s.of[key] = &shardOverrides{}
	}
	return s.of[key]
}

// remember calls f with what is known of a shard, which f may change.
func (p *Operator) remember(shard *Shard, f func(s *shardOverrides)) {
	shard.overrides.mu.Lock()
	defer shard.overrides.mu.Unlock()
	f(shard.overrides.at(p.asker.Keys.Overrides() + " " + p.asker.Keys.SecretID()))
}

// operatorOverrides are those of the shards of an operator.
type operatorOverrides struct {
	mu    sync.Mutex
	state *overrideState
	// set shows the state of, and the unsound values.
	set     *store.OverrideSet
	of      *overrideState
	unsound map[string]bool
}

// learn adds to what is known, and returns it.
func (p *Operator) learn(l *learned) *overrideState {
	p.overrides.mu.Lock()
	defer p.overrides.mu.Unlock()
	now := p.now()
	state := p.overrides.state
	if state == nil {
		state = &overrideState{at: now, since: time.Now(), forgets: math.MaxInt64}
	}
	state = state.stepped(now)
	for _, shard := range p.shards() {
		p.remember(shard, func(s *shardOverrides) {
			if s.state != nil && (s.state.sum != state.sum || len(s.state.log) != len(state.log)) {
				// Another config has learned it.
				before := s.state.stepped(now)
				state = state.with(&learned{all: before.all, log: before.texts(), seen: before.seen}, now)
			}
		})
	}
	state = state.with(l, now)
	for _, shard := range p.shards() {
		p.remember(shard, func(s *shardOverrides) { s.state = state })
	}
	p.overrides.state = state
	return state
}

func (s *overrideState) texts() []string {
	texts := make([]string, len(s.log))
	for i := range s.log {
		texts[i] = s.log[i].text
	}
	return texts
}

// Overrides implements [store.Operable]: the latest versions of all shards. It writes back to a shard what that has lost.
func (p *Operator) Overrides(ctx context.Context) (*store.OverrideSet, error) {
	l, err := p.look(ctx)
	if failed := p.mend(ctx, l); errors.Is(failed, store.ErrFinal) {
		err = errors.Join(err, failed) // What may succeed, the next minute's mender tries.
	}
	return p.shown(), err
}

// shown returns the set of what is known.
func (p *Operator) shown() *store.OverrideSet {
	unsound := map[string]bool{}
	for _, shard := range p.shards() {
		p.remember(shard, func(s *shardOverrides) { maps.Copy(unsound, s.unsound) })
	}
	o := &p.overrides
	o.mu.Lock()
	defer o.mu.Unlock()
	maps.DeleteFunc(unsound, func(name string, _ bool) bool { return o.state.all[name] != nil })
	if o.set != nil && o.of == o.state && maps.Equal(o.unsound, unsound) {
		return o.set
	}
	o.of, o.unsound = o.state, unsound
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
	for name := range unsound {
		broken[idOf(name)] = p.named(fmt.Errorf("%w: an override has no version, or no instant at which it ends", store.ErrDamaged), name)
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

// named returns the error of an override with its name in the hash, which has the client key for a command that
// ends it, or with what ends it if none can.
func (p *Operator) named(err error, name string) error {
	id := idOf(name)
	isKind := slices.Contains([]store.OverrideKind{store.OverrideBlock, store.OverrideGrant, store.OverrideLimit, store.OverrideZone}, id.Kind)
	if !isKind || id.Zone == "" || (id.ClientKey == "") != (id.Kind == store.OverrideZone) {
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

// lasts returns for how long an override lasts from now on, in milliseconds; 0 without an end.
func (p *Operator) lasts(o *store.Override) int64 {
	if o.Until == store.NoEnd {
		return 0
	}
	// The server's clock decides when it ends.
	return max((o.Until-p.now().UnixMicro()+999)/1000, 1)
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

// atAllShards calls f for each shard of the store, and for those before a resharding, at
// the same time.
func (p *Operator) atAllShards(f func(shard *Shard) error) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	for _, shard := range p.shards() {
		wg.Go(func() {
			if err := contain.Run(func() error { return f(shard) }); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("shard %s: %w", p.shardName(shard), err))
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
	return nil, wire.NotExecuted(wire.ErrNoServers)
}

// doWithin runs a command in a part of the time that ctx leaves, of which there are so
// many.
func doWithin(ctx context.Context, l *wire.Lane, cmd *wire.Command, parts int) error {
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(parts))
	defer cancel()
	return l.DoAll(ctx, cmd)
}
