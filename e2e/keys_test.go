package e2e

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// keySite counts by a key of the test's choice, and trusts X-Forwarded-For.
func keySite(store, key, options string) string {
	return zonesSite("servers {\ntrusted_proxies static 127.0.0.0/8\n}\n"+store, zoneWith("api", "key "+key, options), "respond ok")
}

// TestRequestThatNamesTwoClients gets no limit beside that of its first name, wherever the zone counts,
// however the name is checked, and whoever is blocked.
func TestRequestThatNamesTwoClients(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for store, text := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			site := func(options ...string) string {
				return zonesSite(text, zoneWith("api", append(options, "key {header.X-Api-Key} {query.key}", "events 3")...),
					"@good header X-Api-Key good\nhandle @good {\nrespond good\n}\nrespond ok")
			}
			c := caddytest.Start(t, site())
			for used := range int64(3) {
				must(t, "one name", c.Ask("/", "X-Api-Key: good").Is(http.StatusOK, used+1))
				must(t, "one name, repeated", want("status", c.Get("/", "X-Api-Key: good", "X-Api-Key: z").StatusCode, http.StatusBadRequest))
			}
			must(t, "the fourth", want("status", c.Get("/", "X-Api-Key: good", "X-Api-Key: good").StatusCode, http.StatusTooManyRequests))
			for n := range 5 {
				other := fmt.Sprint("X-Api-Key: z", n)
				must(t, "with another", want("status", c.Get("/", "X-Api-Key: good", other).StatusCode, http.StatusBadRequest))
				must(t, "after another", want("status", c.Get("/", other, "X-Api-Key: good").StatusCode, http.StatusBadRequest))
				must(t, "in the query", want("status", c.Get(fmt.Sprint("/?key=k&key=z", n)).StatusCode, http.StatusBadRequest))
			}
			c.AwaitLines(t, 1, "several values for what names their client", `"zone":"api"`, "{http.request.header.X-Api-Key}")

			// A client without a limit stays blocked.
			c.MustLoad(site("events {header.X-Quota} 3"))
			must(t, "without a limit", want("status", c.Get("/", "X-Api-Key: good", "X-Quota: unlimited").StatusCode, http.StatusOK))
			code, answer := c.AdminCall(http.MethodPost, "/rate_limit/blocks/api?for=1h&key=good", "", "")
			must(t, answer, want("status", code, http.StatusOK))
			must(t, "blocked", want("status", c.Get("/", "X-Api-Key: good", "X-Quota: unlimited").StatusCode, http.StatusTooManyRequests))
			must(t, "blocked", want("status", c.Get("/", "X-Api-Key: good", "X-Api-Key: z", "X-Quota: unlimited").StatusCode, http.StatusBadRequest))

			c.MustLoad(site("enforce 0"))
			must(t, "a zone that refuses nobody", want("status", c.Get("/", "X-Api-Key: good", "X-Api-Key: z").StatusCode, http.StatusOK))
		})
	}
}

// TestRequestWithTwoCookies of one name counts for both, wherever the zone counts; none locks a browser out.
func TestRequestWithTwoCookies(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	for store, text := range map[string]string{"memory": "", "redis": servers.Store()} {
		for name, options := range map[string][]string{
			"after": nil, "before": {"charge before"}, "batch": {"charge before", "batch 2"}, "log": {"algorithm sliding_log"}, "observed": {"enforce 0"},
		} {
			t.Run(store+", "+name, func(t *testing.T) {
				t.Parallel()
				site := zonesSite(text, zoneWith("two-"+name, append(options, "key {cookie.sid} {client_ip}", "events 6")...), "respond ok")
				c := caddytest.Start(t, site)
				get := func(status int, cookies ...string) {
					t.Helper()
					if name == "observed" {
						status = http.StatusOK
					}
					must(t, fmt.Sprint(cookies), want("status", c.Get("/", cookies...).StatusCode, status))
				}
				for range 2 {
					get(http.StatusOK, "Cookie: sid=old; sid=new")
					get(http.StatusOK, "Cookie: sid=new", "Cookie: a=b; sid=old")
					get(http.StatusOK, `Cookie: a="b c"; sid = "\156ew"; SID=%6fld`)
				}
				get(http.StatusTooManyRequests, "Cookie: sid=new")
				get(http.StatusTooManyRequests, "Cookie: sid=old; sid=third")
				for range 6 {
					get(http.StatusOK, "Cookie: sid=third")
				}
				get(http.StatusTooManyRequests, "Cookie: sid=1; sid=2; sid=third")
				get(http.StatusBadRequest, "Cookie: sid=1; sid=2; sid=3; sid=4")
				code, answer := c.AdminCall(http.MethodPost, "/rate_limit/simulate", "", `{"url": "/", "headers": {"Cookie": ["sid=old; sid=fresh"]}}`)
				must(t, answer, errors.Join(want("status", code, http.StatusOK), want("clients", strings.Count(answer, `"client_key"`), 2)))
			})
		}
	}
}

// TestIncludes: Caddy's requests to itself have no address of their own, so they count by headers alone.
func TestIncludes(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for name, text := range map[string]string{"page.html": `A{{httpInclude "/one.html"}}{{httpInclude "/two.html"}}Z`, "one.html": "1", "two.html": "2"} {
		must(t, name, os.WriteFile(filepath.Join(root, name), []byte(text), 0o600))
	}
	servers := caddytest.StartShards(t, 1, 0)
	for store, text := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			c := caddytest.Start(t, zonesSite(text, zoneWith("pages", "key {header.X-Key} {client_ip}", "events 4", "charge before"),
				"root * "+root+"\ntemplates\nfile_server"))
			ask := func(status int, headers ...string) {
				t.Helper()
				resp := c.Get("/page.html", headers...)
				body, err := io.ReadAll(resp.Body)
				must(t, "page", errors.Join(err, want("status", resp.StatusCode, status)))
				if status == http.StatusOK {
					must(t, "page", want("body", string(body), "A12Z"))
				}
			}
			for range 4 {
				ask(http.StatusOK)
			}
			ask(http.StatusTooManyRequests)
			ask(http.StatusOK, "X-Key: visitor")
			ask(http.StatusInternalServerError, "X-Key: visitor")
		})
	}
}

const emptyKeyWarning = `"msg":"key is empty; counting by client IP"`

// TestHeaderOfAHandlerBehindTheLimiter: the hint names the order, even of a request that the handler refuses.
func TestHeaderOfAHandlerBehindTheLimiter(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		setter, hint string
		times        int // for the key, and for events
	}{
		"forward_auth":   {"forward_auth localhost:1 {\nuri /\ncopy_headers X-Client\n}", "put rate_limit into a route after forward_auth, which sets the header X-Client", 2},
		"request_header": {"route /other {\nrequest_header X-Client alice\n}", "put rate_limit into a route after request_header, which sets the header X-Client", 2},
		"nobody":         {"request_header X-Other alice", "; if forward_auth or another handler sets it, put rate_limit into a route after that", 1},
	} {
		t.Run(name, func(t *testing.T) {
			c := caddytest.Start(t, zonesSite("", zoneWith("api", "key {header.X-Client}", "events {header.X-Client} 1"), test.setter+"\nrespond ok"))
			c.Get("/")
			c.AwaitLog(emptyKeyWarning)
			must(t, "log", want("times that it gives the hint", strings.Count(c.Logs.String(), test.hint), test.times))
		})
	}
}

func TestRequestWithoutKeyCountsAsItsAddress(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	for _, test := range []struct {
		name, key string
		warnings  int
		hint      string
	}{
		{"no fallback", "{header.X-Api-Key}", 1, "see to it that clients send what key asks for"},
		{"address as fallback", "{header.X-Api-Key} {client_ip}", 0, ""},
		{"two headers", "{header.X-Api-Key} {header.X-Other}", 1, "see to it"},
		{"unknown placeholder", "{http.nonsense}{header.X-Api-Key}", 1, "placeholder {http.nonsense} is unknown"},
	} {
		prefix := strings.ReplaceAll(test.name, " ", "_")
		for store, text := range map[string]string{"memory": "", "redis": servers.Store("key_prefix " + prefix)} {
			t.Run(test.name+", "+store, func(t *testing.T) {
				c := caddytest.Start(t, keySite(text, test.key, ""))
				used, all := map[string]int64{}, int64(0)
				ask := func(bucket string, headers ...string) {
					t.Helper()
					used[bucket]++
					all++
					must(t, bucket, c.Ask("/", headers...).Is(http.StatusOK, used[bucket]))
					if store == "redis" {
						servers.AwaitSum(t, prefix+":", all)
					}
				}
				for range 3 {
					ask("the address")
					ask("a client that sends the address as its key", "X-Api-Key: 127.0.0.1")
					ask("a client that sends an empty key", "X-Api-Key: ", "X-Forwarded-For: 192.0.2.7")
					ask("a client", "X-Api-Key: alice")
				}
				ask("a client that sends the placeholder", "X-Api-Key: {client_ip}")
				ask("a client that sends the placeholder's long form", "X-Api-Key: {http.vars.client_ip}")
				ask("the address")
				must(t, "log", want("number of warnings", strings.Count(c.Logs.String(), emptyKeyWarning), test.warnings))
				must(t, "log", want("giving the hint", strings.Contains(c.Logs.String(), test.hint), true))
			})
		}
	}
}

func TestNetworksShareABucket(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	forStores(t, bothStores(servers), func(t *testing.T, store string) {
		c := caddytest.Start(t, keySite(store, "{client_ip}", "ipv6_prefix 64\nipv4_prefix 24"))
		used := map[string]int64{}
		for i, client := range []struct{ address, network string }{
			{"2001:db8:1:2::1", "first /64"},
			{"2001:db8:1:2:ffff::7", "first /64"},
			{"2001:0db8:0001:0002:0000:0000:0000:0001", "first /64"},
			{"2001:db8:1:3::1", "second /64"},
			{"2001:db8:1:2::1", "first /64"},
			{"192.0.2.1", "first /24"},
			{"192.0.2.255", "first /24"},
			{"::ffff:192.0.2.9", "first /24"},
			{"192.0.3.1", "second /24"},
		} {
			used[client.network]++
			must(t, client.address, c.Ask("/", "X-Forwarded-For: "+client.address).Is(http.StatusOK, used[client.network]))
			if store != "" {
				servers.AwaitSum(t, "", int64(i+1))
			}
		}
	})
}

// longKey returns the n-th of several long header values, which differ only at their ends.
func longKey(n int) string { return strings.Repeat("k", 19_000) + strconv.Itoa(n) }

// heapOf returns how many bytes of the heap are reachable.
func heapOf(c *caddytest.Caddy) int64 {
	c.T.Helper()
	// Pooled memory survives one collection.
	for range 3 {
		c.AdminCall(http.MethodGet, "/debug/pprof/heap?gc=1", "", "")
	}
	return int64(gaugeOf(c.T, c, "go_memstats_heap_alloc_bytes"))
}

// TestLongKeysTakeLittleMemory in all that Caddy keeps of clients: full buckets, known ones, logged
// refusals, batches, and pending charges while the shard is down.
func TestLongKeysTakeLittleMemory(t *testing.T) {
	t.Parallel()
	const clients, mostEach = 250, 12 << 10 // less than a key
	servers := caddytest.StartLastingShards(t, 1, 0)
	zones := zoneWith("full", "events 1", "charge before") + zoneWith("after", "events 100", "charge after") +
		zoneWith("batched", "events 100", "charge before", "batch 10", "penalty 1h")
	c := caddytest.Start(t, strings.Replace(zonesSite(servers.Store("max_new_buckets 1000000", "charge_timeout 5s"), zones, "respond ok"),
		"rate_limit {\nzone", "rate_limit {\nlog_key\nlog_refusals all\nzone", 1))
	c.Get("/", "X-Key: first")
	// askAll sends a request of each client from first on.
	askAll := func(first, status int) {
		t.Helper()
		const workers = 8
		caddytest.Together(t, workers, func(worker int) error {
			for n := first + worker; n < first+clients; n += workers {
				a, err := c.TryProbe(t.Context(), "/", "X-Key: "+longKey(n))
				if err != nil {
					return err
				}
				if err := want("status", a.Status, status); err != nil {
					return err
				}
			}
			return nil
		})
	}
	before := heapOf(c)
	wantSmall := func(when string) {
		t.Helper()
		now := heapOf(c)
		each := (now - before) / clients
		before = now
		t.Logf("%s a client takes %d bytes", when, each)
		if each > mostEach {
			t.Errorf("%s a client with a key of 19 kB takes %d bytes, want at most %d", when, each, mostEach)
		}
	}
	askAll(0, http.StatusOK)
	askAll(0, http.StatusTooManyRequests)
	wantSmall("refused,")
	// A line has the key with its quotes, and little else.
	for line := range strings.Lines(c.Logs.String()) {
		if len(line) > 2000 {
			t.Errorf("a line of the log has %d bytes: %.200s", len(line), line)
			break
		}
	}
	servers.Kill(t)
	eventually(t, "the outage is noticed", func() error {
		a, err := c.TryProbe(t.Context(), "/", "X-Key: second")
		if err != nil {
			return err
		}
		return want("status", a.Status, http.StatusOK)
	})
	askAll(clients, http.StatusOK)
	unsent := func() float64 { return gaugeOf(t, c, `caddy_rate_limit_ledger_unsent{store="default"}`) }
	eventually(t, "charges are pending", func() error { return want("one for each client", unsent() >= clients, true) })
	wantSmall("while the shard is down,")
	servers.Restart(t)
	eventually(t, "pending charges are delivered", func() error { return want("pending charges", unsent(), 0) })
}

// TestLongKeyIsFound by its value and by the client key that is shown, in the
// API and by the commands, and is not confused with another.
func TestLongKeyIsFound(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 1)
	forStores(t, bothStores(servers, "key_secret secret"), func(t *testing.T, store string) {
		c := caddytest.Start(t, strings.Replace(zonesSite(store, zoneWith("api", "events 3"), "respond {http.rate_limit.key}"),
			"rate_limit {\nzone", "rate_limit {\nlog_key\nzone", 1))
		long, other := longKey(1), longKey(2)
		shownKey := c.Probe("/", "X-Key: "+long).Body
		tag, _, _ := strings.Cut(shownKey, ":")
		for range 4 {
			c.Get("/", "X-Key: "+long)
		}
		c.Get("/", "X-Key: "+other)
		find := map[string]string{
			"value": "key=" + long, "client key that is shown": "client_key=" + url.QueryEscape(shownKey),
			"client key in full": "client_key=" + tag + ":" + long,
		}
		for how, query := range find {
			eventually(t, "the bucket is found by its "+how, func() error {
				b := bucketsOf(c, http.MethodGet, "api?"+query)
				if err := want("used", b.primaryUsed(), 3); err != nil {
					return err
				}
				return want("client key", b.Buckets[0].ClientKey, shownKey)
			})
		}
		eventually(t, "the other bucket is counted", func() error {
			return want("used", bucketsOf(c, http.MethodGet, "api?key="+other).primaryUsed(), 1)
		})
		var top topAnswer
		c.AdminJSON(http.MethodGet, "/rate_limit/top?zone=api", "", &top)
		if len(top.Refused) != 1 || top.Refused[0].ClientKey != shownKey || top.Refused[0].Count != 2 {
			t.Errorf("top is %v, want %s with 2", top, shownKey)
		}
		s := simulate(c, "/", "X-Key: "+long)
		if len(s.Zones) != 1 || s.Zones[0].ClientKey != shownKey {
			t.Errorf("simulated are %v, want %s", s.Zones, shownKey)
		}
		if !strings.Contains(c.Logs.String(), `"key":"`+shownKey+`"`) {
			t.Errorf("the log does not show %s", shownKey)
		}
		_, value, _ := strings.Cut(shownKey, ":")
		for _, how := range [][]string{{long}, {value}, {"{header.X-Key}", value}, {"--client-key", shownKey}} {
			args := append([]string{"get", "api", "--address", c.Admin}, how...)
			prints(t, 0, []string{"{header.X-Key} " + value + " (a long key: its beginning and a digest) in zone api"}, args...)
		}
		for _, query := range find {
			c.Get("/", "X-Key: "+long)
			if b := bucketsOf(c, http.MethodDelete, "api?"+query); len(b.Buckets) != 1 || !b.Buckets[0].Deleted {
				t.Errorf("reset answers %v", b)
			}
			if used := bucketsOf(c, http.MethodGet, "api?key="+long).primaryUsed(); used > 0 {
				t.Errorf("%d are used after a reset", used)
			}
		}
		if used := bucketsOf(c, http.MethodGet, "api?key="+other).primaryUsed(); used != 1 {
			t.Errorf("another client has used %d after the reset, want 1", used)
		}
		// A server that is late may have the bucket.
		eventually(t, "nothing is left to delete", func() error {
			_, err := printed(t, 0, []string{"nothing to delete: {header.X-Key} " + value}, "reset", "api", long, "--address", c.Admin)
			return err
		})
	})
}

// TestLoggedAddress checks that, without log_key, no log line has the address of a client that a
// zone identifies by it, whole or by its network, in its own bucket or in the overflow bucket.
func TestLoggedAddress(t *testing.T) {
	t.Parallel()
	const (
		ipv6 = "2001:db8:a:b:c:d:e:f"
		ipv4 = "203.0.113.77"
	)
	servers := caddytest.StartShards(t, 1, 0)
	tests := map[string]struct {
		key      string // and other options of the zone
		header   string
		overflow bool
		logKey   bool
		logged   bool
	}{
		"address":                          {key: "key {client_ip}"},
		"address, log_key":                 {key: "key {client_ip}", logKey: true, logged: true},
		"network":                          {key: "key {client_ip}\nipv4_prefix 24\nipv6_prefix 64"},
		"address of the connection":        {key: "key {remote_host}"},
		"network of the connection":        {key: "key {http.request.remote.host/24,64}"},
		"address among others":             {key: `key "{header.X-Key} {client_ip}"` + "\nipv4_prefix 24\nipv6_prefix 64", header: "X-Key: alice"},
		"address as a last resort":         {key: "key {header.X-Key}"},
		"network as a last resort":         {key: "key {header.X-Key}\nipv4_prefix 24\nipv6_prefix 64"},
		"API key before the address":       {key: "key {header.X-Key} {client_ip}\nipv4_prefix 24\nipv6_prefix 64", header: "X-Key: alice", logged: true},
		"address after the API key":        {key: "key {header.X-Key} {client_ip}\nipv4_prefix 24\nipv6_prefix 64"},
		"address in a header":              {key: "key {header.X-Forwarded-For}"},
		"network in a header":              {key: "key {header.X-Forwarded-For}\nipv4_prefix 24\nipv6_prefix 64"},
		"API key":                          {key: "key {header.X-Key}", header: "X-Key: alice", logged: true},
		"static":                           {key: "key static", logged: true},
		"static, with networks":            {key: "key static\nipv4_prefix 24\nipv6_prefix 64", logged: true},
		"overflow of addresses":            {key: "key {client_ip}", overflow: true},
		"overflow of addresses, log_key":   {key: "key {client_ip}", overflow: true, logKey: true, logged: true},
		"overflow of networks":             {key: "key {client_ip}\nipv4_prefix 24\nipv6_prefix 64", overflow: true},
		"overflow of API keys":             {key: "key {header.X-Key}", header: "X-Key: alice", overflow: true, logged: true},
		"overflow of the last resort":      {key: "key {header.X-Key}", overflow: true},
		"overflow of networks in a header": {key: "key {header.X-Forwarded-For}\nipv4_prefix 24\nipv6_prefix 64", overflow: true},
	}
	for _, name := range sweep.Of(t, slices.Sorted(maps.Keys(tests)), 7) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test := tests[name]
			global := "servers {\ntrusted_proxies static 127.0.0.1/32\n}\n"
			if test.overflow {
				global += servers.Store("max_new_buckets 1", "key_prefix "+strings.NewReplacer(" ", "", ",", "").Replace(name))
			}
			options := "events 1\nwindow 10000h\n" + test.key + "\n}\n"
			if test.logKey {
				options += "log_key\n"
			}
			c := caddytest.Start(t, zonesSite(global, "zone api {\n"+options, "respond ok"))
			for i, address := range []string{ipv6, ipv4} {
				headers := []string{"X-Forwarded-For: " + address}
				if test.header != "" {
					headers = append(headers, fmt.Sprint(test.header, i))
				}
				if test.overflow {
					// Other clients come first and use up the shared bucket.
					refused := 0
					for n := 0; refused < 2; n++ {
						other := []string{fmt.Sprintf("X-Forwarded-For: 198.%d.%d.1", n/256%256, n%256)}
						if test.header != "" {
							other = append(other, fmt.Sprint("X-Key: other-", i, "-", n))
						}
						if c.Get("/", other...).StatusCode == http.StatusTooManyRequests {
							refused++
						}
					}
				}
				eventually(t, "it is refused", func() error {
					return want("status", c.Get("/", headers...).StatusCode, http.StatusTooManyRequests)
				})
			}
			lines := 2
			if test.overflow || strings.HasPrefix(test.key, "key static") || strings.Contains(test.key, "remote") {
				lines = 1 // they share one bucket
			}
			eventually(t, "refusals are logged", func() error {
				return want("being fewer than "+fmt.Sprint(lines), len(entriesOf(c, "rate limit exceeded")) < lines, false)
			})
			shared := c.Metric(`caddy_rate_limit_overflowed_requests_total{zone="api"}`)
			must(t, "metrics", want("requests in the overflow bucket", shared != "" && shared != "0", test.overflow))
			logs := c.Logs.String()
			isLogged := strings.Contains(logs, ipv6) || strings.Contains(logs, ipv4)
			hasField := false
			for _, entry := range entriesOf(c, "rate limit exceeded") {
				if _, ok := entry["remote_ip"]; ok {
					hasField = true
				}
			}
			must(t, "log", errors.Join(want("field remote_ip present", hasField, test.logged),
				want("address present", isLogged && !test.logged, false)))
		})
	}
}

var floodKeys = flag.Int64("flood.keys", int64(sweep.Size(600, 20_000)), "how many made-up client keys TestFloodOfNewClients sends")

// TestFloodOfNewClients checks that made-up client keys do not fill Redis, that clients with a
// bucket keep their limit, and that lack of memory admits no request.
func TestFloodOfNewClients(t *testing.T) {
	t.Parallel()
	const (
		most   = 10
		events = 20
	)
	made := *floodKeys
	for _, charge := range []string{"after", "before"} {
		t.Run(charge, func(t *testing.T) {
			// Redis has room for far fewer buckets than the flood asks for.
			room := fmt.Sprint(max(4, made/50_000), "mb")
			server := redistest.Start(t, redistest.Args("--maxmemory", room, "--maxmemory-policy", "noeviction"))
			store := caddytest.Shards{{Primary: server}}.Store(fmt.Sprint("max_new_buckets ", most))
			c := startWith(t, store, zoneWith("api", fmt.Sprint("events ", events), "window 1h", "charge "+charge), "respond ok")
			ask := func() caddytest.Answer {
				t.Helper()
				a, err := c.TryAsk("/", "X-Key: alice")
				must(t, "ask as alice", err)
				return a
			}
			for range events / 2 {
				if a := ask(); a.Status != http.StatusOK {
					t.Fatalf("alice got %d", a.Status)
				}
			}
			start := time.Now()
			result, err := loadgen.Run(t.Context(), loadgen.Options{
				Addr: c.Addr, Header: "X-Key", Connections: 32, Requests: made, Duration: 20 * time.Minute,
				Key: func(n int64) string { return "made-up-" + strconv.FormatInt(n, 10) },
			})
			must(t, "flood", err)
			t.Logf("%d requests in %v", result.Requests, time.Since(start))
			seconds := time.Since(start).Seconds() + 1
			if result.Requests != made || result.Status[http.StatusOK]+result.Status[http.StatusTooManyRequests] != made {
				t.Errorf("answers are %v", result.Status)
			}
			passed, keys := result.Status[http.StatusOK], int64(0)
			eventually(t, "Redis has a bucket for each request that passed but those of the shared one", func() error {
				// The last charges follow their responses.
				if keys, err = server.Client().DBSize(t.Context()).Result(); err == nil && passed > keys+events {
					err = fmt.Errorf("%d requests passed with %d buckets", passed, keys)
				}
				return err
			})
			// The bound's burst and its rate, alice's bucket, and the shared one.
			if bound := int64(most*(1+seconds)) + 2; keys > bound {
				t.Errorf("%d buckets after %.1f s, want at most %d", keys, seconds, bound)
			}
			for n := range events {
				a := ask()
				if want := http.StatusOK; n < events/2 && a.Status != want {
					t.Errorf("request %d of alice got %d", events/2+n, a.Status)
				}
				if want := http.StatusTooManyRequests; n >= events/2 && a.Status != want {
					t.Errorf("request %d of alice got %d", events/2+n, a.Status)
				}
			}
			if info, err := server.Info("errorstats"); err != nil || info["errorstat_OOM"] != "" {
				t.Errorf("redis was out of memory: %v, %v", info, err)
			}
			if n := strings.Count(c.Logs.String(), "too many new clients"); n < 1 || n > 1+int(seconds)/60 {
				t.Errorf("too many new clients: logged %d times", n)
			}
			overflowed, err := strconv.Atoi(c.Metric(`caddy_rate_limit_overflowed_requests_total{zone="api"}`))
			// All requests but those with a bucket of their own.
			if err != nil || int64(overflowed) < made-keys || int64(overflowed) > made {
				t.Errorf("the metric counts %d of %d with %d buckets, %v", overflowed, made, keys, err)
			}
		})
	}
}

// TestFloodWhileRedisDoesNotAnswer: on_error decides about the requests. Afterwards they have
// opened no more buckets than the bound allows, and refuse nobody.
func TestFloodWhileRedisDoesNotAnswer(t *testing.T) {
	t.Parallel()
	const made, connections = 100, 16
	type outage struct {
		replicas   int
		begin, end func(*redistest.Server) error
	}
	outages := map[string]outage{
		"all silent": {0, (*redistest.Server).Pause, (*redistest.Server).Resume},
		// The replica shows which clients are new; the bucket that they share cannot be charged.
		"primary away": {1, (*redistest.Server).Kill, (*redistest.Server).Restart},
	}
	type floodCase struct {
		outage, options string
		status          int
	}
	var chosen []floodCase
	for name := range outages {
		var cases []floodCase
		for options, status := range map[string]int{
			"charge after": http.StatusOK, "charge before": http.StatusOK, "algorithm gcra": http.StatusOK,
			"on_error local": http.StatusOK, "charge before, on_error local": http.StatusOK,
			"on_error deny": http.StatusServiceUnavailable, "charge before, on_error deny": http.StatusServiceUnavailable,
		} {
			// Buckets of gcra need not be opened, so the replica decides about the shared one.
			if outages[name].replicas == 0 || options != "algorithm gcra" {
				cases = append(cases, floodCase{name, options, status})
			}
		}
		slices.SortFunc(cases, func(a, b floodCase) int { return strings.Compare(a.options, b.options) })
		chosen = append(chosen, sweep.Of(t, cases, 2)...)
	}
	for _, c := range chosen {
		outage, options, status := outages[c.outage], c.options, c.status
		t.Run(c.outage+", "+options, func(t *testing.T) {
			servers := caddytest.StartShards(t, 1, outage.replicas)
			zone := zoneWith("api", append(strings.Split(options, ", "), "events 50", "window 1h")...)
			c := startWith(t, servers.Store("max_new_buckets 1", "key_prefix flood", "check_timeout 50ms"), zone, "respond ok")
			start := time.Now()
			must(t, "begin the outage", outage.begin(servers[0].Primary))
			result, err := loadgen.Run(t.Context(), loadgen.Options{
				Addr: c.Addr, Header: "X-Key", Connections: connections, Requests: made, Duration: time.Minute,
				Key: func(n int64) string { return "made-up-" + strconv.FormatInt(n, 10) },
			})
			must(t, "flood", errors.Join(err, want(fmt.Sprint("requests with status ", status), result.Status[status], int64(made))))
			bound := int64(2 + time.Since(start).Seconds() + 1)
			must(t, "end the outage", outage.end(servers[0].Primary))
			least, most := int64(made), int64(made)
			if status != http.StatusOK {
				least, most = 0, bound
			}
			if strings.Contains(options, "before") {
				// A take that got no reply may not have counted: of those that came before the outage was seen, and of those
				// that see whether it is over.
				least -= bound + connections
			}
			eventually(t, "all requests are charged", func() error {
				status, _ := adminStatus(c)
				if l := status.Stores[0].Ledger; l == nil || l.InFlight != 0 || l.Unsent != 0 {
					return fmt.Errorf("the ledger is %+v", l)
				}
				keys, err := servers[0].Primary.Client().Keys(t.Context(), "flood:3:*").Result()
				if err = errors.Join(err, want(fmt.Sprintf("number of buckets %q being at most %d", keys, bound), int64(len(keys)) <= bound, true)); err != nil {
					return err
				}
				if strings.Contains(options, "gcra") {
					return nil // its buckets have no count
				}
				if sum := servers.Sum(t, "flood:"); sum < least || sum > most {
					return fmt.Errorf("%d of %d requests counted, want %d to %d", sum, made, least, most)
				}
				return nil
			})
			for n := range 5 {
				eventually(t, "Redis decides again", func() error {
					a := c.Ask("/", fmt.Sprint("X-Key: late-", n))
					if a.Status == http.StatusTooManyRequests {
						t.Fatalf("a new client is refused after the flood: %+v", a)
					}
					return errors.Join(want("status", a.Status, http.StatusOK), want("the limit being known", a.Limit > 0, true))
				})
			}
		})
	}
}

// TestLocalRefusalNamesTheClient that it refuses, not a bucket that clients share.
func TestLocalRefusalNamesTheClient(t *testing.T) {
	t.Parallel()
	for _, charge := range []string{"charge after", "charge before"} {
		t.Run(charge, func(t *testing.T) {
			servers := caddytest.StartShards(t, 1, 0)
			site := zonesSite(servers.Store("max_new_buckets 1", "check_timeout 50ms"), zoneWith("api", "events 1", "window 1h", "on_error local", charge),
				"respond ok\n}\nhandle_errors {\nrespond {http.rate_limit.key}")
			c := caddytest.Start(t, strings.Replace(site, "rate_limit {\nzone", "rate_limit {\nlog_key\nzone", 1))
			must(t, "pause", servers[0].Primary.Pause())
			// The bound lets one in, or some on a slow machine.
			for n := range 5 {
				name := fmt.Sprint("client-", n)
				first, second := c.Ask("/", "X-Key: "+name), c.Ask("/", "X-Key: "+name)
				must(t, "first and second request", errors.Join(
					want("status", first.Status, http.StatusOK), want("status", second.Status, http.StatusTooManyRequests),
					want("the key "+second.Body+" being the client's", strings.HasSuffix(second.Body, name), true)))
			}
		})
	}
}

// TestNewClientsInTwoHandlersAreChargedOnce covers clients that share a bucket, and those that the
// bound admits between the two handlers.
func TestNewClientsInTwoHandlersAreChargedOnce(t *testing.T) {
	t.Parallel()
	const clients = 60
	servers := caddytest.StartShards(t, 2, 1)
	for _, charge := range []string{"after", "before"} {
		t.Run(charge, func(t *testing.T) {
			prefix := "once-" + charge
			zone := zoneWith("api", "charge "+charge, "events 1000")
			c := caddytest.Start(t, twoHandlersSite(servers.Store("max_new_buckets 1", "key_prefix "+prefix), zone, zone))
			caddytest.Together(t, clients, func(i int) error {
				a, err := c.TryProbe(t.Context(), "/", "X-Key: "+strconv.Itoa(i))
				if err != nil {
					return err
				}
				return want("status", a.Status, http.StatusOK)
			})
			if c.Metric(`caddy_rate_limit_overflowed_requests_total{zone="api"}`) == "" {
				t.Error("no client shares a bucket")
			}
			// The exit delivers charges in flight.
			c.Stop()
			servers.AwaitSum(t, prefix+":", clients)
		})
	}
}

// TestDoubtfulKeysAreProblems of the status, when the config is loaded or once a request has shown them.
func TestDoubtfulKeysAreProblems(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, zonesSite("", zoneWith("plugin", "key {geo.country} {client_ip}")+zoneWith("late", "key {header.X-Key}|{tenant}"), "respond ok"))
	problems := func() string {
		var status struct{ Problems []struct{ Zone, Text string } }
		_, text := c.AdminCall(http.MethodGet, "/rate_limit/", "", "")
		must(t, text, json.Unmarshal([]byte(text), &status))
		return fmt.Sprint(status.Problems)
	}
	c.AwaitLines(t, 1, "key may not tell clients apart", `"zone":"plugin"`, "{geo.country}", `"level":"warn"`)
	c.AwaitLines(t, 1, "key may not tell clients apart", `"zone":"late"`, "{tenant}", `"level":"info"`)
	text := problems()
	must(t, text, errors.Join(want("naming the plugin's", strings.Contains(text, "{plugin key of zone plugin: {geo.country} is none"), true),
		want("naming the other", strings.Contains(text, "tenant"), false)))
	must(t, "a request", want("status", c.Get("/", "X-Key: alice").StatusCode, http.StatusOK))
	text = problems()
	must(t, text, want("naming the other", strings.Contains(text, "{late key of zone late: placeholder {tenant} is unknown}"), true))
}
