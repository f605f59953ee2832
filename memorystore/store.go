// Package memorystore is the Caddy module rate_limit.stores.memory: the
// configuration of a [Store] in this process's memory, in JSON and as a Caddyfile.
// The buckets outlive the config in the pool of internal/stores.
package memorystore

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// Store counts in this process's memory. It needs nothing else and is not shared
// with other Caddy instances. Counts outlive a reload of the config, but not a
// restart of Caddy.
type Store struct {
	// How many buckets are kept, at less than 300 bytes each, and more for every
	// event of `sliding_log` and `concurrency`. Beyond it, those go first that
	// have spent the least share of their limit; that is logged and counted.
	// Default: 1000000.
	MaxBuckets int `json:"max_buckets,omitempty"`

	// How many new clients a second get a bucket in each zone; further ones share
	// one, as with Redis. Default: 0, any number.
	MaxNewBuckets int `json:"max_new_buckets,omitempty"`

	name   string
	logger *zap.Logger
}

func init() { caddy.RegisterModule(new(Store)) }

// CaddyModule returns the Caddy module information.
func (*Store) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "rate_limit.stores.memory",
		New: func() caddy.Module { return new(Store) },
	}
}

// Provision implements [caddy.Provisioner].
func (m *Store) Provision(ctx caddy.Context) error {
	m.logger = ctx.Logger()
	return nil
}

// Validate implements [caddy.Validator].
func (m *Store) Validate() error { return option.InJSON(option.Check(m.rows())) }

// Rows are the options of a store, for the documentation.
func Rows() []option.Row { return new(Store).rows() }

func (m *Store) rows() []option.Row {
	atLeastOne := func(name string, n *int) func() error {
		return func() error {
			if *n < 0 {
				return option.Errorf(name, "%d: it must be at least 1", *n)
			}
			return nil
		}
	}
	return []option.Row{
		{
			Name: "max_buckets", Args: "<n>", Field: option.Positive(&m.MaxBuckets), Section: "Memory", Default: "1000000",
			Doc:   "How many buckets are kept, at less than 300 bytes each, and more for every event of `sliding_log` and `concurrency`. Beyond it, those go first that have spent the least share of their limit; that is logged and counted.",
			Check: atLeastOne("max_buckets", &m.MaxBuckets),
		},
		{
			Name: "max_new_buckets", Args: "<n>", Field: option.Positive(&m.MaxNewBuckets), Section: "Memory", Default: "0, any number",
			Doc:   "How many new clients a second get a bucket in each zone; further ones share one, as with Redis.",
			Check: atLeastOne("max_new_buckets", &m.MaxNewBuckets),
		},
	}
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
//		max_buckets     <n>
//		max_new_buckets <n>
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
	return memory.New(pooled.(*memory.Buckets), stores.MemoryOptions(name, m.logger, m.MaxBuckets)), nil
}

// RunStore implements [stores.Runner].
func (*Store) RunStore(_ string, open store.Store) { open.(*memory.Store).Run() }

// CloseStore implements [stores.Module].
func (m *Store) CloseStore() { _, _ = stores.Pool.Delete(bucketsKey(m.name)) }

// NewBuckets implements [stores.NewcomerConfig].
func (m *Store) NewBuckets() int { return m.MaxNewBuckets }

// OnErrorDefault implements [stores.Module]. Memory always answers.
func (*Store) OnErrorDefault() string { return stores.OnErrorAllow }

// bucketsKey is the key in the pool of the buckets of the store with that name.
type bucketsKey string

// Interface guards.
var (
	_ stores.Module         = (*Store)(nil)
	_ stores.Runner         = (*Store)(nil)
	_ stores.NewcomerConfig = (*Store)(nil)
	_ caddy.Provisioner     = (*Store)(nil)
	_ caddy.Validator       = (*Store)(nil)
	_ caddyfile.Unmarshaler = (*Store)(nil)
)
