package redis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// overrideTimeout bounds a look at the overrides of a shard, and a change of them.
const overrideTimeout = 5 * time.Second

// overridesByShard keeps what was read of each shard, so that a look at overrides that
// have not changed costs a short reply.
type overridesByShard struct {
	mu   sync.Mutex
	read map[*Shard]readOverrides
}

type readOverrides struct {
	version string
	all     []store.Override
}

// keyOfOverrides is never the key of a bucket, because no prefix contains a #.
func (k bucketKeys) keyOfOverrides() string { return k.prefix + ":#overrides" }

// KeptKey implements [store.Overrider].
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

// SetOverride implements [store.Overrider]. It is kept on the client's shard.
func (s *Store) SetOverride(ctx context.Context, o store.Override) error {
	shard := s.opts.Members[s.sharder.owner(o.ClientKey)].Shard
	o.ClientKey = s.KeptKey(o.ClientKey)
	content, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("encode an override: %w", err)
	}
	ends := (o.Until + 999) / 1000
	reply, err := s.override(ctx, shard, "set", nameOfOverride(o.Kind, o.Zone, o.ClientKey), appendPacked(nil, ends, store.MaxOverrides), content)
	if err == nil && reply != "SET" {
		err = fmt.Errorf("there are %d overrides on this shard, which is the most: remove some", store.MaxOverrides)
	}
	return err
}

// RemoveOverride implements [store.Overrider]. It asks all shards, because a kept key does
// not tell its shard.
func (s *Store) RemoveOverride(ctx context.Context, kind store.OverrideKind, zone, clientKey string) error {
	name := nameOfOverride(kind, zone, s.KeptKey(clientKey))
	_, err := s.atAllShards(func(shard *Shard) ([]store.Override, error) {
		_, err := s.override(ctx, shard, "remove", name)
		return nil, err
	})
	return err
}

// Overrides implements [store.Overrider].
func (s *Store) Overrides(ctx context.Context) ([]store.Override, error) {
	return s.atAllShards(func(shard *Shard) ([]store.Override, error) { return s.overridesOf(ctx, shard) })
}

func (s *Store) overridesOf(ctx context.Context, shard *Shard) ([]store.Override, error) {
	s.overrides.mu.Lock()
	known := s.overrides.read[shard]
	s.overrides.mu.Unlock()
	reply, err := s.override(ctx, shard, "read", known.version)
	if err != nil {
		// What was known stays: a shard that is down ends no block.
		return known.all, err
	}
	if reply == "SAME" {
		return known.all, nil
	}
	lines := strings.Split(reply, "\n")
	read := readOverrides{version: lines[0]}
	for _, line := range lines[1:] {
		var o store.Override
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			return known.all, fmt.Errorf("decode an override: %w", err)
		}
		read.all = append(read.all, o)
	}
	s.overrides.mu.Lock()
	defer s.overrides.mu.Unlock()
	if s.overrides.read == nil {
		s.overrides.read = map[*Shard]readOverrides{}
	}
	s.overrides.read[shard] = read
	return read.all, nil
}

// atAllShards calls f for each shard of the store, and for those before a resharding, at
// the same time.
func (s *Store) atAllShards(f func(shard *Shard) ([]store.Override, error)) (all []store.Override, err error) {
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
			some, err := f(m.Shard)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, some...)
			if err != nil {
				errs = append(errs, fmt.Errorf("shard %s: %w", m.Name, err))
			}
		})
	}
	wg.Wait()
	return all, errors.Join(errs...)
}

// override runs the script of overrides in a shard: at the primary or, to read while that
// is away, at a replica.
func (s *Store) override(ctx context.Context, shard *Shard, op string, args ...any) (reply string, err error) {
	ctx, cancel := context.WithTimeout(ctx, overrideTimeout)
	defer cancel()
	shard.await(ctx)
	key := s.keys.keyOfOverrides()
	at := shard.owner(slotOf([]byte(key)))
	if at == nil {
		return "", notExecuted(errNoServers)
	}
	word, lanes := wordEvalSHA, []*lane{at.checks}
	if op == "read" {
		word = wordEvalSHARO
		if replica := at.replica(); replica != nil {
			lanes = append(lanes, replica)
		}
	}
	for _, l := range lanes {
		cmd := newScriptCall(scriptOverride, word, []any{key}, append([]any{op}, args...)...)
		if err = l.doPlain(ctx, cmd); err == nil {
			return cmd.result()
		}
	}
	return "", err
}
