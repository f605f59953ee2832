package shardlimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// NamedZone is a zone in the form of the caddy-ratelimit plugin, where its
// name is the key of a map.
type NamedZone struct {
	// The requests that the zone counts. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Identifies a client: a text with placeholders. Default: all clients share one
	// bucket, as with an empty text.
	Key Texts `json:"key,omitempty"`

	// The length of the window. Required.
	Window caddy.Duration `json:"window,omitempty"`

	// The number of events that each client has in a window, from 1 to 2^52. Required.
	MaxEvents int64 `json:"max_events,omitempty"`

	// Not supported, except for 0, which means none: the error that it causes names the
	// replacement.
	MaxConcurrent int `json:"max_concurrent,omitempty"`

	// The number of bits, from 0 to 32, by whose network IPv4 addresses are counted.
	// Default: 0, for each address by itself.
	IPv4Prefix int `json:"ipv4_prefix,omitempty"`

	// The number of bits, from 0 to 128, by whose network IPv6 addresses are counted.
	// Default: 0, for each address by itself.
	IPv6Prefix int `json:"ipv6_prefix,omitempty"`
}

const (
	adviceDistributed = "distributed is not supported: write a redis store, with which all instances share their counts at once: { rate_limit { store redis { shard a { primary <address> } } } } as a global option with a line for each option"
	adviceStorage     = "storage is not supported: counts live in a store of their own; write the global option rate_limit { store redis { … } }, or nothing for a store in memory"
)

// The same, for JSON.
const (
	adviceDistributedJSON = `distributed is not supported: write a redis store into the app rate_limit, with which all instances share their counts at once: "stores": {"default": {"module": "redis", "url": "redis://<address>"}}`
	adviceStorageJSON     = `storage is not supported: counts live in a store of their own; write one into stores of the app rate_limit, or nothing for one in memory`
)

// pluginOptions are the options of the caddy-ratelimit plugin that this directive accepts,
// or answers with what to write instead.
func (h *Handler) pluginOptions() []option.Row {
	advice := func(text string) option.Field {
		return option.Field{Set: func(p *option.Parser) error { return p.Err(text) }}
	}
	return []option.Row{
		{Name: "sweep_interval", Field: option.Duration(&h.SweepInterval)},
		{Name: "disable_metrics", Field: option.Flag(&h.DisableMetrics)},
		{Name: "distributed", Field: advice(adviceDistributed)},
		{Name: "storage", Field: advice(adviceStorage)},
	}
}

// isGiven reports whether a JSON field has a value. The plugin takes null for a missing one.
func isGiven(raw json.RawMessage) bool { return raw != nil && string(raw) != "null" }

// adoptNamedZones turns RateLimits into Zones.
func (h *Handler) adoptNamedZones() error {
	if isGiven(h.DistributedRaw) {
		return errors.New(adviceDistributedJSON)
	}
	if isGiven(h.StorageRaw) {
		return errors.New(adviceStorageJSON)
	}
	for _, name := range slices.Sorted(maps.Keys(h.RateLimits)) {
		n := h.RateLimits[name]
		if n == nil {
			return fmt.Errorf("rate_limits.%s is null: define or remove it", name)
		}
		z := &Zone{
			Name:           name,
			MatcherSetsRaw: n.MatcherSetsRaw,
			Key:            n.Key,
			Window:         n.Window,
			IPv4Prefix:     n.IPv4Prefix,
			IPv6Prefix:     n.IPv6Prefix,
		}
		if strings.Join(n.Key, "") == "" {
			z.Key = Texts{"static"}
		}
		if n.MaxConcurrent != 0 {
			return fmt.Errorf("rate_limits.%s.max_concurrent %d: %s", name, n.MaxConcurrent, option.InsteadInJSON("max_concurrent"))
		}
		if err := algorithm.CheckEvents(z.algorithm(), n.MaxEvents); err != nil {
			return fmt.Errorf("rate_limits.%s.max_events is missing or %w", name, err)
		}
		z.Events = Amount(strconv.FormatInt(n.MaxEvents, 10))
		h.Zones = append(h.Zones, z)
		h.named++
	}
	return nil
}
