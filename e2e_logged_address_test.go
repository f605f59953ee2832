package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// TestLoggedAddress: without log_key, no log line has the address of a client
// whom the key of a zone identifies by it, whole or by its network, in a bucket
// of its own or in the overflow bucket.
func TestLoggedAddress(t *testing.T) {
	const (
		ipv6 = "2001:db8:a:b:c:d:e:f"
		ipv4 = "203.0.113.77"
	)
	servers := caddytest.StartShards(t, 1, 0)
	for name, test := range map[string]struct {
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
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
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
					// Others come before it, and use up the bucket that all share.
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
				lines = 1 // for they share one bucket
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
			must(t, "log", errors.Join(want("it having a field remote_ip", hasField, test.logged),
				want("it having an address", isLogged && !test.logged, false)))
		})
	}
}
