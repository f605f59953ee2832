package shardlimit_test

import (
	"testing"
)

func TestConfigOfZoneOptions(t *testing.T) {
	for name, test := range map[string]struct{ zone, want string }{
		"algorithm":               {zone: `"algorithm": "sliding_log"`},
		"algorithm empty":         {zone: `"algorithm": ""`},
		"algorithm unknown":       {`"algorithm": "token_bucket"`, `zone api: algorithm "token_bucket": it must be fixed_window, sliding_window, sliding_log, gcra or concurrency`},
		"align":                   {zone: `"align": true`},
		"align false":             {zone: `"align": false, "algorithm": "gcra"`},
		"align with gcra":         {`"align": true, "algorithm": "gcra"`, `zone api: align goes with algorithm fixed_window only: remove it`},
		"align as text":           {`"align": "yes"`, `align`},
		"burst":                   {zone: `"burst": 5, "algorithm": "gcra"`},
		"burst zero":              {zone: `"burst": 0`},
		"burst negative":          {`"burst": -1, "algorithm": "gcra"`, `zone api: burst -1: it must be from 1 to 2^52`},
		"burst too large":         {`"burst": 4503599627370497, "algorithm": "gcra"`, `burst 4503599627370497: it must be from 1 to 2^52`},
		"burst with fixed_window": {`"burst": 5`, `zone api: burst goes with algorithm gcra only: remove it, or write algorithm gcra`},
		"burst too slow":          {`"burst": 101, "events": 1, "window": "365d", "algorithm": "gcra"`, `zone api: burst 101 would take more than 100 years to come back, at 1 in 8760h0m0s: lower it, or raise events to 2`},
		"burst of a century":      {zone: `"burst": 200, "events": 2, "window": "365d", "algorithm": "gcra"`},
		"burst at its largest":    {zone: `"burst": 4503599627370496, "events": 4503599627370496, "window": "36500d", "algorithm": "gcra"`},

		"cost as a number":          {zone: `"cost": 5`},
		"cost as a string":          {zone: `"cost": "5"`},
		"cost zero":                 {zone: `"cost": 0`},
		"cost as a placeholder":     {zone: `"cost": "{http.response.header.X-Cost}"`},
		"cost empty":                {zone: `"cost": ""`},
		"cost negative":             {`"cost": -1`, `zone api: cost "-1": it must be a whole number from 0 to 2^52, or a placeholder`},
		"cost fraction":             {`"cost": 0.5`, `zone api: cost "0.5": it must be a whole number from 0 to 2^52, or a placeholder`},
		"cost text":                 {`"cost": "much"`, `zone api: cost "much": it must be a whole number from 0 to 2^52, or a placeholder`},
		"cost bool":                 {`"cost": true`, `true: it must be a whole number, or a text with a placeholder`},
		"cost too large":            {`"cost": 4503599627370497`, `it must be a whole number from 0 to 2^52`},
		"cost of nothing":           {`"cost": "{}"`, `zone api: cost {}: it must be a number, or a text with a placeholder in braces`},
		"cost above events":         {`"cost": 11`, `zone api: cost 11 is more than the 10 that the zone ever admits, so no request would pass: lower it, or raise events`},
		"cost above burst":          {`"cost": 6, "burst": 5, "algorithm": "gcra"`, `cost 6 is more than the 5 that the zone ever admits, so no request would pass: lower it, or raise burst`},
		"cost below a large burst":  {zone: `"cost": 11, "burst": 20, "algorithm": "gcra"`},
		"cost and dynamic events":   {zone: `"cost": 11, "events": "{http.vars.quota}", "events_fallback": 10`},
		"charge before":             {zone: `"charge": "before"`},
		"batch as a number":         {zone: `"batch": 5, "charge": "before"`},
		"batch as a string":         {zone: `"batch": "5", "charge": "before"`},
		"batch of all events":       {zone: `"batch": 10, "charge": "before", "algorithm": "sliding_window"`},
		"batch above the fallback":  {zone: `"batch": 11, "charge": "before", "events": "{x}", "events_fallback": 10`},
		"batch at its largest":      {zone: `"batch": 9007199254740991, "charge": "before", "events": "{x}", "events_fallback": 10`},
		"batch too large":           {`"batch": 9007199254740992, "charge": "before", "events": "{x}", "events_fallback": 10`, `zone api: batch "9007199254740992": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch above events":        {`"batch": 11, "charge": "before"`, `zone api: batch 11: it must be at most events, which is 10`},
		"batch off":                 {zone: `"batch": "off"`},
		"batch off elsewhere":       {zone: `"batch": "off", "algorithm": "gcra", "charge": "after"`},
		"batch empty":               {zone: `"batch": ""`},
		"batch auto":                {zone: `"batch": "auto", "charge": "before"`},
		"batch text":                {`"batch": "on", "charge": "before"`, `zone api: batch "on": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch zero":                {`"batch": 0, "charge": "before"`, `zone api: batch "0": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch negative":            {`"batch": -1, "charge": "before"`, `zone api: batch "-1": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch fraction":            {`"batch": 1.5, "charge": "before"`, `zone api: batch "1.5": it must be off, auto or a whole number from 1 to 2^53-1`},
		"batch bool":                {`"batch": false`, `false: it must be off, auto or a whole number`},
		"batch without charge":      {`"batch": 5`, `zone api: batch needs charge before: write it, or remove batch`},
		"batch with charge after":   {`"batch": "auto", "charge": "after"`, `zone api: batch needs charge before: write it, or remove batch`},
		"batch with gcra":           {`"batch": 5, "charge": "before", "algorithm": "gcra"`, `zone api: batch does not go with gcra, for it would defeat its smoothness: remove it, or use fixed_window or sliding_window`},
		"batch with sliding_log":    {`"batch": 5, "charge": "before", "algorithm": "sliding_log"`, `zone api: batch does not go with sliding_log, which keeps events one by one: remove it, or use fixed_window or sliding_window`},
		"batch with concurrency":    {`"batch": 5, "algorithm": "concurrency"`, `zone api: batch does not go with concurrency, which keeps events one by one: remove it, or use fixed_window or sliding_window`},
		"batch with reserves":       {`"batch": 5, "charge": "before", "reserves": [{"percent": 10, "match": [{"path": ["/a"]}]}]`, `zone api: batch does not go with reserve, for what is reserved could not be kept apart: remove one`},
		"batch_share":               {zone: `"batch": "auto", "batch_share": 100, "charge": "before"`},
		"batch_share zero":          {zone: `"batch_share": 0`},
		"batch_share negative":      {`"batch": "auto", "batch_share": -1, "charge": "before"`, `zone api: batch_share -1: it must be from 1 to 100 percent`},
		"batch_share too large":     {`"batch": "auto", "batch_share": 101, "charge": "before"`, `zone api: batch_share 101: it must be from 1 to 100 percent`},
		"batch_share fraction":      {`"batch": "auto", "batch_share": 0.5, "charge": "before"`, `batch_share`},
		"batch_share without batch": {`"batch_share": 10`, `zone api: batch_share needs batch auto: write it, or remove batch_share`},
		"batch_share of a number":   {`"batch": 5, "batch_share": 10, "charge": "before"`, `zone api: batch_share needs batch auto: write it, or remove batch_share`},
		"count_status":              {zone: `"count_status": [401, "403", "5xx"]`},
		"count_status null":         {zone: `"count_status": null, "free_status": [304]`},
		"count_status of nothing":   {`"count_status": []`, `zone api: count_status is empty: leave it out, or name statuses`},
		"count_status none":         {`"count_status": ["none"]`, `zone api: count_status none would never charge: name statuses, such as 401 403`},
		"count_status none, others": {`"count_status": [401, "none"]`, `zone api: count_status none would never charge`},
		"count_status out of range": {`"count_status": [600]`, `zone api: count_status "600": it must be a code from 200 to 599 or a class from 2xx to 5xx`},
		"count and free_status":     {`"count_status": [401], "free_status": [304]`, `zone api: count_status and free_status exclude each other: remove one`},
		"free_status of nothing":    {`"free_status": []`, `zone api: free_status is empty: leave it out, or name statuses`},

		"max_wait":                        {zone: `"max_wait": "5s", "max_wait_queue": 10`},
		"max_wait negative":               {`"max_wait": "-5s"`, `zone api: max_wait -5s: it must be above zero, and at most 100 years`},
		"max_wait too long":               {`"max_wait": "36501d"`, `it must be above zero, and at most 100 years`},
		"max_wait_queue negative":         {`"max_wait": "5s", "max_wait_queue": -1`, `zone api: max_wait_queue -1: it must be at least 1`},
		"max_wait_queue without max_wait": {`"max_wait_queue": 10`, `zone api: max_wait_queue needs max_wait: add it, such as max_wait 5s`},
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

		"concurrency":                   {zone: `"algorithm": "concurrency", "window": 0`},
		"concurrency charges before":    {zone: `"algorithm": "concurrency", "charge": "before"`},
		"concurrency charges after":     {`"algorithm": "concurrency", "charge": "after"`, `zone api: charge after: concurrency always charges before; remove it`},
		"concurrency with a short one":  {`"algorithm": "concurrency", "window": "999ms"`, `zone api: window 999ms: with concurrency it must be from 1s to 100 years`},
		"concurrency with free_status":  {`"algorithm": "concurrency", "free_status": [304]`, `zone api: free_status does not go with concurrency`},
		"concurrency with count_status": {`"algorithm": "concurrency", "count_status": [401]`, `zone api: count_status does not go with concurrency`},
		"concurrency with max_wait":     {`"algorithm": "concurrency", "max_wait": "1s"`, `zone api: max_wait does not go with concurrency`},
		"concurrency with penalty":      {`"algorithm": "concurrency", "penalty": "1s"`, `zone api: penalty does not go with concurrency`},
		"concurrency beyond its most":   {`"algorithm": "concurrency", "events": 100001`, `zone api: events 100001: it must be from 1 to 100000 with concurrency`},
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
		"equal batch_share":   {one: `"window": "1m", "charge": "before", "batch": "auto"`, other: `"window": "1m", "charge": "before", "batch": "auto", "batch_share": 10`},
		"another batch":       {`"window": "1m", "charge": "before"`, `"window": "1m", "charge": "before", "batch": 5`, `charge before, batch 5;`},
		"another batch_share": {`"window": "1m", "charge": "before", "batch": "auto"`, `"window": "1m", "charge": "before", "batch": "auto", "batch_share": 20`, `charge before, batch auto, batch_share 20;`},
		"another percentage":  {`"window": "1m"`, `"window": "1m", "reserves": [{"percent": 5, "match": [{"path": ["/a"]}]}]`, `window 1m0s, reserve 5;`},
		"another wait":        {`"window": "1m"`, `"window": "1m", "max_wait": "1s"`, `window 1m0s, max_wait 1s;`},
		"another penalty":     {`"window": "1m"`, `"window": "1m", "penalty": "1s"`, `window 1m0s, penalty 1s;`},
		"another alignment":   {`"window": "1m"`, `"window": "1m", "align": true`, `window 1m0s, align;`},
		"another counted one": {`"window": "1m"`, `"window": "1m", "count_status": [403, 401]`, `window 1m0s, count_status 401 403;`},
	} {
		t.Run(name, func(t *testing.T) { loads(t, configOf("", zone(test.one), zone(test.other)), test.want) })
	}
}

func TestConfigOfPenaltyInAStoreThatKnowsNone(t *testing.T) {
	const app = `{"stores": {"default": {"module": "guest", "plain": true}}}`
	loads(t, configOf(app, zoneOf(`"algorithm": "gcra"`)), "")
	loads(t, configOf(app, zoneOf(`"penalty": "1m"`)), "zone api: penalty does not go with the store default: remove it")
	if n := guests.open.Load(); n != 0 {
		t.Errorf("%d stores are still open", n)
	}
}
