package redis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// overrideTimeout bounds a look at the overrides of a shard, and a change of them.
const overrideTimeout = time.Second

// lastOverrides are those that were last read of a shard, by key. A look at overrides that
// have not changed costs a short reply, and a reload while the shard is down ends none.
type lastOverrides struct {
	mu   sync.Mutex
	read map[string]readOverrides
}

type readOverrides struct {
	version string
	all     []store.Override
	// isHandedOver is set if another shard has them too.
	isHandedOver bool
}

// keyOfOverrides is never the key of a bucket, because no prefix contains a #.
func (k bucketKeys) keyOfOverrides() string { return k.prefix + ":#overrides" }

// KeptKey implements [store.Operable].
func (s *Store) KeptKey(clientKey string) string {
	if clientKey != "" && (clientKey[0] == secretMark || clientKey[0] == digestMark) && len(clientKey) == len(s.keys.appendClient(nil, clientKey)) {
		// It is in that form already. The limiter's client keys begin with a tag.
		return clientKey
	}
	return string(s.keys.appendClient(nil, clientKey))
}

func nameOfOverride(kind store.OverrideKind, zone, keptKey string) string {
	return string(kind) + ":" + zone + ":" + keptKey
}

// SetOverride implements [store.Operable]. It is kept on the client's shard.
func (s *Store) SetOverride(ctx context.Context, o store.Override) error {
	shard := s.opts.Members[s.sharder.owner(o.ClientKey)].Shard
	var before *Shard
	if was := s.previousOwner(o.ClientKey); was != nil {
		// Caddys with the config before this one read that one only.
		before = was.Shard
	}
	if len(s.opts.KeySecret) > 0 || !utf8.ValidString(o.ClientKey) {
		o.ClientKey = s.KeptKey(o.ClientKey)
	}
	err := s.keep(ctx, shard, "set", &o)
	if err == nil && before != nil && before != shard {
		err = s.keep(ctx, before, "set", &o)
	}
	if err != nil {
		return err
	}
	// Another shard may have owned the client. What cannot be removed there is older.
	name := nameOfOverride(o.Kind, o.Zone, s.KeptKey(o.ClientKey))
	_ = s.atAllShards(func(other *Shard) (err error) {
		if other != shard && other != before {
			_, err = s.override(ctx, other, "remove", name)
		}
		return err
	})
	return nil
}

// keep writes an override to a shard: op is set or keep.
func (s *Store) keep(ctx context.Context, shard *Shard, op string, o *store.Override) error {
	content, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("encode an override: %w", err)
	}
	ends := (o.Until + 999) / 1000
	reply, err := s.override(ctx, shard, op, nameOfOverride(o.Kind, o.Zone, s.KeptKey(o.ClientKey)), appendPacked(nil, ends, store.MaxOverrides), content)
	if err == nil && reply != "SET" {
		err = fmt.Errorf("there are %d overrides on this shard, which is the most: remove some", store.MaxOverrides)
	}
	return err
}

// RemoveOverride implements [store.Operable]. It asks all shards, because the shard of a kept
// key is not known.
func (s *Store) RemoveOverride(ctx context.Context, kind store.OverrideKind, zone, clientKey string) (bool, error) {
	name := nameOfOverride(kind, zone, s.KeptKey(clientKey))
	var removed atomic.Bool
	err := s.atAllShards(func(shard *Shard) error {
		reply, err := s.override(ctx, shard, "remove", name)
		if reply == "REMOVED" {
			removed.Store(true)
		}
		return err
	})
	return removed.Load(), err
}

// Overrides implements [store.Operable].
func (s *Store) Overrides(ctx context.Context) ([]store.Override, error) {
	var mu sync.Mutex
	latest := map[string]store.Override{}
	err := s.atAllShards(func(shard *Shard) error {
		some, err := s.overridesOf(ctx, shard)
		mu.Lock()
		defer mu.Unlock()
		for _, o := range some {
			name := nameOfOverride(o.Kind, o.Zone, s.KeptKey(o.ClientKey))
			if other, ok := latest[name]; !ok || o.Since > other.Since {
				latest[name] = o
			}
		}
		return err
	})
	return slices.Collect(maps.Values(latest)), err
}

// overridesOf asks for the version first: a look at overrides that have not changed costs
// no script, and needs no right of its own.
func (s *Store) overridesOf(ctx context.Context, shard *Shard) ([]store.Override, error) {
	last, key := &shard.overrides, s.keys.keyOfOverrides()
	last.mu.Lock()
	known := last.read[key]
	last.mu.Unlock()
	// While a shard is down, what was known stays: that ends no block.
	cmd, err := s.askOwner(ctx, shard, true, func(key string) *command { return newPlain("hget", key, "v") })
	if err != nil {
		return known.all, err
	}
	read := known
	if version, _ := cmd.Cmder.(*goredis.Cmd).Val().(string); version == "" {
		read = readOverrides{}
	} else if version != known.version {
		if read, err = s.readOverrides(ctx, shard); err != nil {
			return known.all, err
		}
	}
	isRetired := !slices.ContainsFunc(s.opts.Members, func(m Member) bool { return m.Shard == shard })
	if isRetired && !read.isHandedOver {
		if err := s.handOver(ctx, shard, read.all); err != nil {
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
	return read.all, nil
}

func (s *Store) readOverrides(ctx context.Context, shard *Shard) (read readOverrides, err error) {
	reply, err := s.override(ctx, shard, "read")
	if err != nil {
		return read, err
	}
	lines := strings.Split(reply, "\n")
	read.version = lines[0]
	for _, line := range lines[1:] {
		var o store.Override
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			return read, fmt.Errorf("decode an override: %w", err)
		}
		read.all = append(read.all, o)
	}
	return read, nil
}

// handOver copies overrides of a shard that the store gives up to one that it keeps. Any
// will do: all are read.
func (s *Store) handOver(ctx context.Context, shard *Shard, all []store.Override) error {
	to := s.opts.Members[0].Shard
	for i := range all {
		if err := s.keep(ctx, to, "keep", &all[i]); err != nil {
			return err
		}
	}
	if len(all) == 0 {
		return nil
	}
	// What was ended meanwhile must not come back.
	now, err := s.readOverrides(ctx, shard)
	if err != nil {
		return err
	}
	for _, o := range all {
		if !slices.ContainsFunc(now.all, func(other store.Override) bool {
			return other.Kind == o.Kind && other.Zone == o.Zone && other.ClientKey == o.ClientKey
		}) {
			if _, err := s.override(ctx, to, "remove", nameOfOverride(o.Kind, o.Zone, s.KeptKey(o.ClientKey))); err != nil {
				return err
			}
		}
	}
	return nil
}

// atAllShards calls f for each shard of the store, and for those before a resharding, at
// the same time.
func (s *Store) atAllShards(f func(shard *Shard) error) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	seen := map[*Shard]bool{}
	for _, m := range slices.Concat(s.opts.Members, s.opts.Previous) {
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
func (s *Store) override(ctx context.Context, shard *Shard, op string, args ...any) (reply string, err error) {
	word := wordEvalSHA
	if op == "read" {
		word = wordEvalSHARO
	}
	cmd, err := s.askOwner(ctx, shard, op == "read", func(key string) *command {
		return newScriptCall(scriptOverride, word, []any{key}, append([]any{op}, args...)...)
	})
	if err != nil {
		return "", err
	}
	return cmd.result()
}

// askOwner sends a command about the overrides of a shard to the primary or, to read while
// that is away, to a replica.
func (s *Store) askOwner(ctx context.Context, shard *Shard, reads bool, about func(key string) *command) (cmd *command, err error) {
	ctx, cancel := context.WithTimeout(ctx, overrideTimeout)
	defer cancel()
	shard.await(ctx)
	key := s.keys.keyOfOverrides()
	at := shard.owner(slotOf([]byte(key)))
	if at == nil {
		return nil, notExecuted(errNoServers)
	}
	lanes := []*lane{at.checks}
	if replica := at.replica(); reads && replica != nil {
		lanes = append(lanes, replica)
	}
	for i, l := range lanes {
		cmd = about(key)
		if err = doWithin(ctx, l, cmd, len(lanes)-i); err == nil {
			break
		}
	}
	return cmd, err
}

// doWithin runs a command in a part of the time that ctx leaves, of which there are so
// many.
func doWithin(ctx context.Context, l *lane, cmd *command, parts int) error {
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(parts))
	defer cancel()
	return l.doPlain(ctx, cmd)
}
