package store

import "maps"

// Presence is what a process tells others that use a shard, which tell the same of themselves: so they find
// out that their configs do not agree.
type Presence struct {
	// ID is one for each process, and Process names it to people.
	ID      string `json:"id"`
	Process string `json:"process"`
	// Shard is the name that the process has for the shard, and Secret tells its key_secret apart from
	// others; the store sets both.
	Shard  string `json:"shard"`
	Secret string `json:"secret,omitempty"`
	// Zones are digests of their definitions, by name.
	Zones map[string]string `json:"zones"`
	// Beat counts how often the process has told of itself.
	Beat int64 `json:"beat"`
}

// Met is another process, at a shard that this process has a name for.
type Met struct {
	Presence
	// Here is the name that this process has for the shard.
	Here string
}

// IsSame reports whether p says the same as another one, but for the beat.
func (p *Presence) IsSame(other *Presence) bool {
	return p.ID == other.ID && p.Shard == other.Shard && p.Secret == other.Secret && maps.Equal(p.Zones, other.Zones)
}

// MaxPresent is how many processes a shard remembers: those that told of themselves last.
const MaxPresent = 200
