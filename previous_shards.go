package shardlimit

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/store/redis"
)

// previousShard is one of a store's shards before a resharding: a name and, if
// it was another one then, a weight.
type previousShard struct {
	name   string
	weight int
}

// parsePrevious reads name or name:weight. The weight is 0 if none is given.
func parsePrevious(text string) (previousShard, error) {
	name, weight, isWeighted := strings.Cut(text, ":")
	if !isWeighted {
		return previousShard{name: name}, nil
	}
	n, err := strconv.Atoi(weight)
	if err != nil || n < 1 || n > maxWeight {
		return previousShard{}, badOption("previous_shards", "%s: the weight must be from 1 to %d, as in %s:2", text, maxWeight, name)
	}
	return previousShard{name, n}, nil
}

// validatePrevious checks the shards before a resharding against those there
// are.
func (s *RedisStore) validatePrevious() error {
	owning, same := 0, 0
	for _, shard := range s.Shards {
		switch isPrevious, err := s.wasPrevious(shard); {
		case err != nil:
			return err
		case !shard.Retired:
			owning++
			if isPrevious {
				same++
			}
		case !s.names(shard.Name):
			return badOption("shard "+shard.Name, "is retired, and previous_shards does not name it: remove the shard, or name it there")
		}
	}
	seen := map[string]bool{}
	for _, text := range s.PreviousShards {
		previous, err := parsePrevious(text)
		if err != nil {
			return err
		}
		switch {
		case s.shard(previous.name) == nil:
			return badOption("previous_shards", "%s is no shard of the store: define it, with the option retired if it shall own no clients any more", previous.name)
		case seen[previous.name]:
			return badOption("previous_shards", "%s is named twice: remove one", previous.name)
		}
		seen[previous.name] = true
	}
	switch {
	case owning == 0:
		return errors.New("all its shards are retired: leave one that owns the clients")
	case len(s.PreviousShards) > 0 && same == owning && same == len(s.PreviousShards):
		return badOption("previous_shards", "has no effect, for the shards are the same: remove it")
	}
	return nil
}

// wasPrevious tells whether a shard was there before, with the same weight.
func (s *RedisStore) wasPrevious(shard *RedisShard) (bool, error) {
	for _, text := range s.PreviousShards {
		previous, err := parsePrevious(text)
		if err != nil {
			return false, err
		}
		if previous.name == shard.Name {
			return previous.weight == 0 || previous.weight == max(shard.Weight, 1), nil
		}
	}
	return false, nil
}

func (s *RedisStore) names(shard string) bool {
	return slices.ContainsFunc(s.PreviousShards, func(text string) bool {
		previous, err := parsePrevious(text)
		return err == nil && previous.name == shard
	})
}

// shard returns the shard of a name, or nil.
func (s *RedisStore) shard(name string) *RedisShard {
	if i := slices.IndexFunc(s.Shards, func(shard *RedisShard) bool { return shard.Name == name }); i >= 0 {
		return s.Shards[i]
	}
	return nil
}

// membersOf parts connections to all shards into those that own clients and
// those that did before a resharding.
func (s *RedisStore) membersOf(connections map[string]*redis.Shard) (members, former []redis.Member, err error) {
	for _, shard := range s.Shards {
		if !shard.Retired {
			members = append(members, redis.Member{Name: shard.Name, Weight: shard.Weight, Shard: connections[shard.Name]})
		}
	}
	for _, text := range s.PreviousShards {
		previous, err := parsePrevious(text)
		if err != nil {
			return nil, nil, err
		}
		shard := s.shard(previous.name)
		if shard == nil {
			return nil, nil, fmt.Errorf("previous_shards: %s is no shard of the store", previous.name)
		}
		weight := previous.weight
		if weight == 0 {
			weight = shard.Weight
		}
		former = append(former, redis.Member{Name: shard.Name, Weight: weight, Shard: connections[shard.Name]})
	}
	return members, former, nil
}
