package shardlimit

import (
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
)

func TestDefinition(t *testing.T) {
	const second, minute = caddy.Duration(time.Second), caddy.Duration(time.Minute)
	match := caddyhttp.RawMatcherSets{caddy.ModuleMap{"method": []byte(`["GET"]`)}}
	for want, zones := range map[string][]Zone{
		"key k, events 10, window 1m0s": {
			{Key: Texts{"k"}, Events: "10", Window: minute},
			{Key: Texts{"k"}, Events: "0010", Window: minute, Algorithm: "fixed_window", Charge: "after", Cost: "01"},
			{Key: Texts{"k"}, Events: "10", Window: minute, FreeStatus: StatusList{"304"}, MaxWaitQueue: limiter.DefaultMaxWaitQueue, Batch: "off"},
			{Key: Texts{"k"}, Events: "10", Window: minute, Name: "n", MatcherSetsRaw: match},
		},
		`key a "b c", events {x} 5, window 1s, algorithm sliding_window`: {
			{Key: Texts{"a", "b c"}, Events: "{x}", EventsFallback: 5, Window: second, Algorithm: "sliding_window"},
		},
		"key k, events 10, window 1s, align, cost {x}, charge before, free_status 304 5xx": {
			{Key: Texts{"k"}, Events: "10", Window: second, Align: true, Cost: "{x}", Charge: "before", FreeStatus: StatusList{"5xx", "304", "5xx"}},
		},
		"key k, events 10, window 1s, charge before, batch 5": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "5"},
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "05"},
		},
		"key k, events 10, window 1s, charge before, batch auto": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "auto"},
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "auto", BatchShare: defaultBatchShare},
		},
		"key k, events 10, window 1s, charge before, batch auto, batch_share 20": {
			{Key: Texts{"k"}, Events: "10", Window: second, Charge: "before", Batch: "auto", BatchShare: 20},
		},
		"key k, events 10, window 1s, cost 0, free_status none": {
			{Key: Texts{"k"}, Events: "10", Window: second, Cost: "0", FreeStatus: StatusList{"none"}},
		},
		"key k, events 10, window 1s, algorithm gcra": {
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra"},
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra", Burst: 10},
		},
		"key k, events 10, window 1s, algorithm gcra, burst 11": {
			{Key: Texts{"k"}, Events: "10", Window: second, Algorithm: "gcra", Burst: 11},
		},
		"key k, events {x} 10, window 1s, algorithm gcra, burst 10": {
			{Key: Texts{"k"}, Events: "{x}", EventsFallback: 10, Window: second, Algorithm: "gcra", Burst: 10},
		},
		"key k, events 10, algorithm concurrency": {
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency"},
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency", Charge: "before", Window: caddy.Duration(defaultLease)},
		},
		"key k, events 10, window 1s, algorithm concurrency": {
			{Key: Texts{"k"}, Events: "10", Algorithm: "concurrency", Window: second},
		},
		"key k, events 10, window 1s, count_status 401 403, max_wait 1s, max_wait_queue 5, penalty 1m0s": {
			{Key: Texts{"k"}, Events: "10", Window: second, CountStatus: StatusList{"403", "401"}, MaxWait: second, MaxWaitQueue: 5, Penalty: minute},
		},
		"key k, events 10, window 1s, reserve 10, reserve 5": {
			{Key: Texts{"k"}, Events: "10", Window: second, Reserves: []*Reserve{{Percent: 10}, {Percent: 5}}},
			{Key: Texts{"k"}, Events: "10", Window: second, Reserves: []*Reserve{{Percent: 10, MatcherSetsRaw: match}, {Percent: 5}}},
		},
		"key k, events 10, window 1s, ipv4_prefix 24, ipv6_prefix 64, on_error deny": {
			{Key: Texts{"k"}, Events: "10", Window: second, IPv4Prefix: 24, IPv6Prefix: 64, OnError: "deny"},
		},
	} {
		for i := range zones {
			if got := zones[i].definition(); got != want {
				t.Errorf("definition is\n%s, want\n%s", got, want)
			}
		}
	}
}
