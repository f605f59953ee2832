package shardlimit_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
)

// keySite counts by a key of the test's choice, and believes clients that say
// for whom they ask.
func keySite(store, key, options string) string {
	return fmt.Sprintf(`
{
	{{global}}
	servers {
		trusted_proxies static 127.0.0.0/8
	}
	%s
}
{{site}} {
	rate_limit {
		zone api {
			key %s
			events 100
			window 1h
			%s
		}
	}
	respond ok
}
`, store, key, options)
}

const emptyKeyWarning = `"msg":"key is empty; counting by client IP"`

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
	servers := caddytest.StartShards(t, 2, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
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
}
