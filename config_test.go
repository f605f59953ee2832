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
	err := caddytest.Validate(config)
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
		"events without a fallback": {zoneOf(`"events": "{http.vars.quota}"`), `zones[0].events_fallback is missing: add the number that counts where the placeholder {http.vars.quota} yields none, such as 100, in zone api`},
		"events and a fallback":     {zoneOf(`"events": 10, "events_fallback": 20`), `zones[0].events_fallback goes with a placeholder in events only: remove it, in zone api`},
		"events fraction":           {zoneOf(`"events": 1.5`), `zones[0].events "1.5": it must be a whole number from 1 to 2^52, in zone api`},
		"events text":               {zoneOf(`"events": "many"`), `zones[0].events "many": it must be a whole number from 1 to 2^52, in zone api`},
		"events exponent":           {handler: zoneOf(`"events": 1e3`)},
		"events bool":               {zoneOf(`"events": true`), `true: it must be a whole number, or a text with a placeholder`},
		"events zero":               {zoneOf(`"events": 0`), `zones[0].events 0: it must be from 1 to 2^52, in zone api`},
		"events negative":           {zoneOf(`"events": -1`), `zones[0].events -1: it must be from 1 to 2^52, in zone api`},
		"events too large":          {zoneOf(`"events": 4503599627370497`), `it must be from 1 to 2^52`},
		"events empty":              {zoneOf(`"events": ""`), `zones[0].events is missing: add it, such as 100, in zone api`},
		"fallback too large":        {zoneOf(`"events": "{x}", "events_fallback": 4503599627370497`), `it must be from 1 to 2^52`},

		"key as a string":     {handler: zoneOf(`"key": "{http.vars.client_ip}"`)},
		"key as a list":       {handler: zoneOf(`"key": ["{http.request.header.X-Api-Key}", "{http.vars.client_ip}"]`)},
		"key as a number":     {zoneOf(`"key": 5`), `5: it must be a text or a list of texts`},
		"key as an object":    {zoneOf(`"key": {}`), `{}: it must be a text or a list of texts`},
		"key of nothing":      {zoneOf(`"key": []`), `zones[0].key is missing: add one, such as "{http.vars.client_ip}", or "static" for one bucket that all clients share, in zone api`},
		"key of an empty one": {zoneOf(`"key": ["a", ""]`), `zones[0].key has an empty text: remove it, in zone api`},
		"key empty":           {zoneOf(`"key": ""`), `zones[0].key has an empty text: remove it, in zone api`},

		"count_status_not numbers":      {handler: zoneOf(`"count_status_not": [304, 404]`)},
		"count_status_not mixed":        {handler: zoneOf(`"count_status_not": [304, "404", "5xx"]`)},
		"count_status all":              {handler: zoneOf(`"count_status": ["all"]`)},
		"count_status_not null":         {handler: zoneOf(`"count_status_not": null`)},
		"count_status_not fraction":     {zoneOf(`"count_status_not": [304.5]`), `zones[0].count_status_not "304.5": it must be a code from 200 to 599 or a class from 2xx to 5xx, in zone api`},
		"count_status_not out of range": {zoneOf(`"count_status_not": [199]`), `zones[0].count_status_not "199": it must be a code from 200 to 599 or a class from 2xx to 5xx, in zone api`},
		"count_status_not bool":         {zoneOf(`"count_status_not": [true]`), `status true: it must be a code, such as 304, or a class, such as 5xx`},
		"count_status_not no list":      {zoneOf(`"count_status_not": 304`), `304: it must be a list of statuses, such as [304]`},

		"window as nanoseconds":   {handler: zoneOf(`"window": 60000000000`)},
		"aligned, no window":      {zoneOf(`"window": 0, "align": true`), `zones[0].window is missing: add one, such as "1m", in zone api`},
		"window missing":          {zoneOf(`"window": 0`), `zones[0].window is missing: add one, such as "1m", in zone api`},
		"window negative":         {zoneOf(`"window": "-1m"`), `zones[0].window -1m0s: it must be from 1ms to 100 years, in zone api`},
		"window in seconds":       {zoneOf(`"window": 60`), `zones[0].window: 60 nanoseconds: write a text with the unit, such as "60s"`},
		"window of an hour":       {zoneOf(`"window": 3600`), `zones[0].window 3.6µs: it must be from 1ms to 100 years; numbers are nanoseconds, so write a text, such as "60s", in zone api`},
		"window too long":         {zoneOf(`"window": "36501d"`), `it must be from 1ms to 100 years`},
		"window not whole":        {zoneOf(`"window": 1000001`), `zones[0].window 1.000001ms: it must be whole microseconds, in zone api`},
		"charge unknown":          {zoneOf(`"charge": "often"`), `zones[0].charge "often": it must be after or before, in zone api`},
		"on_error unknown":        {zoneOf(`"on_error": "retry"`), `zones[0].on_error "retry": it must be allow, deny or local, in zone api`},
		"ipv4_prefix too large":   {zoneOf(`"ipv4_prefix": 33`), `zones[0].ipv4_prefix 33: it must be from 1 to 32 bits, or 0 for the whole address, in zone api`},
		"ipv6_prefix negative":    {zoneOf(`"ipv6_prefix": -1`), `zones[0].ipv6_prefix -1: it must be from 1 to 128 bits, or 0 for the whole address, in zone api`},
		"zone without a name":     {zoneOf(`"name": ""`), `zones[0] has no name: give it one`},
		"zone with a bad name":    {zoneOf(`"name": "a b"`), `zones[0] has the name "a b": use only letters, digits and the characters _ . -`},
		"zone null":               {handlerOf(`"zones": [null]`), `zones[0] is null: define or remove it`},
		"zone twice":              {handlerOf(`"zones": [{"name": "a", "key": "k", "events": 1, "window": "1s"}, {"name": "a", "key": "k", "events": 1, "window": "1s"}]`), `zones[1] has the name of another zone, a: rename one`},
		"no zones":                {handlerOf(`"zones": []`), `zones is empty: add one, such as {"name": "api", "key": "{http.vars.client_ip}", "events": 100, "window": "1m"}`},
		"unknown matcher":         {zoneOf(`"match": [{"pathh": ["/"]}]`), `zones[0].match cannot be loaded: module name `},
		"jitter negative":         {withZone(`"jitter": -0.1`), `jitter -0.1: it must be from 0 to 1, such as 0.2`},
		"jitter too large":        {withZone(`"jitter": 101`), `jitter 101: it must be from 0 to 1, such as 0.2`},
		"jitter in percent":       {withZone(`"jitter": 20`), `jitter 20: it is a fraction, from 0 to 1: is it meant in percent? Then write 0.2`},
		"jitter at its largest":   {handler: withZone(`"jitter": 1`)},
		"headers unknown":         {withZone(`"headers": "x"`), `headers "x": it must be github, ietf, both or none`},
		"handler's unknown field": {withZone(`"zone": []`), `zone: unknown field, did you mean zones?`},
		"zone's option outside":   {withZone(`"on_error": "deny"`), `on_error: unknown field: it belongs in zones`},
		"option in a zone":        {zoneOf(`"headers": "ietf"`), `zones[0].headers: unknown field: it belongs beside zones, outside of it`},
		"zone's unknown field":    {zoneOf(`"limit": 5`), `zones[0].limit: unknown field: write events, with a number, and window, with a time span`},
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
		"empty key":              {handler: handlerOf(`"rate_limits": {"api": {"key": "", "window": "1m", "max_events": 10}}`)},
		"no max_concurrent":      {handler: handlerOf(`"rate_limits": {"api": {"window": "1m", "max_events": 10, "max_concurrent": 0}, "other": {"window": "1m", "max_events": 10, "max_concurrent": null}}`)},
		"max_concurrent":         {handlerOf(`"rate_limits": {"api": {"key": "static", "max_concurrent": 5}}`), `rate_limits.api.max_concurrent 5: write a zone into zones with "algorithm": "concurrency", and the number as "events"`},
		"besides zones":          {handler: withZone(`"rate_limits": {"other": ` + zone + `}`)},
		"name of another zone":   {withZone(`"rate_limits": {"api": ` + zone + `}`), `rate_limits.api has the name of another zone, api: rename one`},
		"null zone":              {handlerOf(`"rate_limits": {"api": null}`), `rate_limits.api is null: define or remove it`},
		"no max_events":          {handlerOf(`"rate_limits": {"api": {"key": "static", "window": "1m"}}`), `rate_limits.api.max_events is missing or 0: it must be from 1 to 2^52`},
		"negative max_events":    {handlerOf(`"rate_limits": {"api": {"key": "static", "window": "1m", "max_events": -1}}`), `rate_limits.api.max_events is missing or -1: it must be from 1 to 2^52`},
		"no window":              {handlerOf(`"rate_limits": {"api": {"key": "static", "max_events": 10}}`), `rate_limits.api.window is missing: add one, such as "1m", in zone api`},
		"bad name":               {handlerOf(`"rate_limits": {"a b": ` + zone + `}`), `rate_limits.a b has the name "a b": use only letters, digits and the characters _ . -`},
		"empty map":              {handlerOf(`"rate_limits": {}`), `zones is empty: add one, such as {"name": "api", "key": "{http.vars.client_ip}", "events": 100, "window": "1m"}`},
		"null":                   {handler: handlerOf(`"rate_limits": {"api": ` + zone + `}, "distributed": null, "storage": null`)},
		"distributed":            {withZone(`"distributed": {"write_interval": "5s"}`), `distributed is not supported: write a redis store`},
		"storage":                {withZone(`"storage": {"module": "file_system"}`), `storage is not supported: counts live in a store of their own`},
		"sweep_interval":         {handler: withZone(`"sweep_interval": "1m"`)},
		"disable_metrics":        {handler: withZone(`"disable_metrics": true`)},
		"zone's unknown field":   {handlerOf(`"rate_limits": {"api": {"events": 10}}`), `rate_limits.api.events: unknown field: it must be one of match, key, window, max_events, max_concurrent, ipv4_prefix, ipv6_prefix`},
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
		"algorithm unknown":       {`"algorithm": "token_bucket"`, `zones[0].algorithm "token_bucket": it must be fixed_window, sliding_window, sliding_log, gcra or concurrency, in zone api`},
		"align":                   {zone: `"align": true`},
		"align false":             {zone: `"align": false, "algorithm": "gcra"`},
		"align with gcra":         {`"align": true, "algorithm": "gcra"`, `zones[0].align goes with algorithm fixed_window only: remove it, in zone api`},
		"align as text":           {`"align": "yes"`, `align`},
		"calendar and window":     {`"calendar": "day", "window": "1d"`, `zones[0].calendar day and window exclude each other: remove one, in zone api`},
		"calendar unknown":        {`"calendar": "decade", "window": 0`, `zones[0].calendar "decade": it must be day, week, month or year, in zone api`},
		"calendar":                {zone: `"calendar": "week", "week_starts": "sunday", "time_zone": "Asia/Tokyo", "window": 0`},
		"time zone of the system": {`"calendar": "day", "time_zone": "Local", "window": 0`, `zones[0].time_zone "Local": it must be an IANA name, such as Europe/Berlin: there is no such time zone, in zone api`},
		"burst":                   {zone: `"burst": 5, "algorithm": "gcra"`},
		"burst zero":              {`"burst": 0, "algorithm": "gcra"`, `zones[0].burst 0: it must be from 1 to 2^52, in zone api`},
		"burst as a placeholder":  {zone: `"burst": "{vars.b}", "burst_fallback": 5, "algorithm": "gcra"`},
		"burst without fallback":  {`"burst": "{vars.b}", "algorithm": "gcra"`, `zones[0].burst_fallback is missing: add the number that counts where the placeholder {vars.b} yields none, such as 100, in zone api`},
		"burst_fallback alone":    {`"burst_fallback": 5, "algorithm": "gcra"`, `zones[0].burst_fallback goes with a placeholder in burst only: remove it, in zone api`},
		"burst negative":          {`"burst": -1, "algorithm": "gcra"`, `zones[0].burst -1: it must be from 1 to 2^52, in zone api`},
		"burst too large":         {`"burst": 4503599627370497, "algorithm": "gcra"`, `burst 4503599627370497: it must be from 1 to 2^52`},
		"burst with fixed_window": {`"burst": 5`, `zones[0].burst goes with algorithm gcra only: remove it, or write algorithm gcra, in zone api`},
		"burst too slow":          {`"burst": 101, "events": 1, "window": "365d", "algorithm": "gcra"`, `zones[0].burst 101 would take more than 100 years to come back, at 1 in 8760h0m0s: lower it, or raise events to 2, in zone api`},
		"burst of a century":      {zone: `"burst": 200, "events": 2, "window": "365d", "algorithm": "gcra"`},
		"burst at its largest":    {zone: `"burst": 4503599627370496, "events": 4503599627370496, "window": "36500d", "algorithm": "gcra"`},

		"cost as a number":            {zone: `"cost": 5`},
		"cost as a string":            {zone: `"cost": "5"`},
		"cost zero":                   {zone: `"cost": 0`},
		"cost as a placeholder":       {zone: `"cost": "{http.response.header.X-Cost}"`},
		"cost empty":                  {zone: `"cost": ""`},
		"cost negative":               {`"cost": -1`, `zones[0].cost "-1": it must be a whole number from 0 to 2^52, or a placeholder, in zone api`},
		"cost fraction":               {`"cost": 0.5`, `zones[0].cost "0.5": it must be a whole number from 0 to 2^52, or a placeholder, in zone api`},
		"cost text":                   {`"cost": "much"`, `zones[0].cost "much": it must be a whole number from 0 to 2^52, or a placeholder, in zone api`},
		"cost bool":                   {`"cost": true`, `true: it must be a whole number, or a text with a placeholder`},
		"cost too large":              {`"cost": 4503599627370497`, `it must be a whole number from 0 to 2^52`},
		"cost and what follows":       {`"cost": "{header.A} 5"`, `zones[0].cost {header.A} 5: "5" is behind the sum; terms are added with +, and the fallback is cost_fallback, in zone api`},
		"settle_buffer":               {`"cost": "{header.A}", "settle_buffer": 1024`, `zones[0].settle_buffer: unknown field: remove it: bodies of any length are read`},
		"cost of nothing":             {`"cost": "{}"`, `zones[0].cost {}: has a placeholder without a name, or without }: write one such as {http.request.header.A}, in zone api`},
		"cost above events":           {`"cost": 11`, `zones[0].cost 11 is more than the 10 that the zone ever admits, so no request would pass: lower it, or raise events, in zone api`},
		"cost above burst":            {`"cost": 6, "burst": 5, "algorithm": "gcra"`, `cost 6 is more than the 5 that the zone ever admits, so no request would pass: lower it, or raise burst`},
		"cost below a large burst":    {zone: `"cost": 11, "burst": 20, "algorithm": "gcra"`},
		"cost and dynamic events":     {zone: `"cost": 11, "events": "{http.vars.quota}", "events_fallback": 10`},
		"charge before":               {zone: `"charge": "before"`},
		"batch as a number":           {zone: `"batch": 5, "charge": "before"`},
		"batch as a string":           {zone: `"batch": "5", "charge": "before"`},
		"batch of all events":         {zone: `"batch": 10, "charge": "before", "algorithm": "sliding_window"`},
		"batch above the fallback":    {zone: `"batch": 11, "charge": "before", "events": "{x}", "events_fallback": 10`},
		"batch at its largest":        {zone: `"batch": 9007199254740991, "charge": "before", "events": "{x}", "events_fallback": 10`},
		"batch too large":             {`"batch": 9007199254740992, "charge": "before", "events": "{x}", "events_fallback": 10`, `zones[0].batch "9007199254740992": it must be off, auto or a whole number from 1 to 2^53-1, in zone api`},
		"batch above events":          {`"batch": 11, "charge": "before"`, `zones[0].batch 11: it must be at most events, which is 10, in zone api`},
		"batch off":                   {zone: `"batch": "off"`},
		"batch off elsewhere":         {zone: `"batch": "off", "algorithm": "gcra", "charge": "after"`},
		"batch empty":                 {zone: `"batch": ""`},
		"batch auto":                  {zone: `"batch": "auto", "charge": "before"`},
		"batch text":                  {`"batch": "on", "charge": "before"`, `zones[0].batch "on": it must be off, auto or a whole number from 1 to 2^53-1, in zone api`},
		"batch zero":                  {`"batch": 0, "charge": "before"`, `zones[0].batch "0": it must be off, auto or a whole number from 1 to 2^53-1, in zone api`},
		"batch negative":              {`"batch": -1, "charge": "before"`, `zones[0].batch "-1": it must be off, auto or a whole number from 1 to 2^53-1, in zone api`},
		"batch fraction":              {`"batch": 1.5, "charge": "before"`, `zones[0].batch "1.5": it must be off, auto or a whole number from 1 to 2^53-1, in zone api`},
		"batch bool":                  {`"batch": false`, `false: it must be off, auto or a whole number`},
		"batch without charge":        {`"batch": 5`, `zones[0].batch needs "charge": "before": write it, or remove batch, in zone api`},
		"batch with charge after":     {`"batch": "auto", "charge": "after"`, `zones[0].batch needs "charge": "before": write it, or remove batch, in zone api`},
		"batch with gcra":             {`"batch": 5, "charge": "before", "algorithm": "gcra"`, `zones[0].batch does not go with gcra, because it would defeat its smoothness: remove it, or use fixed_window or sliding_window, in zone api`},
		"batch with sliding_log":      {`"batch": 5, "charge": "before", "algorithm": "sliding_log"`, `zones[0].batch does not go with sliding_log, which keeps events one by one: remove it, or use fixed_window or sliding_window, in zone api`},
		"batch with concurrency":      {`"batch": 5, "algorithm": "concurrency"`, `zones[0].batch does not go with concurrency, which keeps events one by one: remove it, or use fixed_window or sliding_window, in zone api`},
		"batch with reserves":         {`"batch": 5, "charge": "before", "reserves": [{"percent": 10, "match": [{"path": ["/a"]}]}]`, `zones[0].batch does not go with reserves, because what is reserved could not be kept apart: remove one, in zone api`},
		"count_status":                {zone: `"count_status": [401, "403", "5xx"]`},
		"count_status null":           {zone: `"count_status": null, "count_status_not": [304]`},
		"count_status of nothing":     {`"count_status": []`, `zones[0].count_status is empty: leave it out, or name statuses, or the word all alone, in zone api`},
		"count_status none":           {`"count_status": ["none"]`, `zones[0].count_status none would never charge: name statuses, such as 401 403, in zone api`},
		"count_status none, others":   {`"count_status": [401, "none"]`, `zones[0].count_status none would never charge: name statuses, such as 401 403, in zone api`},
		"count_status out of range":   {`"count_status": [600]`, `zones[0].count_status "600": it must be a code from 200 to 599 or a class from 2xx to 5xx, or the word all alone, in zone api`},
		"count and count_status_not":  {`"count_status": [401], "count_status_not": [304]`, `zones[0].count_status and count_status_not exclude each other: remove one, in zone api`},
		"settle":                      {`"settle": "end"`, `zones[0].settle: unknown field: remove it: the end of a response is awaited where cost or a status needs it`},
		"free_status":                 {`"free_status": [304]`, `zones[0].free_status: unknown field: write count_status_not with the statuses, such as [304, "5xx"]; for none write "count_status": ["all"]`},
		"batch_share":                 {`"batch_share": 10`, `zones[0].batch_share: unknown field: remove it: the batches of all Caddys hold 10 percent of events`},
		"dry_run":                     {`"dry_run": true`, `zones[0].dry_run: unknown field: write "enforce": 0`},
		"count_status_not all":        {`"count_status_not": ["all"]`, `zones[0].count_status_not all would never charge: name statuses, such as 304, in zone api`},
		"count_status_not of nothing": {`"count_status_not": []`, `zones[0].count_status_not is empty: leave it out, or name statuses, in zone api`},

		"max_wait":                        {zone: `"max_wait": "5s", "max_wait_queue": 10`},
		"max_wait negative":               {`"max_wait": "-5s"`, `zones[0].max_wait -5s: it must be above zero, and at most 100 years, in zone api`},
		"max_wait too long":               {`"max_wait": "36501d"`, `it must be above zero, and at most 100 years`},
		"max_wait_queue negative":         {`"max_wait": "5s", "max_wait_queue": -1`, `zones[0].max_wait_queue -1: it must be at least 1, in zone api`},
		"max_wait_queue without max_wait": {`"max_wait_queue": 10`, `zones[0].max_wait_queue needs max_wait: add it, such as "5s", in zone api`},
		"penalty":                         {zone: `"penalty": "10m", "algorithm": "gcra"`},
		"obey_upstream":                   {zone: `"obey_upstream": true, "algorithm": "gcra"`},
		"obey_upstream with sliding_log":  {`"obey_upstream": true, "algorithm": "sliding_log"`, `zones[0].obey_upstream does not go with sliding_log, whose clients cannot be kept refused: remove it, or use another algorithm, in zone api`},
		"obey_upstream with a reset":      {`"obey_upstream": true, "reset_status": ["5xx"]`, `zones[0].obey_upstream does not go with reset_status 503, which would end what it begins: remove one, in zone api`},
		"penalty negative":                {`"penalty": -1`, `zones[0].penalty -1ns: it must be above zero, and at most 100 years, in zone api`},
		"penalty not whole":               {`"penalty": 1500`, `zones[0].penalty 1.5µs: it must be whole microseconds, in zone api`},
		"penalty with sliding_log":        {`"penalty": "1m", "algorithm": "sliding_log"`, `zones[0].penalty does not go with sliding_log: remove it, or use another algorithm, in zone api`},

		"reserves":                    {zone: `"reserves": [{"percent": 10, "match": [{"path": ["/a"]}, {"method": ["POST"]}]}, {"percent": 90, "match": [{"path": ["/b"]}]}]`},
		"reserves of nothing":         {zone: `"reserves": []`},
		"reserve null":                {`"reserves": [null]`, `zones[0].reserves[0] is null: define or remove it, in zone api`},
		"reserve without percent":     {`"reserves": [{"match": [{"path": ["/a"]}]}]`, `zones[0].reserves[0].percent 0: it must be from 1 to 100 percent, in zone api`},
		"reserve too large":           {`"reserves": [{"percent": 101, "match": [{"path": ["/a"]}]}]`, `zones[0].reserves[0].percent 101: it must be from 1 to 100 percent, in zone api`},
		"reserve fraction":            {`"reserves": [{"percent": 2.5, "match": [{"path": ["/a"]}]}]`, `percent`},
		"reserve without match":       {`"reserves": [{"percent": 20}]`, `zones[0].reserves[0].match is missing: say for which requests it is kept, in zone api`},
		"reserve of no match":         {`"reserves": [{"percent": 20, "match": []}]`, `zones[0].reserves[0].match is missing: say for which requests it is kept, in zone api`},
		"reserves above 100":          {`"reserves": [{"percent": 60, "match": [{"path": ["/a"]}]}, {"percent": 41, "match": [{"path": ["/b"]}]}]`, `zones[0].reserves[1].percent 41 makes it 101 percent together: it must be at most 100, in zone api`},
		"reserve's unknown matcher":   {`"reserves": [{"percent": 20, "match": [{"url": ["/a"]}]}]`, `zones[0].reserves[0].match cannot be loaded: module name `},
		"reserve's unknown field":     {`"reserves": [{"percentage": 20}]`, `zones[0].reserves[0].percentage: unknown field, did you mean percent?`},
		"reserve by its single name":  {`"reserve": [{"percent": 20}]`, `zones[0].reserve: unknown field, did you mean reserves?`},
		"sliding_window at its most":  {zone: `"events": 4294967295, "algorithm": "sliding_window"`},
		"sliding_window beyond it":    {`"events": 4294967296, "algorithm": "sliding_window"`, `zones[0].events 4294967296: it must be from 1 to 2^32-1 with sliding_window, in zone api`},
		"sliding_log beyond its most": {`"events": 100001, "algorithm": "sliding_log"`, `zones[0].events 100001: it must be from 1 to 100000 with sliding_log, in zone api`},
		"sliding_log's fallback":      {`"events": "{x}", "events_fallback": 100001, "algorithm": "sliding_log"`, `zones[0].events_fallback 100001: it must be from 1 to 100000 with sliding_log, in zone api`},

		"concurrency":                       {zone: `"algorithm": "concurrency", "window": 0`},
		"concurrency charges before":        {zone: `"algorithm": "concurrency", "charge": "before"`},
		"concurrency charges after":         {`"algorithm": "concurrency", "charge": "after"`, `zones[0].charge after: concurrency always charges before; remove it, in zone api`},
		"concurrency with a short one":      {`"algorithm": "concurrency", "window": "999ms"`, `zones[0].window 999ms: with concurrency it must be from 1s to 100 years, in zone api`},
		"concurrency with count_status_not": {`"algorithm": "concurrency", "count_status_not": [304]`, `zones[0].count_status_not does not go with concurrency, which counts requests while they run: remove it, in zone api`},
		"concurrency with count_status":     {`"algorithm": "concurrency", "count_status": [401]`, `zones[0].count_status does not go with concurrency, which counts requests while they run: remove it, in zone api`},
		"concurrency with max_wait":         {`"algorithm": "concurrency", "max_wait": "1s"`, `zones[0].max_wait does not go with concurrency, where it is not known when a slot becomes free: remove it, in zone api`},
		"concurrency with penalty":          {`"algorithm": "concurrency", "penalty": "1s"`, `zones[0].penalty does not go with concurrency: remove it, or use another algorithm, in zone api`},
		"concurrency beyond its most":       {`"algorithm": "concurrency", "events": 100001`, `zones[0].events 100001: it must be from 1 to 100000 with concurrency, in zone api`},
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
		"another obedience":   {`"window": "1m"`, `"window": "1m", "obey_upstream": true`, `window 1m0s, obey_upstream;`},
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
		"inline and invalid":     {``, withZone(`"store": {"module": "redis"}`), `shards is missing: add one, such as {"name": "a", "primary": "localhost:6379"}`},
		"inline unknown field":   {``, withZone(`"store": {"module": "memory", "max": 1}`), `max: unknown field: it must be one of max_buckets, max_new_buckets`},
		"inline unknown module":  {``, withZone(`"store": {"module": "postgres"}`), `rate_limit.stores.postgres`},
		"inline without module":  {``, withZone(`"store": {}`), `store has no module: add the field module, such as redis or memory`},
		"unknown name":           {two, withZone(`"store": "asia"`), `store asia is not configured: add it to stores of the app rate_limit, or name another; there is eu, us`},
		"unknown name, no app":   {``, withZone(`"store": "asia"`), `store asia is not configured: add it to stores of the app rate_limit, or name another; there is default`},
		"no default":             {two, withZone(`"log_key": true`), `store is missing, and no configured store is called default: name one; there is eu, us`},
		"empty name":             {``, withZone(`"store": ""`), `store is no name: it must be the name of a store, or an object with the field module`},
		"number":                 {``, withZone(`"store": 5`), `store is no name: it must be the name of a store, or an object with the field module`},
		"list":                   {``, withZone(`"store": ["default"]`), `store is a list: it must be the name of a store, or an object with the field module`},
		"app's unknown field":    {`{"store": {}}`, withZone(`"log_key": true`), `rate_limit: store: unknown field, did you mean stores?`},
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

// TestStoreWithoutModuleIsNotShown: it may have passwords.
func TestStoreWithoutModuleIsNotShown(t *testing.T) {
	for name, value := range map[string]string{
		"no module": `{"password": "hunter2"}`, "a number": `{"module": 5, "password": "hunter2"}`, "another case": `{"Module": "redis", "password": "hunter2"}`,
		"a list": `[{"module": "redis", "password": "hunter2"}]`, "a text": `"redis://u:hunter2@h"`,
	} {
		for place, config := range map[string][]byte{
			"a handler": configOf("", withZone(`"store": `+value)),
			"the app":   configOf(`{"stores": {"default": `+value+`}}`, withZone(`"log_key": true`)),
		} {
			if err := caddytest.Validate(config); err == nil || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("%s in %s: %v", name, place, err)
			}
		}
	}
}

func TestConfigOfStores(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_HOST", "redis-a")
	t.Setenv("SHARDLIMIT_TEST_URL", "redis://redis-a")
	for name, test := range map[string]struct{ app, want string }{
		"memory's max_buckets":    {`{"stores": {"default": {"module": "memory", "max_buckets": -1}}}`, `max_buckets -1: it must be at least 1`},
		"memory's max_keys":       {`{"stores": {"default": {"module": "memory", "max_keys": 1}}}`, `max_keys: unknown field: write max_buckets`},
		"redis":                   {app: redisOf(`"db": 1`)},
		"redis unknown field":     {redisOf(`"dbs": 1`), `dbs: unknown field, did you mean db?`},
		"db negative":             {redisOf(`"db": -1`), `redis store: db -1: it must not be negative`},
		"pool_size negative":      {redisOf(`"pool_size": -1`), `redis store: pool_size -1: it must be from 1 to 1000`},
		"check_timeout negative":  {redisOf(`"check_timeout": "-1s"`), `redis store: check_timeout -1s: it must be positive`},
		"charge_delay negative":   {redisOf(`"charge_delay": -1`), `redis store: charge_delay -1ns: it must be from 0 to 1s`},
		"charge_timeout negative": {redisOf(`"charge_timeout": -1`), `redis store: charge_timeout -1ns: it must be positive`},
		"ledger":                  {app: redisOf(`"ledger_trust": "2s", "max_buckets": 1`)},
		"no ledger_trust":         {app: redisOf(`"ledger_trust": 0, "max_buckets": 0`)},
		"ledger_trust negative":   {redisOf(`"ledger_trust": "-1s"`), `redis store: ledger_trust -1s: it must be at least 0`},
		"max_buckets negative":    {redisOf(`"max_buckets": -1`), `redis store: max_buckets -1: it must be at least 1`},
		"plain_charges":           {redisOf(`"plain_charges": "off"`), `plain_charges: unknown field: remove it: a script is called where the server refuses plain commands`},
		"previous_shards":         {redisOf(`"previous_shards": ["a"]`), `previous_shards: unknown field: write previous_weights in each shard that changes`},
		"key_prefix characters":   {redisOf(`"key_prefix": "a{b}"`), `redis store: key_prefix "a{b}": use only letters, digits and the characters _ . : -`},
		"read_from unknown":       {redisOf(`"read_from": "all"`), `redis store: read_from "all": it must be replicas or primary`},
		"clock":                   {redisOf(`"clock": "local"`), `clock: unknown field: remove it: windows end by the clock of the primary`},
		"pipelining unknown":      {redisOf(`"pipelining": "auto"`), `redis store: pipelining "auto": it must be on or off`},
		"on_error unknown":        {redisOf(`"on_error": "retry"`), `redis store: on_error "retry": it must be allow, deny or local`},
		"no shards":               {shardsOf(``), `shards is missing: add one, such as {"name": "a", "primary": "localhost:6379"}`},
		"shard null":              {shardsOf(`null`), `shards[0] is null: define or remove it`},
		"shard without a name":    {shardsOf(`{"primary": "redis-a"}`), `shards[0] has no name: give it one`},
		"shard with a bad name":   {shardsOf(`{"name": "a/b", "primary": "redis-a"}`), `shards[0] has the name "a/b": use only letters, digits and the characters _ . -`},
		"shard without a primary": {shardsOf(`{"name": "a", "replicas": ["redis-a1"]}`), `shards[0] has no primary: add that, with an address such as localhost:6379, or url, sentinel or cluster, in shard a`},
		"shard's unknown field":   {shardsOf(`{"name": "a", "primary": "redis-a", "replica": "redis-b"}`), `shards[0].replica: unknown field, did you mean replicas?`},
		"weight negative":         {shardsOf(`{"name": "a", "primary": "redis-a", "weight": -1}`), `shards[0].weight -1: it must be from 1 to 1000, or 0 for a shard that is on its way out, in shard a`},
		"weight too large":        {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 1001}`), `shards[0].weight 1001: it must be from 1 to 1000, or 0 for a shard that is on its way out, in shard a`},
		"weight before negative":  {shardsOf(`{"name": "a", "primary": "redis-a", "previous_weights": [-1]}`), `shards[0].previous_weights -1: it must be from 1 to 1000, or 0 for a new shard, in shard a`},
		"weight before the same":  {shardsOf(`{"name": "a", "primary": "redis-a", "previous_weights": [1]}`), `shards[0].previous_weights 1 is the weight itself, so nothing changes: remove it, in shard a`},
		"weight zero":             {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 0}`), `shards[0].weight 0: say what it was, as in "previous_weights": [1], so that the shard's clients keep their counts, or remove the shard, in shard a`},
		"weights zero":            {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 0, "previous_weights": [1]}`), `shards[0] has weight 0, as all shards have: leave one that owns the clients`},
		"weights before zero":     {shardsOf(`{"name": "a", "primary": "redis-a", "previous_weights": [0]}`), `shards[0].previous_weights 0, as all shards have: remove it, because no shard is left from before`},
		"shard changes":           {app: shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "b", "primary": "redis-b", "previous_weights": [0]}, {"name": "c", "primary": "redis-c", "weight": 0, "previous_weights": [3]}`)},
		"retired":                 {shardsOf(`{"name": "a", "primary": "redis-a", "retired": true}`), `shards[0].retired: unknown field: write "weight": 0, and what it was as previous_weights`},
		"weight fraction":         {shardsOf(`{"name": "a", "primary": "redis-a", "weight": 1.5}`), `weight`},
		"replica empty":           {shardsOf(`{"name": "a", "primary": "redis-a", "replicas": [""]}`), `shards[0]: address "": it must be host, host:port or unix/path, with a port from 1 to 65535, in shard a`},
		"shards of one name":      {shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "a", "primary": "redis-b"}`), `shards[1] has the name of another shard, a: give each its own`},
		"shards of one primary":   {shardsOf(`{"name": "a", "primary": "redis-a"}, {"name": "b", "primary": "redis-a:6379"}`), `shards[1] has the address redis-a:6379 of shard a: give each its own servers`},

		"address resolves":                   {app: shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_HOST}:7000"}`)},
		"address resolves to an invalid one": {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_URL}"}`), `shards[0]: an address is a URL: write it as url, in place of that option, in shard a`},
		"addresses resolve to one":           {shardsOf(`{"name": "a", "primary": "{env.SHARDLIMIT_TEST_HOST}"}, {"name": "b", "primary": "redis-a"}`), `shards[1] has the address redis-a:6379 of shard a: give each its own servers`},
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
		"none":                      {shardsOf(`{"name": "a"}`), `shards[0] has no primary: add that, with an address such as localhost:6379, or url, sentinel or cluster, in shard a`},
		"empty cluster":             {shardsOf(`{"name": "a", "cluster": []}`), `shards[0] has no primary: add that, with an address such as localhost:6379, or url, sentinel or cluster, in shard a`},
		"url of the store":          {app: `{"stores": {"default": {"module": "redis", "url": "redis://redis-a"}}}`},
		"url of the store, wrong":   {`{"stores": {"default": {"module": "redis", "url": "http://redis-a"}}}`, `redis store: shard default: url is not understood`},
		"url and shards":            {`{"stores": {"default": {"module": "redis", "url": "redis://redis-a", "shards": [{"name": "a", "primary": "redis-a"}]}}}`, `redis store: url is for a store of one shard: remove it, and give each shard its own`},
		"two":                       {shardsOf(`{"name": "a", "primary": "redis-a", "cluster": ["redis-1"]}`), `shards[0].cluster does not go with primary: a shard is found in one way, so keep one of them, in shard a`},
		"empty sentinel":            {shardsOf(`{"name": "a", "sentinel": {}}`), `shards[0].sentinel.master is missing: add the name under which the sentinels watch the primary, such as mymaster, in shard a`},
		"sentinel without addrs":    {shardsOf(`{"name": "a", "sentinel": {"master": "mymaster"}}`), `shards[0].sentinel.addrs is missing: add the addresses of the sentinels, such as "sentinel-1", in shard a`},
		"sentinel without a master": {shardsOf(`{"name": "a", "sentinel": {"addrs": ["sentinel-1"]}}`), `shards[0].sentinel.master is missing: add the name under which the sentinels watch the primary, such as mymaster, in shard a`},
		"sentinel's unknown field":  {shardsOf(`{"name": "a", "sentinel": {"master": "mymaster", "addresses": ["sentinel-1"]}}`), `shards[0].sentinel.addresses: unknown field: it must be one of master, addrs`},
		"sentinel's empty address":  {shardsOf(`{"name": "a", "sentinel": {"master": "mymaster", "addrs": [""]}}`), `shards[0]: address "": it must be host, host:port or unix/path, with a port from 1 to 65535, in shard a`},
		"master resolves":           {app: shardsOf(`{"name": "a", "sentinel": {"master": "{env.SHARDLIMIT_TEST_HOST}", "addrs": ["sentinel-1"]}}`)},
		"master resolves to a bad name": {
			shardsOf(`{"name": "a", "sentinel": {"master": "{env.SHARDLIMIT_TEST_MASTER}", "addrs": ["sentinel-1"]}}`), `redis store: shards[0].sentinel has the master "my master": write the name`,
		},
		"sentinels of two masters":       {app: shardsOf(sentinel + `, ` + strings.NewReplacer(`"b"`, `"d"`, "mymaster", "other").Replace(sentinel))},
		"sentinels of one master":        {shardsOf(sentinel + `, ` + strings.Replace(sentinel, `"b"`, `"d"`, 1)), `shards[1] has the master mymaster of shard b, at the same sentinel sentinel-1:26379: give each its own`},
		"replicas of a cluster":          {shardsOf(`{"name": "a", "cluster": ["redis-1"], "replicas": ["redis-2"]}`), `shards[0].replicas does not go with cluster: the nodes name the replicas, so remove it, in shard a`},
		"cluster on a socket":            {shardsOf(`{"name": "a", "cluster": ["unix//run/redis.sock"]}`), `shards[0]: address "unix//run/redis.sock": it must be host or host:port, because the nodes of a Redis Cluster are found by that, in shard a`},
		"cluster's address resolves":     {shardsOf(static + `, {"name": "c", "cluster": ["redis-1", "{env.SHARDLIMIT_TEST_HOST}"]}`), `shards[1] has the address redis-a:6379 of shard a: give each its own servers`},
		"cluster's address is a primary": {shardsOf(static + `, {"name": "c", "cluster": ["redis-a"]}`), `shards[1] has the address redis-a:6379 of shard a: give each its own servers`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf(test.app, withZone(`"log_key": true`)), test.want) })
	}
}

func TestConfigOfConnections(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_USER", "limiter")
	for name, test := range map[string]struct{ app, want string }{
		"of a shard":                   {app: shardsOf(`{"name": "a", "primary": "redis-a", "username": "{env.SHARDLIMIT_TEST_USER}", "password": "x", "db": 1, "tls": {}, "pool_size": 2, "max_replica_lag": "1s"}`)},
		"db 0":                         {app: redisOf(`"db": 0`)},
		"max_replica_lag negative":     {redisOf(`"max_replica_lag": "-1s"`), `redis store: max_replica_lag -1s: it must be positive`},
		"shard's db negative":          {shardsOf(`{"name": "a", "primary": "redis-a", "db": -1}`), `shards[0].db -1: it must not be negative, in shard a`},
		"shard's pool_size":            {shardsOf(`{"name": "a", "primary": "redis-a", "pool_size": 1001}`), `shards[0].pool_size 1001: it must be from 1 to 1000, in shard a`},
		"dial_timeout":                 {redisOf(`"dial_timeout": "1s"`), `dial_timeout: unknown field: remove it, or raise check_timeout: connecting may take four times as long`},
		"password_command":             {app: redisOf(`"password_command": {"command": ["token"], "lifetime": "10s"}`)},
		"password_command's lifetime":  {redisOf(`"password_command": {"command": ["token"], "lifetime": "9s"}`), `password_command.lifetime 9s: it must be at least 10s`},
		"password_command empty":       {redisOf(`"password_command": {}`), `redis store: password_command is empty: name a command`},
		"password_lifetime":            {redisOf(`"password_lifetime": "1m"`), `password_lifetime: unknown field: write lifetime in password_command`},
		"sentinel_password unused":     {redisOf(`"sentinel_password": "x"`), `redis store: sentinel_password has no effect, as no shard has the option sentinel`},
		"username without a password":  {redisOf(`"username": "limiter"`), `redis store: username needs a password`},
		"username, shard's password":   {app: strings.Replace(redisOf(`"username": "limiter"`), `"redis-a"`, `"redis-a", "password": "x"`, 1)},
		"sentinel_username on its own": {shardsOf(`{"name": "a", "sentinel": {"master": "m", "addrs": ["s"]}, "sentinel_username": "x", "password": "y"}`), `redis store: shard a has a sentinel_username, which needs a password`},
		"tls unknown field":            {redisOf(`"tls": {"cacert": "x"}`), `tls.cacert: unknown field, did you mean cert?`},
		"tls on a socket":              {shardsOf(`{"name": "a", "primary": "unix//run/redis.sock", "tls": {}}`), `shards[0].tls does not go with the address unix//run/redis.sock: Redis speaks no TLS on unix sockets, so remove it, in shard a`},
		"tls cert without key":         {redisOf(`"tls": {"cert": "x"}`), `redis store: tls: cert has no key: add the file with the private key`},
		"tls key without cert":         {redisOf(`"tls": {"key": "x"}`), `redis store: tls: key has no cert: add the file with the certificate`},
		"tls insecure with ca":         {redisOf(`"tls": {"ca": "x", "insecure_skip_verify": true}`), `redis store: tls: ca has no effect with insecure_skip_verify`},
		"tls server_name":              {redisOf(`"tls": {"server_name": "a/b"}`), `redis store: tls: server_name "a/b": it must be a host's name or an IP address`},
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
	garbage := filepath.Join(t.TempDir(), "garbage.pem")
	must(t, "write a file", os.WriteFile(garbage, []byte("no PEM"), 0o600))
	t.Setenv("SHARDLIMIT_TEST_CA", ca.File())
	pair := func(cert, key string) string { return fmt.Sprintf(`{"cert": %q, "key": %q}`, cert, key) }
	for name, test := range map[string]struct{ tls, want string }{
		"good":           {tls: fmt.Sprintf(`{"ca": %q, "cert": %q, "key": %q}`, ca.File(), client.CertFile(), client.KeyFile())},
		"placeholder":    {tls: `{"ca": "{env.SHARDLIMIT_TEST_CA}"}`},
		"ca garbage":     {fmt.Sprintf(`{"ca": %q}`, garbage), `tls: read ca ` + garbage + `: it has no certificate in PEM`},
		"ca is a key":    {fmt.Sprintf(`{"ca": %q}`, client.KeyFile()), `tls: read ca ` + client.KeyFile() + `: it has no certificate in PEM`},
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

// TestConfigErrorsNameFields checks that a value of a wrong type, or a field with a wrong name, is found by its path.
func TestConfigErrorsNameFields(t *testing.T) {
	zone := func(fields string) []byte {
		return configOf("", handlerOf(`"zones": [{"name": "a", "key": "k", "events": 1, "window": "1s"}, {"name": "b", `+fields+`}]`))
	}
	for want, config := range map[string][]byte{
		`zones[1].evnts: unknown field, did you mean events?`:                                    zone(`"evnts": 1`),
		`zones[1].events: true: it must be a whole number, or a text with a placeholder`:         zone(`"events": true`),
		`zones[1].max_wait: it must be a time span, such as "250ms", "10s" or "1d", or a number`: zone(`"max_wait": "5"`),
		`zones[1].ipv4_prefix: it must be a whole number`:                                        zone(`"ipv4_prefix": "24"`),
		`zones[1].align: it must be true or false`:                                               zone(`"align": "yes"`),
		`zones[1].reserves[0].percent: it must be a whole number`:                                zone(`"reserves": [{"percent": "5"}]`),
		`zones[1].reserves[1]: it must be an object, in { }`:                                     zone(`"reserves": [{"percent": 5}, 6]`),
		`zones[1].match: it must be a list, in [ ]`:                                              zone(`"match": {"path": ["/"]}`),
		`zones: it must be a list, in [ ]`:                                                       configOf("", handlerOf(`"zones": {}`)),
		`rollout.percent: it must be a number`:                                                   configOf("", withZone(`"rollout": {"percent": "5%"}`)),
		`rate_limits.api.max_events: it must be a whole number`:                                  configOf("", handlerOf(`"rate_limits": {"api": {"max_events": "5"}}`)),
		`shards[1].sentinel.addrs: it must be a list, in [ ]`:                                    configOf(shardsOf(`{"name": "a", "primary": "a"}, {"name": "b", "sentinel": {"addrs": "x"}}`)),
		`tls.insecure_skip_verify: it must be true or false`:                                     configOf(redisOf(`"tls": {"insecure_skip_verify": 1}`)),
		`stores: it must be an object, in { }`:                                                   configOf(`{"stores": []}`, withZone(`"log_key": true`)),
	} {
		t.Run(want, func(t *testing.T) { loads(t, config, want) })
	}
}

// TestConfigErrorsQuoteNoSecret, not even part of one that has a brace.
func TestConfigErrorsQuoteNoSecret(t *testing.T) {
	for _, secret := range []string{`mark{er}`, `{mark}er`, `mark{file.a{er}`, `{env.SHARDLIMIT_TEST_UNSET}marker`, `{{mark}}{er}`} {
		for _, field := range []string{"username", "password", "sentinel_password", "key_secret"} {
			app := strings.Replace(redisOf(fmt.Sprintf(`%q: %q`, field, secret)), `"primary": "redis-a"`, `"sentinel": {"master": "m", "addrs": ["s"]}`, 1)
			warnings, err := caddytest.Warnings(t, configOf(app, withZone(`"log_key": true`)))
			if text := fmt.Sprint(err, warnings); !strings.Contains(text, field+": ") || strings.Contains(text, "mark") {
				t.Errorf("%s %s: %s", field, secret, text)
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

		"without a store":          {withZone(`"rollout": {"percent": 10}`), `rollout.store is missing: add the store to which clients are moved`},
		"negative":                 {withZone(`"rollout": {"store": "other", "percent": -0.01}`), `rollout.percent -0.01: it must be from 0 to 100, such as 12.5`},
		"too large":                {withZone(`"rollout": {"store": "other", "percent": 100.01}`), `rollout.percent 100.01: it must be from 0 to 100, such as 12.5`},
		"percent as a text":        {withZone(`"rollout": {"store": "other", "percent": "10"}`), `percent`},
		"unknown store":            {withZone(`"rollout": {"store": "another", "percent": 10}`), `rollout.store another is not configured: add it to stores of the app rate_limit, or name another; there is default, guest, other`},
		"own store":                {withZone(`"store": "other", "rollout": {"store": "other", "percent": 10}`), `rollout.store other: that is the handler's own store: name the store to which clients are moved, or remove rollout`},
		"own store by default":     {withZone(`"rollout": {"store": "default", "percent": 10}`), `rollout.store default: that is the handler's own store: name the store to which clients are moved, or remove rollout`},
		"a store of its own":       {withZone(`"rollout": {"store": {"module": "memory"}, "percent": 10}`), `store`},
		"unknown field":            {withZone(`"rollout": {"store": "other", "share": 10}`), `rollout.share: unknown field: it must be one of store, percent`},
		"text":                     {withZone(`"rollout": "other 10"`), `rollout`},
		"0 percent, unknown store": {withZone(`"rollout": {"store": "another", "percent": 0}`), `rollout.store another is not configured: add it to stores of the app rate_limit, or name another; there is default, guest, other`},
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
		"store is invalid":         {`"a": ` + redisModule + `, "b": {"module": "redis"}`, []string{`"store": "a", ` + goodZones}, "shards is missing"},
		"module is no store":       {`"a": ` + redisModule + `, "b": {"module": "stranger"}`, []string{`"store": "a", ` + goodZones}, "is not a rate_limit store"},
		"store is unknown":         {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": "b", ` + goodZones}, "store b is not configured"},
		"rollout's store is not":   {`"a": ` + redisModule, []string{`"store": ` + redisModule + `, "rollout": {"store": "b"}, ` + goodZones}, "rollout.store b is not configured"},
		"zone is invalid":          {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": "a", "zones": []`}, "zones is empty"},
		"zones differ":             {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": "a", ` + otherZones}, "zone api is defined twice, differently"},
		"matchers do not load":     {``, []string{`"store": ` + redisModule + `, ` + twoZones}, "zones[1].match cannot be loaded"},
		"inline store does not":    {``, []string{goodZones, `"store": {"module": "broken"}, ` + goodZones}, "out of order"},
		"inline zones differ":      {``, []string{`"store": ` + redisModule + `, ` + goodZones, `"store": ` + redisModule + `, ` + otherZones}, "zone api is defined twice, differently"},
		"a later handler does not": {`"a": ` + redisModule, []string{`"store": "a", ` + goodZones, `"store": ` + memoryModule + `, ` + goodZones, `"store": 5, ` + goodZones}, "store is no name"},
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
