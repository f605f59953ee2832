package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/shardlimit/caddy-shardlimit/luascripts"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/redis/ask"
	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

// overrideTimeout bounds a reading of the overrides of a shard, and a change of them.
const overrideTimeout = time.Second

// A server loads this when overrides are first asked for.
var scriptOverride = wire.NewScript(luascripts.Override, "")

// lastOverrides are those that were last read of a shard, by key. Reading overrides that
// have not changed costs a short reply, and a reload while the shard is down ends none.
type lastOverrides struct {
	mu   sync.Mutex
	read map[string]readOverrides
}

type readOverrides struct {
	version string
	all     []store.Override
	// damaged names what could not be read.
	damaged error
	// isHandedOver is set if another shard has them too.
	isHandedOver bool
}

// nameOf returns the name of an override in the hash, which has the kept form of the client key.
func (p *Operator) nameOf(o store.OverrideID) string { return nameUnder(p.asker.Keys, o) }

func nameUnder(keys ask.Keys, o store.OverrideID) string {
	return string(o.Kind) + ":" + o.Zone + ":" + keys.Client(o.ClientKey)
}

// keptOverride is an override as the hash has it.
type keptOverride struct {
	store.Override
	// Secret is the ID of the key_secret of the client key, if that is an HMAC.
	Secret string `json:"secret,omitempty"`
}

// SetOverride keeps an override on a shard, and on the one before a resharding, which may
// be nil: Caddys with the config before this one read that one only.
func (p *Operator) SetOverride(ctx context.Context, o store.Override, shard, before *Shard) error {
	if len(p.asker.Keys.Secret) > 0 || !utf8.ValidString(o.ClientKey) {
		o.ClientKey = p.asker.Keys.Client(o.ClientKey)
	}
	err := p.keep(ctx, shard, "set", &o)
	if err == nil && before != nil && before != shard {
		err = p.keep(ctx, before, "set", &o)
	}
	if err != nil {
		return err
	}
	// Another shard may have owned the client. What cannot be removed there is older.
	name := p.nameOf(o.ID())
	_ = p.atAllShards(func(other *Shard) (err error) {
		if other != shard && other != before {
			_, err = p.override(ctx, other, "remove", name)
		}
		return err
	})
	return nil
}

// keep writes an override to a shard: op is set or keep.
func (p *Operator) keep(ctx context.Context, shard *Shard, op string, o *store.Override) error {
	kept := keptOverride{Override: *o}
	if ask.IsSecret(o.ClientKey) {
		kept.Secret = p.asker.Keys.SecretID()
	}
	content, err := json.Marshal(kept)
	if err != nil {
		return fmt.Errorf("encode an override: %w", err)
	}
	// The server's clock decides when it ends.
	lasts := (o.Until - p.now().UnixMicro() + 999) / 1000
	reply, err := p.override(ctx, shard, op, p.nameOf(o.ID()), wire.AppendPacked(nil, lasts, store.MaxOverrides), content)
	if err == nil && reply != "SET" {
		err = fmt.Errorf("there are %d overrides on this shard, which is the most: remove some", store.MaxOverrides)
	}
	return err
}

// RemoveOverride removes an override, and reports whether there was one. It asks all shards, because the shard of a kept
// key is not known.
func (p *Operator) RemoveOverride(ctx context.Context, kind store.OverrideKind, zone, clientKey string) (bool, error) {
	id := store.OverrideID{Kind: kind, Zone: zone, ClientKey: clientKey}
	names := []string{p.nameOf(id)}
	if len(p.asker.Keys.Secret) > 0 && !ask.IsSecret(clientKey) {
		// It may have been written before there was a key_secret.
		names = append(names, nameUnder(ask.Keys{}, id))
	}
	var removed atomic.Bool
	err := p.atAllShards(func(shard *Shard) error {
		for _, name := range names {
			reply, err := p.override(ctx, shard, "remove", name)
			if err != nil {
				return err
			}
			if reply == "REMOVED" {
				removed.Store(true)
			}
		}
		return nil
	})
	return removed.Load(), err
}

// Overrides returns those of all shards; of two that contradict each other the later one.
func (p *Operator) Overrides(ctx context.Context) ([]store.Override, error) {
	var mu sync.Mutex
	latest := map[string]store.Override{}
	err := p.atAllShards(func(shard *Shard) error {
		some, err := p.overridesOf(ctx, shard)
		mu.Lock()
		defer mu.Unlock()
		for _, o := range some {
			name := p.nameOf(o.ID())
			if other, ok := latest[name]; !ok || o.Since > other.Since {
				latest[name] = o
			}
		}
		return err
	})
	return slices.Collect(maps.Values(latest)), err
}

// overridesOf asks for the version first: reading overrides that have not changed costs
// no script, and needs no right of its own.
func (p *Operator) overridesOf(ctx context.Context, shard *Shard) ([]store.Override, error) {
	last, key := &shard.overrides, p.asker.Keys.Overrides()+" "+p.asker.Keys.SecretID()
	last.mu.Lock()
	known := last.read[key]
	last.mu.Unlock()
	// While a shard is down, what was known stays: that ends no block.
	cmd, err := p.askOwner(ctx, shard, true, func(key string, _ bool) *wire.Command { return wire.NewCommand("hget", key, "v") })
	if err != nil {
		return known.all, err
	}
	read := known
	if version, _ := cmd.Result(); version == "" {
		read = readOverrides{}
	} else if version != known.version {
		if read, err = p.readOverrides(ctx, shard); err != nil {
			return known.all, err
		}
	}
	isRetired := !slices.ContainsFunc(p.members, func(m Member) bool { return m.Shard == shard })
	if isRetired && !read.isHandedOver {
		if err := p.handOver(ctx, shard, read.all); err != nil {
			return read.all, err
		}
		read.isHandedOver = true
	}
	last.mu.Lock()
	defer last.mu.Unlock()
	if last.read == nil {
		last.read = map[string]readOverrides{}
	}
	last.read[key] = read
	return read.all, read.damaged
}

func (p *Operator) readOverrides(ctx context.Context, shard *Shard) (read readOverrides, err error) {
	reply, err := p.override(ctx, shard, "read")
	if err != nil {
		return read, err
	}
	lines := strings.Split(reply, "\n")
	read.version = lines[0]
	var damaged []error
	for _, line := range lines[1:] {
		o, err := p.overrideIn(line, p.now())
		if err != nil {
			damaged = append(damaged, err)
			continue
		}
		read.all = append(read.all, o)
	}
	read.damaged = errors.Join(damaged...)
	return read, nil
}

// sameClock is by how much clocks may differ that are taken for the same.
const sameClock = 5 * time.Second

// overrideIn reads a line of the script. By this machine's clock the override ends when it
// does by the server's.
func (p *Operator) overrideIn(line string, now time.Time) (store.Override, error) {
	var o keptOverride
	if name, isDamaged := strings.CutPrefix(line, "!"); isDamaged {
		return o.Override, fmt.Errorf("%w: the override %.100q has no end", store.ErrDamaged, name)
	}
	lasts, content, _ := strings.Cut(line, " ")
	left, err := strconv.ParseInt(lasts, 10, 64)
	if err != nil {
		return o.Override, fmt.Errorf("%w: decode an override: %w", store.ErrDamaged, err)
	}
	if err := json.Unmarshal([]byte(content), &o); err != nil {
		return o.Override, fmt.Errorf("%w: decode the override %.100q: %w", store.ErrDamaged, content, err)
	}
	if err := o.Check(); err != nil {
		return o.Override, err
	}
	if o.Secret != "" && o.Secret != p.asker.Keys.SecretID() {
		return o.Override, fmt.Errorf("%w: the %s of %s in zone %s was written under another key_secret, so it holds for nobody", store.ErrDamaged, o.Kind, o.ClientKey, o.Zone)
	}
	if shift := now.UnixMicro() + left*1000 - o.Until; max(shift, -shift) > sameClock.Microseconds() {
		o.Since, o.Until = o.Since+shift, o.Until+shift
	}
	return o.Override, nil
}

// handOver copies overrides of a shard that the store gives up to one that it keeps. Any
// will do: all are read.
func (p *Operator) handOver(ctx context.Context, shard *Shard, all []store.Override) error {
	to := p.members[0].Shard
	for i := range all {
		if err := p.keep(ctx, to, "keep", &all[i]); err != nil {
			return err
		}
	}
	if len(all) == 0 {
		return nil
	}
	// What was ended meanwhile must not come back.
	now, err := p.readOverrides(ctx, shard)
	if err != nil {
		return err
	}
	for _, o := range all {
		if !slices.ContainsFunc(now.all, func(other store.Override) bool { return other.ID() == o.ID() }) {
			if _, err := p.override(ctx, to, "remove", p.nameOf(o.ID())); err != nil {
				return err
			}
		}
	}
	return nil
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
			if err := f(m.Shard); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("shard %s: %w", m.Name, err))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// override runs the script of overrides in a shard.
func (p *Operator) override(ctx context.Context, shard *Shard, op string, args ...any) (reply string, err error) {
	cmd, err := p.askOwner(ctx, shard, op == "read", func(key string, isReplica bool) *wire.Command {
		// Some proxies hide EVALSHA_RO, which replicas alone need.
		return wire.NewEval(scriptOverride, isReplica, []any{key}, append([]any{op}, args...)...)
	})
	if err != nil {
		return "", err
	}
	return cmd.Result()
}

// askOwner sends a command about the overrides of a shard to the primary or, to read while
// that is away, to a replica.
func (p *Operator) askOwner(ctx context.Context, shard *Shard, reads bool, about func(key string, isReplica bool) *wire.Command) (cmd *wire.Command, err error) {
	ctx, cancel := context.WithTimeout(ctx, overrideTimeout)
	defer cancel()
	shard.Await(ctx)
	key := p.asker.Keys.Overrides()
	at := shard.Owner(wire.SlotOf([]byte(key)))
	if at == nil {
		return nil, wire.NotExecuted(wire.ErrNoServers)
	}
	lanes := []*wire.Lane{at.Checks}
	if replica := at.Replica(); reads && replica != nil {
		lanes = append(lanes, replica)
	}
	for i, l := range lanes {
		cmd = about(key, i > 0)
		if err = doWithin(ctx, l, cmd, len(lanes)-i); err == nil {
			break
		}
	}
	return cmd, err
}

// doWithin runs a command in a part of the time that ctx leaves, of which there are so
// many.
func doWithin(ctx context.Context, l *wire.Lane, cmd *wire.Command, parts int) error {
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(parts))
	defer cancel()
	return l.DoAll(ctx, cmd)
}
