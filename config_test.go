package shardlimit_test

import (
	"fmt"
	"strings"
	"testing"
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

		"free_status numbers":      {handler: zoneOf(`"free_status": [304, 404]`)},
		"free_status mixed":        {handler: zoneOf(`"free_status": [304, "404", "5xx"]`)},
		"free_status none":         {handler: zoneOf(`"free_status": ["none"]`)},
		"free_status null":         {handler: zoneOf(`"free_status": null`)},
		"free_status fraction":     {zoneOf(`"free_status": [304.5]`), `zone api: free_status "304.5": it must be a code from 200 to 599`},
		"free_status out of range": {zoneOf(`"free_status": [199]`), `zone api: free_status "199": it must be a code from 200 to 599`},
		"free_status bool":         {zoneOf(`"free_status": [true]`), `status true: it must be a code, such as 304, or a class, such as 5xx`},
		"free_status no list":      {zoneOf(`"free_status": 304`), `304: it must be a list of statuses, such as [304]`},

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
		"equal by default":        {handlers: []string{zone(`10`, ``), zone(`"10"`, `, "free_status": [304], "charge": "after"`)}},
		"equal in another order":  {handlers: []string{zone(`10`, `, "free_status": [404, 304]`), zone(`10`, `, "free_status": [304, 404, 304]`)}},
		"equal in either form":    {handlers: []string{zone(`10`, ``), handlerOf(`"rate_limits": {"api": {"key": "static", "max_events": 10, "window": "60s"}}`)}},
		"another number":          {[]string{zone(`10`, ``), zone(`20`, ``)}, `zone api is defined twice, differently: once with key static, events 10, window 1m0s, once with key static, events 20, window 1m0s; make them equal or rename one`},
		"another fallback":        {[]string{zone(`"{x}"`, `, "events_fallback": 1`), zone(`"{x}"`, `, "events_fallback": 2`)}, `once with key static, events {x} 1, window 1m0s, once with key static, events {x} 2, window 1m0s`},
		"another status":          {[]string{zone(`10`, ``), zone(`10`, `, "free_status": ["none"]`)}, `once with key static, events 10, window 1m0s, once with key static, events 10, window 1m0s, free_status none;`},
		"another IPv4 prefix":     {[]string{zone(`10`, ``), zone(`10`, `, "ipv4_prefix": 24`)}, `window 1m0s, ipv4_prefix 24;`},
		"another IPv6 prefix":     {[]string{zone(`10`, ``), zone(`10`, `, "ipv6_prefix": 64`)}, `window 1m0s, ipv6_prefix 64;`},
		"another on_error":        {[]string{zone(`10`, ``), zone(`10`, `, "on_error": "deny"`)}, `window 1m0s, on_error deny;`},
		"another split of a key":  {[]string{handlerOf(`"zones": [{"name": "api", "key": ["a b"], "events": 1, "window": "1s"}]`), handlerOf(`"zones": [{"name": "api", "key": ["a", "b"], "events": 1, "window": "1s"}]`)}, `once with key "a b", events 1, window 1s, once with key a b, events 1, window 1s`},
		"in stores of their own":  {handlers: []string{withZone(`"store": {"module": "memory"}`), zone(`20`, ``)}},
		"in equal inline stores":  {[]string{handlerOf(`"store": {"module": "memory"}, "zones": [{"name": "api", "key": "k", "events": 1, "window": "1s"}]`), handlerOf(`"store": {"module": "memory"}, "zones": [{"name": "api", "key": "k", "events": 2, "window": "1s"}]`)}, `zone api is defined twice, differently`},
		"default store by name":   {[]string{withZone(`"store": "default"`), zone(`20`, ``)}, `zone api is defined twice, differently`},
		"another field elsewhere": {handlers: []string{withZone(`"jitter": 0.5`), withZone(`"log_key": true`)}},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf("", test.handlers...), test.want) })
	}
}
