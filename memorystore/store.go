// Package memorystore is the Caddy module rate_limit.stores.memory: the
// configuration of a [Store] in this process's memory, in JSON and as a Caddyfile.
// The buckets outlive the config in the pool of internal/stores.
//
// It imports Caddy, internal/{option,stores} and store/memory.
package memorystore

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// Store counts in this process's memory. It needs nothing else and is not shared
// with other Caddy instances. Counts outlive a reload of the config, but not a
// restart of Caddy.
type Store struct {
	// The largest number of buckets (a zone's count for one client) that are kept,
	// at less than 300 bytes each. Beyond it buckets whose window is over are dropped
	// first; if there are none, the one of a few taken at random that has spent least.
	// Default: 1000000.
	MaxBuckets int `json:"max_buckets,omitempty"`

	name string
}

func init() { caddy.RegisterModule(new(Store)) }

// CaddyModule returns the Caddy module information.
func (*Store) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit.stores.memory",
		New: func() caddy.Module { return new(Store) },
	}
}

// Validate implements [caddy.Validator].
func (m *Store) Validate() error { return option.Check(m.rows()) }

// Rows are the options of a store, for the documentation.
func Rows() []option.Row { return new(Store).rows() }

func (m *Store) rows() []option.Row {
	return []option.Row{{
		Name: "max_buckets", Args: "<n>", Field: option.Positive(&m.MaxBuckets), Section: "Memory", Default: "1000000",
		Doc: "How many buckets are kept, at less than 300 bytes each, and more for every event of `sliding_log` and `concurrency`.",
		Check: func() error {
			if m.MaxBuckets < 0 {
				return option.Errorf("max_buckets", "%d: it must be at least 1", m.MaxBuckets)
			}
			return nil
		},
	}}
}

// UnmarshalJSON implements [json.Unmarshaler]. The errors for options that there are no
// longer say what to write instead.
func (m *Store) UnmarshalJSON(text []byte) error {
	type plain Store
	return option.Decode(text, (*plain)(m))
}

// UnmarshalCaddyfile implements [caddyfile.Unmarshaler]:
//
//	memory {
//		max_buckets <n>
//	}
func (m *Store) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	p := option.NewParser(d)
	if err := p.NoArgs(); err != nil {
		return err
	}
	return p.Table(&option.Table{Rows: m.rows()})
}

// OpenStore implements [stores.Module].
func (m *Store) OpenStore(name string) (store.Store, error) {
	m.name = name
	pooled, _ := stores.Pool.LoadOrStore(bucketsKey(name), memory.NewBuckets())
	return memory.New(pooled.(*memory.Buckets), memory.Options{MaxBuckets: m.MaxBuckets}), nil
}

// CloseStore implements [stores.Module].
func (m *Store) CloseStore() { _, _ = stores.Pool.Delete(bucketsKey(m.name)) }

// OnErrorDefault implements [stores.Module]. Memory always answers.
func (*Store) OnErrorDefault() string { return stores.OnErrorAllow }

// bucketsKey is the key in the pool of the buckets of the store with that name.
type bucketsKey string

// Interface guards.
var (
	_ stores.Module         = (*Store)(nil)
	_ caddy.Validator       = (*Store)(nil)
	_ caddyfile.Unmarshaler = (*Store)(nil)
)
