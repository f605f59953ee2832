package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestConfigThatLacksSomething is valid, with a warning, and does not start, which changes no count of the running
// config. It starts once the file that it lacks is there.
func TestConfigThatLacksSomething(t *testing.T) {
	t.Parallel()
	const password, events = "open sesame", 10_000
	server := redistest.Start(t, redistest.Args("--requirepass", password))
	dir := t.TempDir()
	primary, file := "primary "+server.Addr(), filepath.Join(dir, "secret")
	secret := `password "` + password + `"`
	// Requests that a config without its servers gets wait for that long, and its end for them.
	site := func(store ...string) string {
		return zonesSite(caddytest.RedisStore(append(store, "check_timeout 500ms")...), zoneWith("api", fmt.Sprint("events ", events)), "respond ok")
	}
	own := func(lines ...string) string { return caddytest.ShardWith("a", lines...) }
	c := caddytest.Start(t, site(own(primary, secret)))
	var allowed atomic.Int64
	ask := func() error {
		resp, err := c.Try("/", "X-Key: one")
		if err == nil && resp.StatusCode == http.StatusOK {
			allowed.Add(1)
		}
		return err
	}
	countsAll := func(when string) {
		t.Helper()
		must(t, "a request", ask())
		eventually(t, when+": all requests are charged", func() error {
			keys, err := server.Client().Keys(t.Context(), "*:api:*").Result()
			if err != nil || len(keys) != 1 {
				return fmt.Errorf("buckets are %q: %w", keys, err)
			}
			fields, err := server.Client().HGetAll(t.Context(), keys[0]).Result()
			must(t, "read the bucket", err)
			return want("charged", fields["c"], strconv.FormatInt(allowed.Load(), 10))
		})
	}
	for name, test := range map[string]struct {
		store []string
		want  string
		// content is what the file has to have, or "" where no file helps.
		content string
	}{
		"password's file":         {[]string{own(primary), "password {file." + file + "}"}, "password: placeholder {file." + file + "} is empty: set it, or see that Caddy can read the file", password},
		"password's variable":     {[]string{own(primary, "password {env.SHARDLIMIT_TEST_UNSET}")}, "shard a: password: placeholder {env.SHARDLIMIT_TEST_UNSET} is empty", ""},
		"username":                {[]string{own(primary, secret), "username {file." + file + "}"}, "username: placeholder", "default"},
		"key_secret":              {[]string{own(primary, secret), "key_secret {env.SHARDLIMIT_TEST_UNSET}"}, "key_secret: placeholder", ""},
		"url":                     {[]string{own("url {file." + file + "}")}, "shard a: url: placeholder", "redis://:" + strings.ReplaceAll(password, " ", "%20") + "@" + server.Addr()},
		"part of a url":           {[]string{own("url redis://:{env.SHARDLIMIT_TEST_UNSET}@" + server.Addr())}, "shard a: url: placeholder {env.SHARDLIMIT_TEST_UNSET} is empty", ""},
		"address":                 {[]string{own("primary {file."+file+"}", secret)}, "shard a: address: evaluated placeholder", server.Addr()},
		"sentinel_password":       {[]string{own("sentinel m "+server.Addr(), "sentinel_password {file."+file+"}")}, "shard a: sentinel_password: placeholder", ""},
		"master":                  {[]string{own("sentinel {env.SHARDLIMIT_TEST_UNSET} " + server.Addr())}, "shard a: sentinel: evaluated placeholder", ""},
		"authority":               {[]string{own(primary, secret), "tls {\nca " + file + "\n}"}, "tls: read ca: open " + file + ": no such file or directory: see that Caddy can read the file", ""},
		"authority that is a dir": {[]string{own(primary, secret), "tls {\nca " + dir + "\n}"}, "tls: read ca: read " + dir + ": is a directory", ""},
		"authority's variable":    {[]string{own(primary, secret), "tls {\nca {env.SHARDLIMIT_TEST_UNSET}\n}"}, "tls: ca: evaluated placeholder", ""},
		"certificate":             {[]string{own(primary, secret, "tls {\ncert "+file+" "+file+"\n}")}, "shard a: tls: read cert " + file, ""},
	} {
		lacks := site(test.store...)
		config, err := json.Marshal(adapted(c, lacks))
		must(t, "encode", err)
		warnings, err := caddytest.Warnings(t, config)
		must(t, name+" is missing where it is validated", err)
		must(t, name, want("warning with "+test.want+" in "+warnings, strings.Contains(warnings, test.want), true))

		stop := make(chan struct{})
		var asking sync.WaitGroup
		for range 4 {
			asking.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						if err := ask(); err != nil {
							t.Errorf("%s: a request beside the rejected reload: %v", name, err)
							return
						}
					}
				}
			})
		}
		status, text := c.Load(lacks)
		close(stop)
		asking.Wait()
		must(t, name, want("status", status, http.StatusBadRequest))
		must(t, name, want("error with "+test.want+" in "+text, strings.Contains(text, test.want) && strings.Contains(text, "store default: "), true))
		countsAll(name)
		if test.content != "" {
			must(t, "write the file", os.WriteFile(file, []byte(test.content+"\n"), 0o600))
			c.MustLoad(lacks)
			must(t, "remove the file", os.Remove(file))
			c.MustLoad(site(own(primary, secret)))
			countsAll(name + ", repaired")
		}
	}
}
