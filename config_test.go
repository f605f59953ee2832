package shardlimit_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	shardlimit "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// configOf is a config with these handlers and, unless it is empty, this app.
func configOf(app string, handlers ...string) []byte {
	if app != "" {
		app = `"rate_limit": ` + app + `,`
	}
	return fmt.Appendf(nil, `{"apps": {%s "http": {"servers": {"test": {"listen": [":8080"], "routes": [{"handle": [%s]}]}}}}}`,
		app, strings.Join(handlers, ", "))
}

// handlerOf is a rate_limit handler with these fields.
func handlerOf(fields string) string { return `{"handler": "rate_limit", ` + fields + `}` }

// withZone is a handler with these fields and a zone.
func withZone(fields string) string {
	return handlerOf(fields + `, "zones": [{"name": "api", "key": "static", "events": 10, "window": "1m"}]`)
}

// zoneOf is a handler with a zone that has these fields, and by default others
// that are valid.
func zoneOf(fields string) string {
	for field, value := range map[string]string{"name": `"api"`, "key": `"static"`, "events": `10`, "window": `"1m"`} {
		if !strings.Contains(fields, `"`+field+`"`) {
			fields += fmt.Sprintf(`, %q: %s`, field, value)
		}
	}
	return handlerOf(`"zones": [{` + strings.TrimPrefix(fields, ", ") + `}]`)
}

// redisOf is an app with a redis store that has these fields besides a shard.
func redisOf(fields string) string {
	return `{"stores": {"default": {"module": "redis", "shards": [{"name": "a", "primary": "redis-a"}], ` + fields + `}}}`
}

// shardsOf is an app with a redis store of these shards.
func shardsOf(shards string) string {
	return `{"stores": {"default": {"module": "redis", "shards": [` + shards + `]}}}`
}

// loads fails the test unless loading a config ends with an error that
// contains want, or, if want is empty, with none.
func loads(t *testing.T, config []byte, want string) {
	t.Helper()
	err := validate(config)
	switch {
	case want == "" && err != nil:
		t.Errorf("does not load: %v", err)
	case want != "" && err == nil:
		t.Errorf("loads, want an error with %q", want)
	case want != "" && !strings.Contains(err.Error(), want):
		t.Errorf("fails with %q, want %q", err, want)
	}
}

func TestConfigOfHandlers(t *testing.T) {
	for name, test := range map[string]struct{ handler, want string }{
		"zones":                     {handler: zoneOf(``)},
		"events as a number":        {handler: zoneOf(`"events": 10`)},
		"events as a string":        {handler: zoneOf(`"events": "10"`)},
		"events as a placeholder":   {handler: zoneOf(`"events": "{http.vars.quota}", "events_fallback": 10`)},
		"events without a fallback": {zoneOf(`"events": "{http.vars.quota}"`), `zone api: events {http.vars.quota}: add the number that counts where the placeholder yields none`},
		"events and a fallback":     {zoneOf(`"events": 10, "events_fallback": 20`), `a second number goes with a placeholder only`},
		"events fraction":           {zoneOf(`"events": 1.5`), `zone api: events "1.5": it must be a whole number from 1 to 2^52`},
		"events text":               {zoneOf(`"events": "many"`), `zone api: events "many": it must be a whole number from 1 to 2^52`},
		"events exponent":           {handler: zoneOf(`"events": 1e3`)},
		"events bool":               {zoneOf(`"events": true`), `true: it must be a whole number, or a text with a placeholder`},
		"events zero":               {zoneOf(`"events": 0`), `zone api: events 0: it must be from 1 to 2^52`},
		"events negative":           {zoneOf(`"events": -1`), `zone api: events -1: it must be from 1 to 2^52`},
		"events too large":          {zoneOf(`"events": 4503599627370497`), `it must be from 1 to 2^52`},
		"events empty":              {zoneOf(`"events": ""`), `zone api: events is missing`},
		"fallback too large":        {zoneOf(`"events": "{x}", "events_fallback": 4503599627370497`), `it must be from 1 to 2^52`},

		"key as a string":     {handler: zoneOf(`"key": "{http.vars.client_ip}"`)},
		"key as a list":       {handler: zoneOf(`"key": ["{http.request.header.X-Api-Key}", "{http.vars.client_ip}"]`)},
		"key as a number":     {zoneOf(`"key": 5`), `5: it must be a text or a list of texts`},
		"key as an object":    {zoneOf(`"key": {}`), `{}: it must be a text or a list of texts`},
		"key of nothing":      {zoneOf(`"key": []`), `zone api: key is missing`},
		"key of an empty one": {zoneOf(`"key": ["a", ""]`), `zone api: key has an empty text: remove it`},
		"key empty":           {zoneOf(`"key": ""`), `zone api: key has an empty text: remove it`},

		"count_status_not numbers":      {handler: zoneOf(`"count_status_not": [304, 404]`)},
		"count_status_not mixed":        {handler: zoneOf(`"count_status_not": [304, "404", "5xx"]`)},
		"count_status all":              {handler: zoneOf(`"count_status": ["all"]`)},
		"count_status_not null":         {handler: zoneOf(`"count_status_not": null`)},
		"count_status_not fraction":     {zoneOf(`"count_status_not": [304.5]`), `zone api: count_status not "304.5": it must be a code from 200 to 599`},
		"count_status_not out of range": {zoneOf(`"count_status_not": [199]`), `zone api: count_status not "199": it must be a code from 200 to 599`},
		"count_status_not bool":         {zoneOf(`"count_status_not": [true]`), `status true: it must be a code, such as 304, or a class, such as 5xx`},
		"count_status_not no list":      {zoneOf(`"count_status_not": 304`), `304: it must be a list of statuses, such as [304]`},

		"window as nanoseconds":   {handler: zoneOf(`"window": 60000000000`)},
		"window missing":          {zoneOf(`"window": 0`), `zone api: window is missing: add one, such as window 1m`},
		"window negative":         {zoneOf(`"window": "-1m"`), `zone api: window -1m0s: it must be from 1ms to 100 years`},
		"window too long":         {zoneOf(`"window": "36501d"`), `it must be from 1ms to 100 years`},
		"window not whole":        {zoneOf(`"window": 1000001`), `zone api: window 1.000001ms: it must be whole microseconds`},
		"charge unknown":          {zoneOf(`"charge": "often"`), `zone api: charge "often": it must be after or before`},
		"on_error unknown":        {zoneOf(`"on_error": "retry"`), `zone api: on_error "retry": it must be allow, deny or local`},
		"ipv4_prefix too large":   {zoneOf(`"ipv4_prefix": 33`), `zone api: ipv4_prefix 33: it must be from 0 to 32 bits`},
		"ipv6_prefix negative":    {zoneOf(`"ipv6_prefix": -1`), `zone api: ipv6_prefix -1: it must be from 0 to 128 bits`},
		"zone without a name":     {zoneOf(`"name": ""`), `a zone has no name: give it one`},
		"zone with a bad name":    {zoneOf(`"name": "a b"`), `zone name "a b": use only letters, digits and the characters _ . -`},
		"zone null":               {handlerOf(`"zones": [null]`), `a zone is null: define or remove it`},
		"zone twice":              {handlerOf(`"zones": [{"name": "a", "key": "k", "events": 1, "window": "1s"}, {"name": "a", "key": "k", "events": 1, "window": "1s"}]`), `zone a is defined twice in one rate_limit: rename one`},
		"no zones":                {handlerOf(`"zones": []`), `rate_limit has no zone: add one`},
		"unknown matcher":         {zoneOf(`"match": [{"pathh": ["/"]}]`), `zone api: load matchers: `},
		"jitter negative":         {withZone(`"jitter": -0.1`), `jitter -0.1: it must be from 0 to 10, such as 0.2`},
		"jitter too large":        {withZone(`"jitter": 11`), `jitter 11: it must be from 0 to 10, such as 0.2`},
		"headers unknown":         {withZone(`"headers": "x"`), `headers "x": it must be github, ietf, both or none`},
		"handler's unknown field": {withZone(`"zone": []`), `unknown field "zone"`},
		"zone's unknown field":    {zoneOf(`"limit": 5`), `unknown field "limit"`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf("", test.handler), test.want) })
	}
}

func TestConfigInTheFormOfAMap(t *testing.T) {
	const zone = `{"key": "static", "window": "1m", "max_events": 10}`
	for name, test := range map[string]struct{ handler, want string }{
		"one zone":               {handler: handlerOf(`"rate_limits": {"api": ` + zone + `}`)},
		"everything":             {handler: handlerOf(`"rate_limits": {"api": {"match": [{"method": ["GET"]}], "key": "{http.request.remote.host}", "window": "5s", "max_events": 2, "ipv4_prefix": 24, "ipv6_prefix": 64}}, "jitter": 0.5, "sweep_interval": "5m", "disable_metrics": true, "log_key": true`)},
		"no key":                 {handler: handlerOf(`"rate_limits": {"api": {"window": "1m", "max_events": 10}}`)},
		"besides zones":          {handler: withZone(`"rate_limits": {"other": ` + zone + `}`)},
		"name of another zone":   {withZone(`"rate_limits": {"api": ` + zone + `}`), `zone api is defined twice in one rate_limit: rename one`},
		"null zone":              {handlerOf(`"rate_limits": {"api": null}`), `zone api is null: define or remove it`},
		"no max_events":          {handlerOf(`"rate_limits": {"api": {"key": "static", "window": "1m"}}`), `zone api: max_events is missing or 0: it must be from 1 to 2^52`},
		"negative max_events":    {handlerOf(`"rate_limits": {"api": {"key": "static", "window": "1m", "max_events": -1}}`), `zone api: events -1: it must be from 1 to 2^52`},
		"no window":              {handlerOf(`"rate_limits": {"api": {"key": "static", "max_events": 10}}`), `zone api: window is missing`},
		"bad name":               {handlerOf(`"rate_limits": {"a b": ` + zone + `}`), `zone name "a b": use only letters`},
		"empty map":              {handlerOf(`"rate_limits": {}`), `rate_limit has no zone`},
		"distributed":            {withZone(`"distributed": {"write_interval": "5s"}`), `distributed is not supported: write a redis store`},
		"storage":                {withZone(`"storage": {"module": "file_system"}`), `storage is not supported: counts live in a store of their own`},
		"sweep_interval":         {handler: withZone(`"sweep_interval": "1m"`)},
		"disable_metrics":        {handler: withZone(`"disable_metrics": true`)},
		"zone's unknown field":   {handlerOf(`"rate_limits": {"api": {"events": 10}}`), `unknown field "events"`},
		"text that is no number": {handlerOf(`"rate_limits": {"api": {"max_events": "10"}}`), `max_events`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf("", test.handler), test.want) })
	}
}

func TestConfigOfZonesWithOneName(t *testing.T) {
	zone := func(events, rest string) string {
		return handlerOf(`"zones": [{"name": "api", "key": "static", "events": ` + events + `, "window": "1m"` + rest + `}]`)
	}
	for name, test := range map[string]struct {
		handlers []string
		want     string
	}{
		"equal":                   {handlers: []string{zone(`10`, ``), zone(`10`, ``)}},
		"equal but for matchers":  {handlers: []string{zone(`10`, ``), zone(`10`, `, "match": [{"path": ["/a"]}]`)}},
		"equal by default":        {handlers: []string{zone(`10`, ``), zone(`"10"`, `, "count_status_not": [304], "charge": "after"`)}},
		"equal in another order":  {handlers: []string{zone(`10`, `, "count_status_not": [404, 304]`), zone(`10`, `, "count_status_not": [304, 404, 304]`)}},
		"equal in either form":    {handlers: []string{zone(`10`, ``), handlerOf(`"rate_limits": {"api": {"key": "static", "max_events": 10, "window": "60s"}}`)}},
		"another number":          {[]string{zone(`10`, ``), zone(`20`, ``)}, `zone api is defined twice, differently: once with key static, events 10, window 1m0s, once with key static, events 20, window 1m0s; make them equal or rename one`},
		"another fallback":        {[]string{zone(`"{x}"`, `, "events_fallback": 1`), zone(`"{x}"`, `, "events_fallback": 2`)}, `once with key static, events {x} 1, window 1m0s, once with key static, events {x} 2, window 1m0s`},
		"another status":          {[]string{zone(`10`, ``), zone(`10`, `, "count_status": ["all"]`)}, `once with key static, events 10, window 1m0s, once with key static, events 10, window 1m0s, count_status all;`},
		"another IPv4 prefix":     {[]string{zone(`10`, ``), zone(`10`, `, "ipv4_prefix": 24`)}, `window 1m0s, ipv4_prefix 24;`},
		"another IPv6 prefix":     {[]string{zone(`10`, ``), zone(`10`, `, "ipv6_prefix": 64`)}, `window 1m0s, ipv6_prefix 64;`},
		"another on_error":        {[]string{zone(`10`, ``), zone(`10`, `, "on_error": "deny"`)}, `window 1m0s, on_error deny;`},
		"another split of a key":  {[]string{handlerOf(`"zones": [{"name": "api", "key": ["{a} b"], "events": 1, "window": "1s"}]`), handlerOf(`"zones": [{"name": "api", "key": ["{a}", "b"], "events": 1, "window": "1s"}]`)}, `once with key "{a} b", events 1, window 1s, once with key {a} b, events 1, window 1s`},
		"in stores of their own":  {handlers: []string{withZone(`"store": {"module": "memory"}`), zone(`20`, ``)}},
		"in equal inline stores":  {[]string{handlerOf(`"store": {"module": "memory"}, "zones": [{"name": "api", "key": "k", "events": 1, "window": "1s"}]`), handlerOf(`"store": {"module": "memory"}, "zones": [{"name": "api", "key": "k", "events": 2, "window": "1s"}]`)}, `zone api is defined twice, differently`},
		"default store by name":   {[]string{withZone(`"store": "default"`), zone(`20`, ``)}, `zone api is defined twice, differently`},
		"another field elsewhere": {handlers: []string{withZone(`"jitter": 0.5`), withZone(`"log_key": true`)}},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf("", test.handlers...), test.want) })
	}
}

func TestConfigOfZoneOptions(t *testing.T) {
	for name, test := range map[string]struct{ zone, want string }{
		"algorithm":               {zone: `"algorithm": "sliding_log"`},
		"algorithm empty":         {zone: `"algorithm": ""`},
		"algorithm unknown":       {`"algorithm": "token_bucket"`, `zone api: algorithm "token_bucket": it must be fixed_window, sliding_window, sliding_log, gcra or concurrency`},
		"align":                   {zone: `"align": true`},
		"align false":             {zone: `"align": false, "algorithm": "gcra"`},
		"align with gcra":         {`"align": true, "algorithm": "gcra"`, `zone api: window aligned, or align in JSON, goes with algorithm fixed_window only: remove it`},
		"align as text":           {`"align": "yes"`, `align`},
		"calendar and window":     {`"calendar": "day", "window": "1d"`, `zone api: calendar day and window exclude each other: remove one`},
		"calendar unknown":        {`"calendar": "decade", "window": 0`, `zone api: calendar "decade": it must be day, week, month or year`},
		"calendar":                {zone: `"calendar": "week", "week_starts": "sunday", "time_zone": "Asia/Tokyo", "window": 0`},
		"time zone of the system": {`"calendar": "day", "time_zone": "Local", "window": 0`, `zone api: window day in "Local": it must be an IANA name, such as Europe/Berlin: there is no such time zone`},
		"burst":                   {zone: `"burst": 5, "algorithm": "gcra"`},
		"burst zero":              {`"burst": 0, "algorithm": "gcra"`, `zone api: burst 0: it must be from 1 to 2^52`},
		"burst as a placeholder":  {zone: `"burst": "{vars.b}", "burst_fallback": 5, "algorithm": "gcra"`},
		"burst without fallback":  {`"burst": "{vars.b}", "algorithm": "gcra"`, `zone api: burst {vars.b}: add the number that counts where the placeholder yields none, such as burst {vars.b} 100`},
		"burst_fallback alone":    {`"burst_fallback": 5, "algorithm": "gcra"`, `zone api: burst_fallback goes with a placeholder in burst only: remove it`},
		"burst negative":          {`"burst": -1, "algorithm": "gcra"`, `zone api: burst -1: it must be from 1 to 2^52`},
		"burst too large":         {`"burst": 4503599627370497, "algorithm": "gcra"`, `burst 4503599627370497: it must be from 1 to 2^52`},
		"burst with fixed_window": {`"burst": 5`, `zone api: burst goes with algorithm gcra only: remove it, or write algorithm gcra`},
		"burst too slow":          {`"burst": 101, "events": 1, "window": "365d", "algorithm": "gcra"`, `zone api: burst 101 would take more than 100 years to come back, at 1 in 8760h0m0s: lower it, or raise events to 2`},
		"burst of a century":      {zone: `"burst": 200, "events": 2, "window": "365d", "algorithm": "gcra"`},
		"burst at its largest":    {zone: `"burst": 4503599627370496, "events": 4503599627370496, "window": "36500d", "algorithm": "gcra"`},

		"cost as a number":            {zone: `"cost": 5`},
		"cost as a string":            {zone: `"cost": "5"`},
		"cost zero":                   {zone: `"cost": 0`},
		"cost as a placeholder":       {zone: `"cost": "{http.response.header.X-Cost}"`},
		"cost empty":                  {zone: `"cost": ""`},
		"cost negative":               {`"cost": -1`, `zone api: cost "-1": it must be a whole number from 0 to 2^52, or a placeholder`},
		"cost fraction":               {`"cost": 0.5`, `zone api: cost "0.5": it must be a whole number from 0 to 2^52, or a placeholder`},
		"cost text":                   {`"cost": "much"`, `zone api: cost "much": it must be a whole number from 0 to 2^52, or a placeholder`},
		"cost bool":                   {`"cost": true`, `true: it must be a whole number, or a text with a placeholder`},
		"cost too large":              {`"cost": 4503599627370497`, `it must be a whole number from 0 to 2^52`},
		"cost and what follows":       {`"cost": "{header.A} 5"`, `zone api: cost {header.A} 5: "5" is behind the sum; terms are added with +, and the fallback is cost_fallback`},
		"settle_buffer":               {`"cost": "{header.A}", "settle_buffer": 1024`, `unknown field "settle_buffer": remove it: bodies of any length are read`},
		"cost of nothing":             {`"cost": "{}"`, `zone api: cost {}: has a placeholder without a name, or without }`},
		"cost above events":           {`"cost": 11`, `zone api: cost 11 is more than the 10 that the zone ever admits, so no request would pass: lower it, or raise events`},
		"cost above burst":            {`"cost": 6, "burst": 5, "algorithm": "gcra"`, `cost 6 is more than the 5 that the zone ever admits, so no request would pass: lower it, or raise burst`},
		"cost below a large burst":    {zone: `"cost": 11, "burst": 20, "algorithm": "gcra"`},
		"cost and dynamic events":     {zone: `"cost": 11, "events": "{http.vars.quota}", "events_fallback": 10`},
		"charge before":               {zone: `"charge": "before"`},
		"batch as a number":           {zone: `"batch": 5, "charge": "before"`},
		"batch as a string":           {zone: `"batch": "5", "charge": "before"`},
		"batch of all events":         {zone: `"batch": 10, "charge": "before", "algorithm": "sliding_window"`},
		"batch above the fallback":    {zone: `"batch": 11, "charge": "before", "events": "{x}", "events_fallback": 10`},
		"batch at its largest":        {zone: `"batch": 9007199254740991, "charge": "before", "events": "{x}", "events_fallback": 10`},
		"batch too large":             {`"batch": 9007199254740992, "charge": "before", "events": "{x}", "events_fallback": 10`, `zone api: batch "9007199254740992": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch above events":          {`"batch": 11, "charge": "before"`, `zone api: batch 11: it must be at most events, which is 10`},
		"batch off":                   {zone: `"batch": "off"`},
		"batch off elsewhere":         {zone: `"batch": "off", "algorithm": "gcra", "charge": "after"`},
		"batch empty":                 {zone: `"batch": ""`},
		"batch auto":                  {zone: `"batch": "auto", "charge": "before"`},
		"batch text":                  {`"batch": "on", "charge": "before"`, `zone api: batch "on": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch zero":                  {`"batch": 0, "charge": "before"`, `zone api: batch "0": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch negative":              {`"batch": -1, "charge": "before"`, `zone api: batch "-1": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch fraction":              {`"batch": 1.5, "charge": "before"`, `zone api: batch "1.5": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch bool":                  {`"batch": false`, `false: it must be off, auto or a whole number`},
		"batch without charge":        {`"batch": 5`, `zone api: batch needs charge before: write it, or remove batch`},
		"batch with charge after":     {`"batch": "auto", "charge": "after"`, `zone api: batch needs charge before: write it, or remove batch`},
		"batch with gcra":             {`"batch": 5, "charge": "before", "algorithm": "gcra"`, `zone api: batch does not go with gcra, because it would defeat its smoothness: remove it, or use fixed_window or sliding_window`},
		"batch with sliding_log":      {`"batch": 5, "charge": "before", "algorithm": "sliding_log"`, `zone api: batch does not go with sliding_log, which keeps events one by one: remove it, or use fixed_window or sliding_window`},
		"batch with concurrency":      {`"batch": 5, "algorithm": "concurrency"`, `zone api: batch does not go with concurrency, which keeps events one by one: remove it, or use fixed_window or sliding_window`},
		"batch with reserves":         {`"batch": 5, "charge": "before", "reserves": [{"percent": 10, "match": [{"path": ["/a"]}]}]`, `zone api: batch does not go with reserve, because what is reserved could not be kept apart: remove one`},
		"count_status":                {zone: `"count_status": [401, "403", "5xx"]`},
		"count_status null":           {zone: `"count_status": null, "count_status_not": [304]`},
		"count_status of nothing":     {`"count_status": []`, `zone api: count_status is empty: leave it out, or name statuses`},
		"count_status none":           {`"count_status": ["none"]`, `zone api: count_status none would never charge: name statuses, such as 401 403`},
		"count_status none, others":   {`"count_status": [401, "none"]`, `zone api: count_status none would never charge`},
		"count_status out of range":   {`"count_status": [600]`, `zone api: count_status "600": it must be a code from 200 to 599 or a class from 2xx to 5xx`},
		"count and count_status_not":  {`"count_status": [401], "count_status_not": [304]`, `zone api: count_status and count_status_not exclude each other: remove one`},
		"settle":                      {`"settle": "end"`, `unknown field "settle": remove it: the end of a response is awaited where cost or a status needs it`},
		"free_status":                 {`"free_status": [304]`, `unknown field "free_status": write count_status not and the statuses, such as count_status not 304 5xx (in JSON count_status_not)`},
		"batch_share":                 {`"batch_share": 10`, `unknown field "batch_share": remove it`},
		"dry_run":                     {`"dry_run": true`, `unknown field "dry_run": write enforce 0`},
		"count_status_not all":        {`"count_status_not": ["all"]`, `zone api: count_status not all, or count_status_not in JSON, would never charge`},
		"count_status_not of nothing": {`"count_status_not": []`, `zone api: count_status not is empty: leave it out, or name statuses`},

		"max_wait":                        {zone: `"max_wait": "5s", "max_wait_queue": 10`},
		"max_wait negative":               {`"max_wait": "-5s"`, `zone api: max_wait -5s: it must be above zero, and at most 100 years`},
		"max_wait too long":               {`"max_wait": "36501d"`, `it must be above zero, and at most 100 years`},
		"max_wait_queue negative":         {`"max_wait": "5s", "max_wait_queue": -1`, `zone api: max_wait_queue -1: it must be at least 1`},
		"max_wait_queue without max_wait": {`"max_wait_queue": 10`, `zone api: max_wait_queue needs max_wait: add it, such as "5s"`},
		"penalty":                         {zone: `"penalty": "10m", "algorithm": "gcra"`},
		"penalty negative":                {`"penalty": -1`, `zone api: penalty -1ns: it must be above zero, and at most 100 years`},
		"penalty not whole":               {`"penalty": 1500`, `zone api: penalty 1.5µs: it must be whole microseconds`},
		"penalty with sliding_log":        {`"penalty": "1m", "algorithm": "sliding_log"`, `zone api: penalty does not go with sliding_log: remove it, or use another algorithm`},

		"reserves":                    {zone: `"reserves": [{"percent": 10, "match": [{"path": ["/a"]}, {"method": ["POST"]}]}, {"percent": 90, "match": [{"path": ["/b"]}]}]`},
		"reserves of nothing":         {zone: `"reserves": []`},
		"reserve null":                {`"reserves": [null]`, `zone api: reserve is null: define or remove it`},
		"reserve without percent":     {`"reserves": [{"match": [{"path": ["/a"]}]}]`, `zone api: reserve 0: it must be from 1 to 100 percent`},
		"reserve too large":           {`"reserves": [{"percent": 101, "match": [{"path": ["/a"]}]}]`, `zone api: reserve 101: it must be from 1 to 100 percent`},
		"reserve fraction":            {`"reserves": [{"percent": 2.5, "match": [{"path": ["/a"]}]}]`, `percent`},
		"reserve without match":       {`"reserves": [{"percent": 20}]`, `zone api: reserve 20 has no matchers: say for which requests it is kept`},
		"reserve of no match":         {`"reserves": [{"percent": 20, "match": []}]`, `zone api: reserve 20 has no matchers: say for which requests it is kept`},
		"reserves above 100":          {`"reserves": [{"percent": 60, "match": [{"path": ["/a"]}]}, {"percent": 41, "match": [{"path": ["/b"]}]}]`, `zone api: reserve 41 makes it 101 percent together: it must be at most 100`},
		"reserve's unknown matcher":   {`"reserves": [{"percent": 20, "match": [{"url": ["/a"]}]}]`, `zone api: reserve 20: load matchers: `},
		"reserve's unknown field":     {`"reserves": [{"percentage": 20}]`, `unknown field "percentage"`},
		"reserve by its single name":  {`"reserve": [{"percent": 20}]`, `unknown field "reserve"`},
		"sliding_window at its most":  {zone: `"events": 4294967295, "algorithm": "sliding_window"`},
		"sliding_window beyond it":    {`"events": 4294967296, "algorithm": "sliding_window"`, `zone api: events 4294967296: it must be from 1 to 2^32-1 with sliding_window`},
		"sliding_log beyond its most": {`"events": 100001, "algorithm": "sliding_log"`, `zone api: events 100001: it must be from 1 to 100000 with sliding_log`},
		"sliding_log's fallback":      {`"events": "{x}", "events_fallback": 100001, "algorithm": "sliding_log"`, `zone api: events 100001: it must be from 1 to 100000 with sliding_log`},

		"concurrency":                       {zone: `"algorithm": "concurrency", "window": 0`},
		"concurrency charges before":        {zone: `"algorithm": "concurrency", "charge": "before"`},
		"concurrency charges after":         {`"algorithm": "concurrency", "charge": "after"`, `zone api: charge after: concurrency always charges before; remove it`},
		"concurrency with a short one":      {`"algorithm": "concurrency", "window": "999ms"`, `zone api: window 999ms: with concurrency it must be from 1s to 100 years`},
		"concurrency with count_status_not": {`"algorithm": "concurrency", "count_status_not": [304]`, `zone api: count_status does not go with concurrency`},
		"concurrency with count_status":     {`"algorithm": "concurrency", "count_status": [401]`, `zone api: count_status does not go with concurrency`},
		"concurrency with max_wait":         {`"algorithm": "concurrency", "max_wait": "1s"`, `zone api: max_wait does not go with concurrency`},
		"concurrency with penalty":          {`"algorithm": "concurrency", "penalty": "1s"`, `zone api: penalty does not go with concurrency`},
		"concurrency beyond its most":       {`"algorithm": "concurrency", "events": 100001`, `zone api: events 100001: it must be from 1 to 100000 with concurrency`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf("", zoneOf(test.zone)), test.want) })
	}
}

func TestConfigOfZonesWithOneNameAndOtherOptions(t *testing.T) {
	zone := func(fields string) string {
		return handlerOf(`"zones": [{"name": "api", "key": "static", "events": 10, ` + fields + `}]`)
	}
	for name, test := range map[string]struct{ one, other, want string }{
		"equal by default":    {one: `"window": "1m"`, other: `"window": "1m", "algorithm": "fixed_window", "cost": "01", "charge": "after", "count_status": null, "reserves": []`},
		"equal burst":         {one: `"window": "1m", "algorithm": "gcra"`, other: `"window": "1m", "algorithm": "gcra", "burst": 10`},
		"equal lease":         {one: `"algorithm": "concurrency"`, other: `"algorithm": "concurrency", "window": "60s", "charge": "before"`},
		"equal reserves":      {one: `"window": "1m", "reserves": [{"percent": 5, "match": [{"path": ["/a"]}]}]`, other: `"window": "1m", "reserves": [{"percent": 5, "match": [{"path": ["/b"]}]}]`},
		"another algorithm":   {`"window": "1m"`, `"window": "1m", "algorithm": "gcra"`, `once with key static, events 10, window 1m0s, once with key static, events 10, window 1m0s, algorithm gcra;`},
		"another lease":       {`"algorithm": "concurrency"`, `"algorithm": "concurrency", "window": "2m"`, `once with key static, events 10, algorithm concurrency, once with key static, events 10, window 2m0s, algorithm concurrency;`},
		"another window":      {`"window": "1m"`, `"window": "2m"`, `once with key static, events 10, window 1m0s, once`},
		"another cost":        {`"window": "1m"`, `"window": "1m", "cost": 2`, `window 1m0s, cost 2;`},
		"another charge":      {`"window": "1m"`, `"window": "1m", "charge": "before"`, `window 1m0s, charge before;`},
		"equal batch":         {one: `"window": "1m", "charge": "before", "batch": 5`, other: `"window": "1m", "charge": "before", "batch": "05"`},
		"equal without batch": {one: `"window": "1m"`, other: `"window": "1m", "batch": "off"`},
		"another batch":       {`"window": "1m", "charge": "before"`, `"window": "1m", "charge": "before", "batch": 5`, `charge before, batch 5;`},
		"another percentage":  {`"window": "1m"`, `"window": "1m", "reserves": [{"percent": 5, "match": [{"path": ["/a"]}]}]`, `window 1m0s, reserve 5;`},
		"another wait":        {`"window": "1m"`, `"window": "1m", "max_wait": "1s"`, `window 1m0s, max_wait 1s;`},
		"another penalty":     {`"window": "1m"`, `"window": "1m", "penalty": "1s"`, `window 1m0s, penalty 1s;`},
		"another alignment":   {`"window": "1m"`, `"window": "1m", "align": true`, `window 1m0s aligned;`},
		"another counted one": {`"window": "1m"`, `"window": "1m", "count_status": [403, 401]`, `window 1m0s, count_status 401 403;`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf("", zone(test.one), zone(test.other)), test.want) })
	}
}

// TestConfigOfAPlainStore: every option of a zone goes with every store.
func TestConfigOfAPlainStore(t *testing.T) {
	const app = `{"stores": {"default": {"module": "guest", "plain": true}}}`
	loads(t, configOf(app, zoneOf(`"algorithm": "gcra"`)), "")
	loads(t, configOf(app, zoneOf(`"penalty": "1m"`)), "")
	loads(t, configOf(app, zoneOf(`"reset_status": [200]`)), "")
	if n := caddytest.Guests.Open.Load(); n != 0 {
		t.Errorf("%d stores are still open", n)
	}
}

func TestConfigOfAHandlersStore(t *testing.T) {
	const two = `{"stores": {"eu": {"module": "memory"}, "us": {"module": "memory"}}}`
	for name, test := range map[string]struct{ app, handler, want string }{
		"none":                   {handler: withZone(`"log_key": true`)},
		"null":                   {handler: withZone(`"store": null`)},
		"name":                   {app: two, handler: withZone(`"store": "us"`)},
		"default by name":        {handler: withZone(`"store": "default"`)},
		"inline memory":          {handler: withZone(`"store": {"module": "memory", "max_buckets": 10}`)},
		"inline redis":           {handler: withZone(`"store": {"module": "redis", "shards": [{"name": "a", "primary": "localhost"}]}`)},
		"inline and invalid":     {``, withZone(`"store": {"module": "redis"}`), `redis store: it has no shard: add one`},
		"inline unknown field":   {``, withZone(`"store": {"module": "memory", "max": 1}`), `unknown field "max"`},
		"inline unknown module":  {``, withZone(`"store": {"module": "postgres"}`), `rate_limit.stores.postgres`},
		"inline without module":  {``, withZone(`"store": {}`), `module`},
		"unknown name":           {two, withZone(`"store": "asia"`), `store asia is not configured: add it to the stores of the global rate_limit, or name another; there is eu, us`},
		"unknown name, no app":   {``, withZone(`"store": "asia"`), `store asia is not configured: add it to the stores of the global rate_limit, or name another; there is default`},
		"no default":             {two, withZone(`"log_key": true`), `store is missing, and no configured store is called default: name one with the option store; there is eu, us`},
		"empty name":             {``, withZone(`"store": ""`), `store "": it must be the name of a store, or an object with the field module`},
		"number":                 {``, withZone(`"store": 5`), `store 5: it must be the name of a store, or an object with the field module`},
		"list":                   {``, withZone(`"store": ["default"]`), `it must be the name of a store, or an object with the field module`},
		"app's unknown field":    {`{"store": {}}`, withZone(`"log_key": true`), `unknown field "store"`},
		"app's unknown module":   {`{"stores": {"a": {"module": "postgres"}}}`, withZone(`"store": "a"`), `rate_limit.stores.postgres`},
		"app without a store":    {app: `{}`, handler: withZone(`"log_key": true`)},
		"app with an empty list": {app: `{"stores": {}}`, handler: withZone(`"log_key": true`)},
		"guest":                  {app: `{"stores": {"default": {"module": "guest", "motto": "hi"}}}`, handler: withZone(`"log_key": true`)},
		"guest inline":           {handler: withZone(`"store": {"module": "guest"}`)},
		"guest's unknown field":  {`{"stores": {"default": {"module": "guest", "moto": "hi"}}}`, withZone(`"log_key": true`), `unknown field "moto"`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(test.app, test.handler), test.want) })
	}
}

func TestConfigOfStores(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_HOST", "redis-a")
	t.Setenv("SHARDLIMIT_TEST_URL", "redis://redis-a")
	for name, test := range map[string]struct{ app, want string }{
		"memory's max_buckets":    {`{"stores": {"default": {"module": "memory", "max_buckets": -1}}}`, `max_buckets -1: it must be at least 1`},
		"memory's max_keys":       {`{"stores": {"default": {"module": "memory", "max_keys": 1}}}`, `unknown field "max_keys": write max_buckets`},
		"redis":                   {app: redisOf(`"db": 1`)},
		"redis unknown field":     {redisOf(`"dbs": 1`), `unknown field "dbs"`},
		"db negative":             {redisOf(`"db": -1`), `redis store: db -1: it must not be negative`},
		"pool_size negative":      {redisOf(`"pool_size": -1`), `redis store: pool_size -1: it must be from 1 to 1000`},
		"check_timeout negative":  {redisOf(`"check_timeout": "-1s"`), `redis store: check_timeout -1s: it must be positive`},
		"charge_delay negative":   {redisOf(`"charge_delay": -1`), `redis store: charge_delay -1ns: it must be from 0 to 1s`},
		"charge_timeout negative": {redisOf(`"charge_timeout": -1`), `redis store: charge_timeout -1ns: it must be positive`},
		"ledger":                  {app: redisOf(`"ledger_trust": "2s", "max_buckets": 1`)},
		"no ledger_trust":         {app: redisOf(`"ledger_trust": 0, "max_buckets": 0`)},
		"ledger_trust negative":   {redisOf(`"ledger_trust": "-1s"`), `redis store: ledger_trust -1s: it must be at least 0`},
		"max_buckets negative":    {redisOf(`"max_buckets": -1`), `redis store: max_buckets -1: it must be at least 1`},
		"plain_charges":           {redisOf(`"plain_charges": "off"`), `unknown field "plain_charges": remove it: a script is called`},
		"previous_shards":         {redisOf(`"previous_shards": ["a"]`), `unknown field "previous_shards": write in each shard`},
		"key_prefix characters":   {redisOf(`"key_prefix": "a{b}"`), `redis store: key_prefix "a{b}": use only letters, digits and the characters _ . : -`},
		"read_from unknown":       {redisOf(`"read_from": "all"`), `redis store: read_from "all": it must be replicas or primary`},
		"clock":                   {redisOf(`"clock": "local"`), `unknown field "clock": remove it`},
		"pipelining unknown":      {redisOf(`"pipelining": "auto"`), `redis store: pipelining "auto": it must be on or off`},
		"on_error unknown":        {redisOf(`"on_error": "retry"`), `redis store: on_error "retry": it must be allow, deny or local`},
		"no shards":               {shardsOf(``), `redis store: it has no shard: add one`},
		"shard null":              {shardsOf(`null`), `redis store: a shard is null: define or remove it`},
		"shard without a name":    {shardsOf(`{"primary": "redis-a"}`), `redis store: a shard has no name: give it one`},
		"shard with a bad name":   {shardsOf(`{"name": "a/b", "primary": "redis-a"}`), `redis store: shard name "a/b": use only letters`},
		"shard without a primary": {shardsOf(`{"name": "a", "replicas": ["redis-a1"]}`), `redis store: shard a has no primary: add sentinel <master> <addr>`},
		"shard's unknown field":   {shardsOf(`{"name": "a", "primary": "redis-a", "replica": "redis-b"}`), `unknown field "replica"`},
		"weight negative":         {shardsOf(`{"name": "a", "primary": "redis-a", "weight": -1}`), `redis store: shard a: weight -1: it must be from 1 to 1000`},
		"weight too large":        {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 1001}`), `redis store: shard a: weight 1001: it must be from 1 to 1000`},
		"weight before negative":  {shardsOf(`{"name": "a", "primary": "redis-a", "previous_weight": -1}`), `redis store: shard a: weight 1 was -1: the weight before must be from 1 to 1000`},
		"weight before the same":  {shardsOf(`{"name": "a", "primary": "redis-a", "previous_weight": 1}`), `redis store: shard a: weight 1 was 1: nothing changes, so remove was 1`},
		"weight zero":             {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 0}`), `redis store: shard a: weight 0: say what it was`},
		"weights zero":            {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 0, "previous_weight": 1}`), `redis store: shard a has weight 0, as all shards have`},
		"weights before zero":     {shardsOf(`{"name": "a", "primary": "redis-a", "previous_weight": 0}`), `redis store: shard a has a weight that was 0, as all shards have`},
		"shard changes":           {app: shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "b", "primary": "redis-b", "previous_weight": 0}, {"name": "c", "primary": "redis-c", "weight": 0, "previous_weight": 3}`)},
		"retired":                 {shardsOf(`{"name": "a", "primary": "redis-a", "retired": true}`), `unknown field "retired": write weight 0 and what it was`},
		"weight fraction":         {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 1.5}`), `weight`},
		"replica empty":           {shardsOf(`{"name": "a", "primary": "redis-a", "replicas": [""]}`), `redis store: shard a: address "": it must be host, host:port or unix/path`},
		"shards of one name":      {shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "a", "primary": "redis-b"}`), `redis store: shard a is defined twice: give each its own name`},
		"shards of one primary":   {shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "b", "primary": "redis-a:6379"}`), `redis store: shard b has the address redis-a:6379 of shard a: give each its own servers`},

		"address resolves":                   {app: shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_HOST}:7000"}`)},
		"address resolves to an invalid one": {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_URL}"}`), `redis store: shard a: an address is a URL: write it as url, in place of that option`},
		"addresses resolve to one":           {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_HOST}"}, {"name": "b", "primary": "redis-a"}`), `redis store: shard b has the address redis-a:6379 of shard a`},
		"address does not resolve":           {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_UNSET}"}`), `redis store: shard a: address: evaluated placeholder {env.SHARDLIMIT_TEST_UNSET} is empty: set it, or write \{`},
		"username does not resolve":          {redisOf(`"username": "{env.SHARDLIMIT_TEST_UNSET}"`), `redis store: username: placeholder {env.SHARDLIMIT_TEST_UNSET} is empty: set it`},
		"password does not resolve":          {redisOf(`"password": "{file.no-such-file}"`), `redis store: password: placeholder {file.no-such-file} is empty: set it, or see that Caddy can read the file`},
		"key_secret is unknown":              {redisOf(`"key_secret": "{nobody.knows}"`), `redis store: key_secret: it has a placeholder that is not known: write {env.*} or {file.*}, or \{`},
		"password with a brace":              {app: redisOf(`"password": "a\\{b}"`)},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(test.app, withZone(`"log_key": true`)), test.want) })
	}
}

func TestGuestStoreInACaddyfile(t *testing.T) {
	config, err := adapt(`
{
	rate_limit {
		store visitor guest {
			motto welcome
		}
	}
}
:8080 {
	rate_limit {client_ip} 100 1m {
		store visitor
	}
}
`)
	must(t, "adapt", err)
	if want := `"motto": "welcome"`; !strings.Contains(string(config), want) {
		t.Errorf("adapts to %s, want %s in it", config, want)
	}
	opened := caddytest.Guests.Opened.Load()
	loads(t, config, "")
	if n := caddytest.Guests.Opened.Load() - opened; n != 1 {
		t.Errorf("the store was opened %d times, want once", n)
	}
	if n := caddytest.Guests.Open.Load(); n != 0 {
		t.Errorf("%d stores are still open", n)
	}
}

func TestGuestStoreWithAnUnknownOptionNamesTheLine(t *testing.T) {
	_, err := adapt("{\n\trate_limit {\n\t\tstore guest {\n\t\t\tmoto\n\t\t}\n\t}\n}\n")
	if err == nil || !strings.Contains(err.Error(), "Caddyfile:4") {
		t.Errorf("adapt returns %v, want an error at Caddyfile:4", err)
	}
}

func TestConfigOfShardKinds(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_HOST", "redis-a")
	t.Setenv("SHARDLIMIT_TEST_MASTER", "my master")
	const (
		static   = `{"name": "a", "primary": "redis-a"}`
		sentinel = `{"name": "b", "sentinel": {"master": "mymaster", "addrs": ["sentinel-1", "sentinel-2"]}}`
		cluster  = `{"name": "c", "cluster": ["redis-1", "redis-2"]}`
	)
	for name, test := range map[string]struct{ app, want string }{
		"all of them":               {app: shardsOf(static + `, ` + sentinel + `, ` + cluster)},
		"none":                      {shardsOf(`{"name": "a"}`), `redis store: shard a has no primary: add sentinel <master> <addr>..., cluster <addr>..., a url, or its address, such as primary localhost:6379`},
		"empty cluster":             {shardsOf(`{"name": "a", "cluster": []}`), `redis store: shard a has no primary`},
		"url of the store":          {app: `{"stores": {"default": {"module": "redis", "url": "redis://redis-a"}}}`},
		"url of the store, wrong":   {`{"stores": {"default": {"module": "redis", "url": "http://redis-a"}}}`, `redis store: shard default: url is not understood`},
		"url and shards":            {`{"stores": {"default": {"module": "redis", "url": "redis://redis-a", "shards": [{"name": "a", "primary": "redis-a"}]}}}`, `redis store: url is for a store of one shard: remove it, and give each shard its own`},
		"two":                       {shardsOf(`{"name": "a", "primary": "redis-a", "cluster": ["redis-1"]}`), `redis store: shard a: cluster does not go with primary: a shard is found in one way, so keep one of them`},
		"empty sentinel":            {shardsOf(`{"name": "a", "sentinel": {}}`), `redis store: shard a: sentinel has no master: add the name under which the sentinels watch the primary, such as mymaster`},
		"sentinel without addrs":    {shardsOf(`{"name": "a", "sentinel": {"master": "mymaster"}}`), `redis store: shard a: sentinel has no addresses: add those of the sentinels`},
		"sentinel without a master": {shardsOf(`{"name": "a", "sentinel": {"addrs": ["sentinel-1"]}}`), `redis store: shard a: sentinel has no master`},
		"sentinel's unknown field":  {shardsOf(`{"name": "a", "sentinel": {"master": "mymaster", "addresses": ["sentinel-1"]}}`), `unknown field "addresses"`},
		"sentinel's empty address":  {shardsOf(`{"name": "a", "sentinel": {"master": "mymaster", "addrs": [""]}}`), `redis store: shard a: address "": it must be host, host:port or unix/path`},
		"master resolves":           {app: shardsOf(`{"name": "a", "sentinel": {"master": "{env.SHARDLIMIT_TEST_HOST}", "addrs": ["sentinel-1"]}}`)},
		"master resolves to a bad name": {
			shardsOf(`{"name": "a", "sentinel": {"master": "{env.SHARDLIMIT_TEST_MASTER}", "addrs": ["sentinel-1"]}}`), `redis store: shard a: sentinel has the master "my master": write the name`,
		},
		"master does not resolve": {
			shardsOf(`{"name": "a", "sentinel": {"master": "{env.SHARDLIMIT_TEST_UNSET}", "addrs": ["sentinel-1"]}}`), `redis store: shard a: sentinel: evaluated placeholder {env.SHARDLIMIT_TEST_UNSET} is empty: set it`,
		},
		"sentinels of two masters":       {app: shardsOf(sentinel + `, ` + strings.NewReplacer(`"b"`, `"d"`, "mymaster", "other").Replace(sentinel))},
		"sentinels of one master":        {shardsOf(sentinel + `, ` + strings.Replace(sentinel, `"b"`, `"d"`, 1)), `redis store: shard d has the master mymaster of shard b, at the same sentinel sentinel-1:26379: give each its own`},
		"replicas of a cluster":          {shardsOf(`{"name": "a", "cluster": ["redis-1"], "replicas": ["redis-2"]}`), `redis store: shard a: replica does not go with cluster: the nodes name the replicas`},
		"cluster on a socket":            {shardsOf(`{"name": "a", "cluster": ["unix//run/redis.sock"]}`), `redis store: shard a: address "unix//run/redis.sock": it must be host or host:port`},
		"cluster's address resolves":     {shardsOf(static + `, {"name": "c", "cluster": ["redis-1", "{env.SHARDLIMIT_TEST_HOST}"]}`), `redis store: shard c has the address redis-a:6379 of shard a: give each its own servers`},
		"cluster's address is a primary": {shardsOf(static + `, {"name": "c", "cluster": ["redis-a"]}`), `redis store: shard c has the address redis-a:6379 of shard a`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(test.app, withZone(`"log_key": true`)), test.want) })
	}
}

func TestConfigOfConnections(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_USER", "limiter")
	const cluster = `{"name": "c", "cluster": ["redis-1"]`
	for name, test := range map[string]struct{ app, want string }{
		"of a shard":                   {app: shardsOf(`{"name": "a", "primary": "redis-a", "username": "{env.SHARDLIMIT_TEST_USER}", "password": "x", "db": 1, "tls": {}, "pool_size": 2, "max_replica_lag": "1s"}`)},
		"db 0":                         {app: redisOf(`"db": 0`)},
		"max_replica_lag negative":     {redisOf(`"max_replica_lag": "-1s"`), `redis store: max_replica_lag -1s: it must be positive`},
		"shard's db negative":          {shardsOf(`{"name": "a", "primary": "redis-a", "db": -1}`), `redis store: shard a: db -1: it must not be negative`},
		"shard's pool_size":            {shardsOf(`{"name": "a", "primary": "redis-a", "pool_size": 1001}`), `redis store: shard a: pool_size 1001: it must be from 1 to 1000`},
		"dial_timeout":                 {redisOf(`"dial_timeout": "1s"`), `unknown field "dial_timeout": remove it, or raise check_timeout`},
		"password_command":             {app: redisOf(`"password_command": {"command": ["token"], "lifetime": "10s"}`)},
		"password_command's lifetime":  {redisOf(`"password_command": {"command": ["token"], "lifetime": "9s"}`), `redis store: password_command: lifetime 9s: it must be at least 10s`},
		"password_command empty":       {redisOf(`"password_command": {}`), `redis store: password_command is empty: name a command`},
		"password_lifetime":            {redisOf(`"password_lifetime": "1m"`), `unknown field "password_lifetime": write it in the block of the command`},
		"shard's password":             {shardsOf(`{"name": "a", "primary": "redis-a", "password": "{env.SHARDLIMIT_TEST_UNSET}"}`), `redis store: shard a: password: placeholder {env.SHARDLIMIT_TEST_UNSET} is empty: set it`},
		"shard's sentinel_password":    {shardsOf(`{"name": "a", "sentinel": {"master": "m", "addrs": ["s"]}, "sentinel_password": "{file.no-such-file}"}`), `redis store: shard a: sentinel_password: placeholder {file.no-such-file} is empty`},
		"sentinel_password unused":     {redisOf(`"sentinel_password": "x"`), `redis store: sentinel_password has no effect, as no shard has the option sentinel`},
		"cluster's db":                 {shardsOf(cluster + `, "db": 1}`), `redis store: shard c: db 1: a Redis Cluster has database 0 only, so remove it`},
		"username without a password":  {redisOf(`"username": "limiter"`), `redis store: username needs a password`},
		"username, shard's password":   {app: strings.Replace(redisOf(`"username": "limiter"`), `"redis-a"`, `"redis-a", "password": "x"`, 1)},
		"sentinel_username on its own": {shardsOf(`{"name": "a", "sentinel": {"master": "m", "addrs": ["s"]}, "sentinel_username": "x", "password": "y"}`), `redis store: shard a has a sentinel_username, which needs a password`},
		"tls unknown field":            {redisOf(`"tls": {"cacert": "x"}`), `unknown field "cacert"`},
		"tls on a socket":              {shardsOf(`{"name": "a", "primary": "unix//run/redis.sock", "tls": {}}`), `redis store: shard a: tls does not go with the address unix//run/redis.sock: Redis speaks no TLS on unix sockets`},
		"tls cert without key":         {redisOf(`"tls": {"cert": "x"}`), `redis store: tls: cert has no key: add the file with the private key`},
		"tls key without cert":         {redisOf(`"tls": {"key": "x"}`), `redis store: tls: key has no cert: add the file with the certificate`},
		"tls insecure with ca":         {redisOf(`"tls": {"ca": "x", "insecure_skip_verify": true}`), `redis store: tls: ca has no effect with insecure_skip_verify`},
		"tls server_name":              {redisOf(`"tls": {"server_name": "a/b"}`), `redis store: tls: server_name "a/b": it must be a host's name or an IP address`},
		"tls does not resolve":         {redisOf(`"tls": {"ca": "{env.SHARDLIMIT_TEST_UNSET}"}`), `redis store: tls: ca: evaluated placeholder {env.SHARDLIMIT_TEST_UNSET} is empty`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(test.app, withZone(`"log_key": true`)), test.want) })
	}
}

// TestConfigOfTLSFiles checks that loading reports faulty files with their paths.
func TestConfigOfTLSFiles(t *testing.T) {
	ca := redistest.StartAuthority(t)
	client, err := ca.IssueClient("limiter", time.Now().Add(time.Hour))
	must(t, "issue a certificate", err)
	other, err := ca.IssueClient("other", time.Now().Add(time.Hour))
	must(t, "issue a certificate", err)
	missing, garbage := filepath.Join(t.TempDir(), "missing.pem"), filepath.Join(t.TempDir(), "garbage.pem")
	must(t, "write a file", os.WriteFile(garbage, []byte("no PEM"), 0o600))
	t.Setenv("SHARDLIMIT_TEST_CA", ca.File())
	pair := func(cert, key string) string { return fmt.Sprintf(`{"cert": %q, "key": %q}`, cert, key) }
	for name, test := range map[string]struct{ tls, want string }{
		"good":           {tls: fmt.Sprintf(`{"ca": %q, "cert": %q, "key": %q}`, ca.File(), client.CertFile(), client.KeyFile())},
		"placeholder":    {tls: `{"ca": "{env.SHARDLIMIT_TEST_CA}"}`},
		"ca missing":     {fmt.Sprintf(`{"ca": %q}`, missing), `tls: read ca: open ` + missing + `: no such file or directory`},
		"ca garbage":     {fmt.Sprintf(`{"ca": %q}`, garbage), `tls: read ca ` + garbage + `: it has no certificate in PEM`},
		"ca is a key":    {fmt.Sprintf(`{"ca": %q}`, client.KeyFile()), `tls: read ca ` + client.KeyFile() + `: it has no certificate in PEM`},
		"cert missing":   {pair(missing, client.KeyFile()), `tls: read cert ` + missing},
		"key missing":    {pair(client.CertFile(), missing), `key ` + missing + `: open`},
		"cert garbage":   {pair(garbage, client.KeyFile()), `tls: read cert ` + garbage},
		"key of another": {pair(client.CertFile(), other.KeyFile()), `private key does not match public key`},
	} {
		t.Run(name, func(t *testing.T) {
			for _, place := range []struct{ name, app string }{
				{"redis store: ", redisOf(`"tls": ` + test.tls)},
				{"redis store: shard a: ", shardsOf(`{"name": "a", "primary": "redis-a", "tls": ` + test.tls + `}`)},
			} {
				wanted := test.want
				if strings.HasPrefix(wanted, "tls: ") {
					wanted = place.name + wanted
				}
				loads(t, configOf(place.app, withZone(`"log_key": true`)), wanted)
			}
		})
	}
}

// TestConfigErrorsQuoteNoSecret, not even part of one that has a brace.
func TestConfigErrorsQuoteNoSecret(t *testing.T) {
	for _, secret := range []string{`mark{er}`, `{mark}er`, `mark{file.a{er}`, `{env.SHARDLIMIT_TEST_UNSET}marker`, `{{mark}}{er}`} {
		for _, field := range []string{"username", "password", "sentinel_password", "key_secret"} {
			app := strings.Replace(redisOf(fmt.Sprintf(`%q: %q`, field, secret)), `"primary": "redis-a"`, `"sentinel": {"master": "m", "addrs": ["s"]}`, 1)
			err := validate(configOf(app, withZone(`"log_key": true`)))
			if err == nil || !strings.Contains(err.Error(), field+": ") || strings.Contains(err.Error(), "mark") {
				t.Errorf("%s %s is refused with %v", field, secret, err)
			}
		}
	}
}

func TestConfigOfRollouts(t *testing.T) {
	const stores = `{"stores": {"default": {"module": "memory"}, "other": {"module": "memory"}, "guest": {"module": "guest", "plain": true}}}`
	for name, test := range map[string]struct{ handler, want string }{
		"fraction":             {handler: withZone(`"rollout": {"store": "other", "percent": 0.01}`)},
		"0 percent":            {handler: withZone(`"rollout": {"store": "other", "percent": 0}`)},
		"0 percent by default": {handler: withZone(`"rollout": {"store": "other"}`)},
		"100 percent":          {handler: withZone(`"rollout": {"store": "other", "percent": 100}`)},
		"null":                 {handler: withZone(`"rollout": null`)},
		"to a plain store":     {handler: handlerOf(`"rollout": {"store": "guest", "percent": 0}, "zones": [{"name": "api", "key": "static", "events": 10, "window": "1m", "penalty": "1m"}]`)},
		"to the default":       {handler: withZone(`"store": "other", "rollout": {"store": "default", "percent": 10}`)},
		"from an own one":      {handler: withZone(`"store": {"module": "memory"}, "rollout": {"store": "default", "percent": 10}`)},
		"named zones":          {handler: handlerOf(`"rollout": {"store": "other", "percent": 10}, "rate_limits": {"api": {"key": "static", "window": "1m", "max_events": 10}}`)},

		"without a store":          {withZone(`"rollout": {"percent": 10}`), `rollout names no store: add the one to which clients are moved, such as rollout other 10`},
		"negative":                 {withZone(`"rollout": {"store": "other", "percent": -0.01}`), `rollout other -0.01: it must be from 0 to 100 percent, such as 12.5`},
		"too large":                {withZone(`"rollout": {"store": "other", "percent": 100.01}`), `rollout other 100.01: it must be from 0 to 100 percent, such as 12.5`},
		"percent as a text":        {withZone(`"rollout": {"store": "other", "percent": "10"}`), `percent`},
		"unknown store":            {withZone(`"rollout": {"store": "another", "percent": 10}`), `rollout another is not configured: add it to the stores of the global rate_limit, or name another; there is default, guest, other`},
		"own store":                {withZone(`"store": "other", "rollout": {"store": "other", "percent": 10}`), `rollout other: that is the handler's own store: name the store to which clients are moved, or remove rollout`},
		"own store by default":     {withZone(`"rollout": {"store": "default", "percent": 10}`), `rollout default: that is the handler's own store`},
		"a store of its own":       {withZone(`"rollout": {"store": {"module": "memory"}, "percent": 10}`), `store`},
		"unknown field":            {withZone(`"rollout": {"store": "other", "share": 10}`), `unknown field "share"`},
		"text":                     {withZone(`"rollout": "other 10"`), `rollout`},
		"0 percent, unknown store": {withZone(`"rollout": {"store": "another", "percent": 0}`), `rollout another is not configured`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(stores, test.handler), test.want) })
	}
	if n := caddytest.Guests.Open.Load(); n != 0 {
		t.Errorf("%d stores are still open", n)
	}
}

// TestConfigOfRolloutsOfOneZone checks that a zone has one definition in every store that may count
// its clients, also at 0 percent.
func TestConfigOfRolloutsOfOneZone(t *testing.T) {
	const stores = `{"stores": {"default": {"module": "memory"}, "other": {"module": "memory"}, "third": {"module": "memory"}}}`
	const twice = `zone api is defined twice, differently: once with key static, events 10, window 1m0s`
	zone := func(events, rest string) string {
		return handlerOf(`"zones": [{"name": "api", "key": "static", "events": ` + events + `, "window": "1m"}], ` + rest)
	}
	for name, test := range map[string]struct{ one, other, want string }{
		"equal in the other store":     {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`10`, `"store": "other"`), ``},
		"different in the other store": {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"store": "other"`), twice},
		"different at 0 percent":       {zone(`10`, `"rollout": {"store": "other", "percent": 0}`), zone(`20`, `"store": "other"`), twice},
		"different in both rollouts":   {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"store": "third", "rollout": {"store": "other", "percent": 5}`), twice},
		"different in the own store":   {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"rollout": {"store": "third", "percent": 5}`), twice},
		"different in a third store":   {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`20`, `"store": "third"`), ``},
		"crosswise":                    {zone(`10`, `"rollout": {"store": "other", "percent": 5}`), zone(`10`, `"store": "other", "rollout": {"store": "default", "percent": 5}`), ``},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(stores, test.one, test.other), test.want) })
	}
}

var _ shardlimit.StoreModule = (*caddytest.GuestStore)(nil)

func init() { caddy.RegisterModule(new(brokenStore)) }

// brokenStore is a store module whose stores do not open.
type brokenStore struct{}

func (*brokenStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit.stores.broken", New: func() caddy.Module { return new(brokenStore) }}
}

func (*brokenStore) OpenStore(string) (store.Store, error) { return nil, errors.New("out of order") }
func (*brokenStore) CloseStore()                           { panic("closed a store that did not open") }
func (*brokenStore) OnErrorDefault() string                { return stores.OnErrorAllow }

const (
	memoryModule = `{"module": "memory"}`
	redisModule  = `{"module": "redis", "shards": [{"name": "a", "primary": "redis-a"}, {"name": "b", "primary": "redis-b", "replicas": ["redis-b1"]}]}`
	goodZones    = `"zones": [{"name": "api", "key": "static", "events": 10, "window": "1m"}]`
	otherZones   = `"zones": [{"name": "api", "key": "static", "events": 20, "window": "1m"}]`
	twoZones     = `"zones": [{"name": "a", "key": "static", "events": 10, "window": "1m"}, {"name": "b", "key": "static", "events": 10, "window": "1m", "match": [{"pathh": ["/"]}]}]`
)

func TestLoadReleasesWhatItAcquired(t *testing.T) {
	for name, test := range map[string]struct {
		stores   string
		handlers []string
		want     string
	}{
		"nothing fails":        {`"a": ` + memoryModule + `, "b": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": "b", ` + goodZones}, ""},
		"nothing fails inline": {``, []string{`"store": ` + redisModule + `, ` + goodZones, `"store": ` + memoryModule + `, ` + goodZones, goodZones}, ""},

		"store does not open":      {`"a": ` + memoryModule + `, "b": ` + redisModule + `, "c": {"module": "broken"}, "d": ` + memoryModule, []string{`"store": "a", ` + goodZones}, "store c: out of order"},
		"store is invalid":         {`"a": ` + redisModule + `, "b": {"module": "redis"}`, []string{`"store": "a", ` + goodZones}, "it has no shard"},
		"module is no store":       {`"a": ` + redisModule + `, "b": {"module": "stranger"}`, []string{`"store": "a", ` + goodZones}, "is not a rate_limit store"},
		"store is unknown":         {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": "b", ` + goodZones}, "store b is not configured"},
		"rollout's store is not":   {`"a": ` + redisModule, []string{`"store": ` + redisModule + `, "rollout": {"store": "b"}, ` + goodZones}, "rollout b is not configured"},
		"zone is invalid":          {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": "a", "zones": []`}, "has no zone"},
		"zones differ":             {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": "a", ` + otherZones}, "zone api is defined twice, differently"},
		"matchers do not load":     {``, []string{`"store": ` + redisModule + `, ` + twoZones}, "zone b: load matchers"},
		"inline store does not":    {``, []string{goodZones, `"store": {"module": "broken"}, ` + goodZones}, "out of order"},
		"inline zones differ":      {``, []string{`"store": ` + redisModule + `, ` + goodZones, `"store": ` + redisModule + `, ` + otherZones}, "zone api is defined twice, differently"},
		"a later handler does not": {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": ` + memoryModule + `, ` + goodZones, `"store": 5, ` + goodZones}, "store 5: it must be the name"},
	} {
		t.Run(name, func(t *testing.T) {
			handlers := make([]string, len(test.handlers))
			for i, fields := range test.handlers {
				handlers[i] = handlerOf(fields)
			}
			// Caddy loads maps in random order.
			for range 5 {
				loads(t, configOf(`{"stores": {`+test.stores+`}}`, handlers...), test.want)
				stores.Pool.Range(func(key, _ any) bool {
					t.Errorf("the pool still holds %T %v", key, key)
					return true
				})
			}
		})
	}
}

func init() { caddy.RegisterModule(new(strangerStore)) }

// strangerStore is in the namespace of store modules, but is no store.
type strangerStore struct{}

func (*strangerStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit.stores.stranger", New: func() caddy.Module { return new(strangerStore) }}
}
