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
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
	"unique"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/contain"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// A server loads this when overrides are first asked for.
var scriptOverride = wire.NewScript(luascripts.Override, "")

// lastOverrides are those that were last read of a shard, by key. Reading overrides that
// have not changed costs a short reply, and a reload while the shard is down ends none.
type lastOverrides struct {
	mu   sync.Mutex
	read map[string]*readOverrides
}

// readOverrides is what was read of a shard. It never changes.
type readOverrides struct {
	version string
	// at is when they were read as a whole, by this machine's clock, and since by the monotonic one.
	at, since time.Time
	// all and damaged are by name.
	all     map[string]*store.Override
	damaged map[string]damaged
	// handedTo are the versions of the shards of the store that have them too, and isLogHandedOver is set if
	// they have the log of changes.
	handedTo        string
	isLogHandedOver bool
	// ends are what was last removed on the shards of the store when they had the versions endsAt.
	ends   ends
	endsAt string
}

// damaged says why an override cannot be read, and which version it has for the script.
type damaged struct {
	err     error
	version string
}

// isSteppedOver reports whether this machine's clock was set before now and after they were read: then
// they end at other times by the server's clock.
func (r *readOverrides) isSteppedOver(now time.Time) bool {
	step := now.UnixMicro() - r.at.UnixMicro() - time.Since(r.since).Microseconds()
	return max(step, -step) > sameClock.Microseconds()
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

// Overrides implements [store.Operable]: those of all shards; of two that contradict each other the
// later one.
func (p *Operator) Overrides(ctx context.Context) (*store.OverrideSet, error) {
	read, err := p.readAll(ctx)
	p.overrides.mu.Lock()
	defer p.overrides.mu.Unlock()
	if !maps.Equal(read, p.overrides.of) {
		p.overrides.of, p.overrides.set = read, p.merged(read)
	}
	return p.overrides.set, err
}

// mergedOverrides are the set that was last made, and of what.
type mergedOverrides struct {
	mu  sync.Mutex
	of  map[*Shard]*readOverrides
	set *store.OverrideSet
}

func (p *Operator) merged(read map[*Shard]*readOverrides) *store.OverrideSet {
	latest, broken := map[store.OverrideID]*store.Override{}, map[store.OverrideID]error{}
	for _, r := range read {
		for name, d := range r.damaged {
			broken[idOf(name)] = d.err
		}
		for _, o := range r.all {
			id := o.ID()
			if id.ClientKey != "" {
				id.ClientKey = p.asker.Keys.Client(id.ClientKey)
			}
			if other, ok := latest[id]; !ok || o.Since > other.Since {
				latest[id] = o
			}
		}
	}
	return store.NewOverrideSet(latest, broken)
}

// readAll reads those of all shards. Where a shard does not answer, it returns what was known.
func (p *Operator) readAll(ctx context.Context) (map[*Shard]*readOverrides, error) {
	var mu sync.Mutex
	all := map[*Shard]*readOverrides{}
	err := p.atAllShards(func(shard *Shard) error {
		read, err := p.overridesOf(ctx, shard)
		mu.Lock()
		defer mu.Unlock()
		all[shard] = read
		return err
	})
	return all, err
}

// overridesOf asks for the version first: reading overrides that have not changed costs
// no script, and needs no right of its own.
func (p *Operator) overridesOf(ctx context.Context, shard *Shard) (*readOverrides, error) {
	last, key := &shard.overrides, p.asker.Keys.Overrides()+" "+p.asker.Keys.SecretID()
	last.mu.Lock()
	known := last.read[key]
	last.mu.Unlock()
	if known == nil {
		known = &readOverrides{}
	}
	// While a shard is down, what was known stays: that ends no block.
	var read *readOverrides
	err := contain.Run(func() (err error) {
		read, err = p.refresh(ctx, shard, known)
		return err
	})
	if err != nil {
		return known, err
	}
	if isGivenUp := !slices.ContainsFunc(p.members, func(m Member) bool { return m.Shard == shard }); isGivenUp && read.handedTo != p.versionsKept(key) {
		handed := *read
		err = p.handOver(ctx, shard, &handed)
		read = &handed
	}
	last.mu.Lock()
	defer last.mu.Unlock()
	if last.read == nil {
		last.read = map[string]*readOverrides{}
	}
	last.read[key] = read
	return read, err
}

// versionsKept are the versions that the shards of the store had when they were read last, under a key of
// lastOverrides.
func (p *Operator) versionsKept(key string) string {
	there := map[*Shard]*readOverrides{}
	for _, m := range p.members {
		last := &m.Shard.overrides
		last.mu.Lock()
		there[m.Shard] = last.read[key]
		last.mu.Unlock()
	}
	return p.versionsOf(there)
}

// versionsOf are the versions of what was read of the shards of the store.
func (p *Operator) versionsOf(there map[*Shard]*readOverrides) string {
	var all strings.Builder
	for _, m := range p.members {
		if read := there[m.Shard]; read != nil {
			all.WriteString(read.version)
		}
		all.WriteByte('\n')
	}
	return all.String()
}

// refresh returns what a shard has now: known, if that has not changed.
func (p *Operator) refresh(ctx context.Context, shard *Shard, known *readOverrides) (*readOverrides, error) {
	cmd, err := p.askOwner(ctx, shard, p.asker.Keys.Overrides(), true, func(bool) *wire.Command {
		return wire.NewCommand("hget", p.asker.Keys.Overrides(), "v")
	})
	if err != nil {
		return nil, err
	}
	version, _ := cmd.Result()
	isOld := known.isSteppedOver(p.now())
	switch {
	case version == "":
		return p.withoutVersion(ctx, shard, known)
	case version == known.version && !isOld:
		return known, nil
	}
	if known.version != "" && !isOld {
		if read, err := p.changesSince(ctx, shard, known); read != nil || err != nil {
			return read, err
		}
	}
	return p.readWhole(ctx, shard)
}

// withoutVersion returns what a shard has that shows no version. If its overrides lack one, they are read as a
// whole each time, until the next change gives them one.
func (p *Operator) withoutVersion(ctx context.Context, shard *Shard, known *readOverrides) (*readOverrides, error) {
	cmd, err := p.askOwner(ctx, shard, p.asker.Keys.Overrides(), true, func(bool) *wire.Command {
		return wire.NewCommand("exists", p.asker.Keys.Overrides())
	})
	if err != nil {
		return nil, err
	}
	switch {
	case cmd.Cmder.(*goredis.Cmd).Val() != int64(0):
		return p.readWhole(ctx, shard)
	case len(known.all)+len(known.damaged) == 0 && known.version == "":
		return known, nil
	}
	return &readOverrides{}, nil
}

// changesSince returns known with what has changed since, or nil if the shard does not know that.
func (p *Operator) changesSince(ctx context.Context, shard *Shard, known *readOverrides) (*readOverrides, error) {
	reply, err := p.runOverride(ctx, shard, "changes", known.version)
	if err != nil || reply == "LOST" {
		return nil, err
	}
	next := *known
	next.all, next.damaged, next.handedTo, next.isLogHandedOver = maps.Clone(known.all), maps.Clone(known.damaged), "", false
	if _, next.version, err = next.take(p, reply, p.now()); err != nil {
		return nil, err
	}
	return &next, nil
}

// readWhole reads all overrides of a shard, in parts that cost it little, and then what has changed
// meanwhile.
func (p *Operator) readWhole(ctx context.Context, shard *Shard) (*readOverrides, error) {
	read := &readOverrides{at: p.now(), since: time.Now(), all: map[string]*store.Override{}, damaged: map[string]damaged{}}
	var versions [2]string
	for cursor := "0"; ; {
		reply, err := p.runOverride(ctx, shard, "page", cursor)
		if err != nil {
			return nil, err
		}
		isFirst := cursor == "0"
		if cursor, versions[1], err = read.take(p, reply, p.now()); err != nil {
			return nil, err
		}
		if isFirst {
			versions[0] = versions[1]
		}
		if cursor == "0" {
			break
		}
	}
	if read.version = versions[0]; versions[0] == versions[1] {
		return read, nil
	}
	if now, err := p.changesSince(ctx, shard, read); now != nil || err != nil {
		return now, err
	}
	return p.readWhole(ctx, shard)
}

// take takes in a page of overrides, or what has changed, read at now. It changes r, and returns the next cursor
// and the version.
func (r *readOverrides) take(p *Operator, reply string, now time.Time) (cursor, version string, err error) {
	frames, err := framesOf(reply)
	if err != nil || len(frames) == 0 {
		return "", "", cmp.Or(err, errFrames)
	}
	for _, f := range frames[1:] {
		// A part of the reply would keep all of it.
		name := strings.Clone(f.texts[0])
		o, version, err := p.overrideIn(f, now)
		delete(r.all, name)
		delete(r.damaged, name)
		switch {
		case err != nil:
			r.damaged[name] = damaged{err, version}
		case o != nil:
			r.all[name] = o
		}
	}
	return frames[0].word, strings.Clone(frames[0].texts[0]), nil
}

// sameClock is by how much clocks may differ that are taken for the same.
const sameClock = 5 * time.Second

// overrideIn reads an override in a frame, with its version unless it is gone. By this machine's clock it ends
// when it does by the server's.
func (p *Operator) overrideIn(f frame, now time.Time) (_ *store.Override, version string, err error) {
	name, content := f.texts[0], f.texts[1]
	switch f.word {
	case "-":
		return nil, "", nil
	case "!":
		return nil, expectNone, p.named(fmt.Errorf("%w: an override has no instant at which it ends", store.ErrDamaged), name)
	}
	left, err := strconv.ParseInt(f.word, 10, 64)
	if err != nil {
		return nil, expectAny, fmt.Errorf("%w: the override %.100q ends in %.100q ms", store.ErrDamaged, name, f.word)
	}
	version = versionOf(content)
	o, err := p.decode(content)
	if err == nil && name != nameUnder(ask.Keys{}, o.ID()) {
		err = fmt.Errorf("%w: the override %.100q has the content of another one", store.ErrDamaged, name)
	}
	if err != nil {
		return nil, version, p.named(err, name)
	}
	if o.Until != store.NoEnd {
		if shift := now.UnixMicro() + left*1000 - o.Until; max(shift, -shift) > sameClock.Microseconds() {
			o.Since, o.Until = o.Since+shift, o.Until+shift
		}
	}
	return o, version, nil
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
	o.Version = versionOf(content)
	// Many have these in common.
	o.Kind, o.Zone, o.By, o.Reason = unique.Make(o.Kind).Value(), unique.Make(o.Zone).Value(), unique.Make(o.By).Value(), unique.Make(o.Reason).Value()
	return &o.Override, nil
}

// versionOf returns the digest of a content, which the script knows too.
func versionOf(content string) string {
	sum := sha1.Sum([]byte(content)) //nolint:gosec // no secret: Redis has no other one
	return hex.EncodeToString(sum[:])
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

// atAllShards calls f for each shard of the store, and for those before a resharding, at
// the same time.
func (p *Operator) atAllShards(f func(shard *Shard) error) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	seen := map[*Shard]bool{}
	for _, m := range slices.Concat(p.members, p.previous) {
		if seen[m.Shard] {
			continue
		}
		seen[m.Shard] = true
		wg.Go(func() {
			if err := contain.Run(func() error { return f(m.Shard) }); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("shard %s: %w", m.Name, err))
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
	cmd, err := p.askOwner(ctx, shard, p.asker.Keys.Overrides(), op != opChange && op != opLog, func(isReplica bool) *wire.Command {
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
	return l.DoAll(ctx, cmd)
}
