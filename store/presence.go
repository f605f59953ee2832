package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
)

// Shared is a Store that other processes use too. They tell each other of themselves, to find out where their
// configs do not agree.
type Shared interface {
	// Announce records this process at each shard, and returns the processes recorded there, this one
	// included if the call arrived. The store sets the name of the shard, the secret and the layout. text
	// returns a part of the config: each shard keeps it by its digest, to be read by processes whose part
	// differs. gone are processes of earlier answers to forget.
	Announce(ctx context.Context, p Presence, text func(Part) []byte, gone []Met) ([]Met, error)
	// Withdraw makes the shards forget p, if it has not told of itself since.
	Withdraw(ctx context.Context, p Presence)
	// Details returns the part of that digest that a process keeps at a shard, or nil if it is not there.
	// It is empty if another program wrote something else there.
	Details(ctx context.Context, shard, digest string) (Details, error)

	// KeyPrefix begins all keys, so that stores with other prefixes share no counts.
	KeyPrefix() string
	// Shards is the method of [Operable].
	Shards() []ShardFigures
	// Weights returns the weights of the shards by their names, as the option weight has them: 1 was 0.
	Weights() Details
	// Apart returns the share of clients that have no shard in common by this config and by one with other
	// weights. names says which shard here one of the other config is, or "" for none, where the names
	// differ. It is false if these are no weights.
	Apart(weights Details, names map[string]string) (share float64, ok bool)
}

// Part is a part of a config on which processes that share a shard have to agree.
type Part string

const (
	// PartZones has digests of the definitions of zones.
	PartZones Part = "zones"
	// PartShards has the weights of shards: [Shared.Weights].
	PartShards Part = "shards"
)

// Details are the content of a part, by the names of zones or shards.
type Details map[string]string

// Text returns the text of which the digest is one.
func (d Details) Text() []byte {
	text, _ := json.Marshal(d) // texts can be encoded
	return text
}

// DigestOf identifies the text of a part.
func DigestOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:12])
}

// Presence is what a process tells others of itself and of its config.
type Presence struct {
	// ID is one for each process, and Process names it to people.
	ID      string `json:"id"`
	Process string `json:"process"`
	// Shard is the name that the process has for the shard, Secret tells its key_secret apart from
	// others, and Layout is the version of the layout of its buckets.
	Shard  string `json:"shard"`
	Secret string `json:"secret,omitempty"`
	Layout string `json:"layout,omitempty"`
	// Digests are the digests of the parts of its config. The details of a part are read if its digest differs.
	Digests map[Part]string `json:"digests,omitempty"`
	// At are the shards at which its last beat arrived.
	At []string `json:"at,omitempty"`
	// Beat counts how often the process has told of itself.
	Beat int64 `json:"beat"`
}

// Met is another process, at a shard that this process has a name for.
type Met struct {
	Presence
	// Here is the name that this process has for the shard, and Full says that others may be missing there for
	// lack of room.
	Here string
	Full bool
}

// IsSame reports whether p has the same config as another one, and is of the same process and shard.
func (p *Presence) IsSame(other *Presence) bool {
	return p.ID == other.ID && p.Shard == other.Shard && p.Secret == other.Secret && p.Layout == other.Layout && maps.Equal(p.Digests, other.Digests)
}

// MaxPresent is how many processes a shard remembers: those that told of themselves last.
const MaxPresent = 200
