package limiter

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// memoryModule opens stores in memory.
type memoryModule struct{ *memory.Buckets }

func (m memoryModule) OpenStore(string) (store.Store, error) {
	return memory.New(m.Buckets, memory.Options{}), nil
}
func (memoryModule) CloseStore()            {}
func (memoryModule) OnErrorDefault() string { return stores.OnErrorAllow }

// remoteModule opens stores that decide elsewhere, as one of Redis does. Nothing calls them.
type remoteModule struct{ onError string }

func (remoteModule) OpenStore(string) (store.Store, error) { return struct{ store.Remote }{}, nil }
func (remoteModule) CloseStore()                           {}
func (m remoteModule) OnErrorDefault() string              { return m.onError }

// ownModule opens stores of another module in this process.
type ownModule struct{ remoteModule }

func (ownModule) OpenStore(string) (store.Store, error) { return struct{ store.Store }{}, nil }

func loadIn(t *testing.T, module stores.Module, zones ...*Zone) *stores.Handle {
	t.Helper()
	handle := &stores.Handle{Name: t.Name(), Module: module, OnError: module.OnErrorDefault(), Logger: zap.NewNop()}
	if _, err := handle.Enter(); err != nil {
		t.Fatal(err)
	}
	handle.Run()
	New(Config{Zones: zones, Store: handle, Logger: zap.NewNop(), Now: time.Now}).Run()
	return handle
}

// TestZonesOfEndedConfigDoNotRun, while a request has its store open.
func TestZonesOfEndedConfigDoNotRun(t *testing.T) {
	handle := &stores.Handle{Name: t.Name(), Module: memoryModule{memory.NewBuckets()}, Logger: zap.NewNop()}
	for range 2 {
		if _, err := handle.Enter(); err != nil {
			t.Fatal(err)
		}
	}
	handle.Unload()
	defer handle.Leave()
	handle.Run()
	New(Config{Zones: []*Zone{{Name: t.Name(), Events: Quantity{Number: 1}, Window: time.Minute}}, Store: handle, Logger: zap.NewNop(), Now: time.Now}).Run()
	if _, runs := CountsOfZones()[t.Name()]; runs {
		t.Error("the zone runs")
	}
}

// TestManyZonesTakeLittle: zones without clients have no goroutine, little memory, few series, and leave nothing.
func TestManyZonesTakeLittle(t *testing.T) {
	const many, mostBytes, mostSeries = 2000, 6 << 10, 6
	buckets := memory.NewBuckets()
	goroutines, before, series := ownGoroutines(), heap(), len(seriesByName(t))
	for range 2 {
		zones := make([]*Zone, many)
		for i := range zones {
			zones[i] = &Zone{Name: "many." + strconv.Itoa(i), Key: []string{"{" + ipVar + "}"}, Events: Quantity{Number: 10}, Cost: Quantity{Number: 1}, Window: time.Minute, Free: UsuallyFree}
		}
		handle := loadIn(t, memoryModule{buckets}, zones...)
		redistest.Eventually(t, "zones have no goroutines: the store has one", func() error {
			if n := ownGoroutines() - goroutines; n > 1 {
				return fmt.Errorf("%d zones have %d", many, n)
			}
			return nil
		})
		if bytes := (heap() - before) / many; bytes > mostBytes {
			t.Errorf("a zone takes %d bytes, want %d at most", bytes, mostBytes)
		}
		all := seriesByName(t)
		if n := len(all) - series; n != many {
			t.Errorf("%d zones have series, want %d", n, many)
		}
		for name, named := range all {
			if n := len(slices.Concat(slices.Collect(maps.Values(named))...)); strings.HasPrefix(name, "many.") && n > mostSeries {
				t.Fatalf("zone %s has %d series, want %d at most: %v", name, n, mostSeries, named)
			}
		}
		runtime.KeepAlive(zones)
		handle.Unload()
	}
	// Maps do not shrink.
	if bytes := (heap() - before) / many; bytes > 500 {
		t.Errorf("a zone that is gone leaves %d bytes", bytes)
	}
	if n := len(seriesByName(t)) - series; n != 0 {
		t.Errorf("%d zones that are gone have series", n)
	}
}

// ownGoroutines returns how many goroutines this module began, without tests.
func ownGoroutines() (n int) {
	room := make([]byte, 1<<20)
	for stack := range strings.SplitSeq(string(room[:runtime.Stack(room, true)]), "\n\n") {
		if strings.Contains(stack, "created by github.com/shardlimit/") {
			n++
		}
	}
	return n
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc) //nolint:gosec // far from the bound
}

// TestSeriesOfOptions: a zone exports what its options can bring about while that is 0, and all else once
// it has happened.
func TestSeriesOfOptions(t *testing.T) {
	inMemory := memoryModule{memory.NewBuckets()}
	usual := map[string]string{"requests": "", "declined_requests": "", "decisions": "allowed, refused", "settled_cost": "charged", "evicted_buckets": ""}
	placeholder := Quantity{Text: "{" + headerA + "}", Number: 1}
	for name, c := range map[string]struct {
		zone   *Zone
		module stores.Module
		happen func(c *telemetry.ZoneCounters)
		// more are the series beside or, if they have the name of one, instead of the usual ones.
		more map[string]string
	}{
		"usual":          {&Zone{Free: UsuallyFree}, inMemory, nil, nil},
		"a remote one":   {&Zone{}, remoteModule{stores.OnErrorAllow}, nil, map[string]string{"decisions": "allowed, error_allowed, refused", "evicted_buckets": "-"}},
		"on_error deny":  {&Zone{OnError: stores.OnErrorDeny}, remoteModule{stores.OnErrorAllow}, nil, map[string]string{"decisions": "allowed, error_refused, refused", "evicted_buckets": "-"}},
		"on_error local": {&Zone{}, remoteModule{stores.OnErrorLocal}, nil, map[string]string{"evicted_buckets": "-"}},
		"concurrency":    {&Zone{Algorithm: store.Concurrency}, inMemory, nil, map[string]string{"settled_cost": "-"}},
		"charge before":  {&Zone{ChargeBefore: true, Free: UsuallyFree}, inMemory, nil, map[string]string{"settled_cost": "charged, refunded"}},
		"count_status":   {&Zone{Free: statuses(404)}, inMemory, nil, map[string]string{"settled_cost": "charged, free"}},
		"reset_status":   {&Zone{Forgives: statuses(200)}, inMemory, nil, map[string]string{"forgiven": ""}},
		"on_error deny, enforce": {&Zone{Enforce: new(float64)}, remoteModule{stores.OnErrorDeny}, nil,
			map[string]string{"decisions": "allowed, error_allowed, error_refused, refused, would_refuse", "evicted_buckets": "-"}},
		"an own one":     {&Zone{}, ownModule{remoteModule{stores.OnErrorDeny}}, nil, map[string]string{"decisions": "allowed, error_refused, refused", "evicted_buckets": "-"}},
		"enforce":        {&Zone{Enforce: new(float64)}, inMemory, nil, map[string]string{"decisions": "allowed, refused, would_refuse"}},
		"warn, max_wait": {&Zone{Warn: 80, MaxWait: time.Second}, inMemory, nil, map[string]string{"near_clients": "", "waited_requests": ""}},
		"placeholders":   {&Zone{Events: placeholder}, inMemory, nil, map[string]string{"unreadable": "not_found events, out_of_range events"}},
		"cost in JSON": {&Zone{Cost: Quantity{Text: "{http.rate_limit.response.json.a}", Number: 1}}, inMemory, nil,
			map[string]string{"unreadable": "broken_off cost, encoding cost, not_found cost, not_json cost, out_of_range cost"}},
		"happened": {&Zone{}, inMemory, func(c *telemetry.ZoneCounters) {
			c.Decisions[telemetry.Blocked].Inc()
			c.Refunded.Add(3)
			c.Overflowed.Inc()
		}, map[string]string{"decisions": "allowed, blocked, refused", "settled_cost": "charged, refunded", "overflowed_requests": ""}},
	} {
		t.Run(name, func(t *testing.T) {
			z := c.zone
			z.Name, z.Key, z.Window = "series", []string{"static"}, time.Minute
			if z.Events == (Quantity{}) {
				z.Events.Number = 1
			}
			if z.Cost == (Quantity{}) {
				z.Cost.Number = 1
			}
			handle := loadIn(t, c.module, z)
			defer handle.Unload()
			if c.happen != nil {
				c.happen(z.Counts)
			}
			want := maps.Clone(usual)
			maps.Copy(want, c.more)
			maps.DeleteFunc(want, func(_, labels string) bool { return labels == "-" })
			got := map[string]string{}
			for name, labels := range seriesByName(t)["series"] {
				slices.Sort(labels)
				got[strings.TrimSuffix(strings.TrimPrefix(name, "caddy_rate_limit_"), "_total")] = strings.Join(labels, ", ")
			}
			if !maps.Equal(got, want) {
				t.Errorf("the zone exports %v, want %v", got, want)
			}
		})
	}
}

// TestRecentClientsAreFew: what was logged is remembered for its window, in bounded memory, and not
// beyond that.
func TestRecentClientsAreFew(t *testing.T) {
	c, now := new(recentClients), time.Now()
	limit := store.Limit{Zone: "z", Window: time.Minute}
	first := func(n int) bool {
		return c.isFirst(c.idOf(aboutRefusal, &limit, fmt.Sprint(n)), logged{until: now.Add(time.Minute)}, now)
	}
	for n := range maxRecentClients + 1000 {
		if !first(n) {
			t.Fatalf("client %d was met before", n)
		}
	}
	if len(c.seen) != maxRecentClients {
		t.Errorf("%d clients are remembered, want %d", len(c.seen), maxRecentClients)
	}
	if now = now.Add(time.Minute - 1); first(maxRecentClients + 999) {
		t.Error("a client is forgotten within its window")
	}
	if now = now.Add(1); !first(maxRecentClients + 999) {
		t.Error("a client is remembered beyond its window")
	}
	if c.expire(now); len(c.seen) != 1 || c.peak != 1 {
		t.Errorf("after their window, %d clients are remembered in memory for %d, want the one that came again", len(c.seen), c.peak)
	}
}

// TestRejectedConfigExportsNothing: a config that does not run changes no metrics.
func TestRejectedConfigExportsNothing(t *testing.T) {
	handle := &stores.Handle{Name: t.Name(), Module: memoryModule{memory.NewBuckets()}, Logger: zap.NewNop()}
	if _, err := handle.Enter(); err != nil {
		t.Fatal(err)
	}
	defer handle.Unload()
	z := &Zone{Name: "rejected", Key: []string{"static"}, Events: Quantity{Number: 1}, Cost: Quantity{Number: 1}, Window: time.Minute}
	New(Config{Zones: []*Zone{z}, Store: handle, Logger: zap.NewNop(), Now: time.Now})
	if series := seriesByName(t)["rejected"]; series != nil {
		t.Errorf("a zone that does not run exports %v", series)
	}
}
