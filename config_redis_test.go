package shardlimit_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

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
		"none":                      {shardsOf(`{"name": "a"}`), `redis store: shard a has no primary: add sentinel <master> <addr>..., cluster <addr>..., or its address, such as primary localhost:6379`},
		"empty cluster":             {shardsOf(`{"name": "a", "cluster": []}`), `redis store: shard a has no primary`},
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
		"replicas of a cluster":          {shardsOf(`{"name": "a", "cluster": ["redis-1"], "replicas": ["redis-2"]}`), `redis store: shard a: replica does not go with cluster: the nodes tell who the replicas are`},
		"cluster on a socket":            {shardsOf(`{"name": "a", "cluster": ["unix//run/redis.sock"]}`), `redis store: shard a: address "unix//run/redis.sock": it must be host or host:port`},
		"cluster's address resolves":     {shardsOf(static + `, {"name": "c", "cluster": ["redis-1", "{env.SHARDLIMIT_TEST_HOST}"]}`), `redis store: shard c has the address redis-a:6379 of shard a: give each its own servers`},
		"cluster's address is a primary": {shardsOf(static + `, {"name": "c", "cluster": ["redis-a"]}`), `redis store: shard c has the address redis-a:6379 of shard a`},
	} {
		t.Run(name, func(t *testing.T) {
			loads(t, configOf(test.app, withZone(`"log_key": true`)), test.want)
		})
	}
}

func TestConfigOfConnections(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_USER", "limiter")
	const cluster = `{"name": "c", "cluster": ["redis-1"]`
	for name, test := range map[string]struct{ app, want string }{
		"of a shard":                   {app: shardsOf(`{"name": "a", "primary": "redis-a", "username": "{env.SHARDLIMIT_TEST_USER}", "password": "x", "db": 1, "tls": {}, "dial_timeout": "1s", "pool_size": 2, "max_replica_lag": "1s"}`)},
		"db 0":                         {app: redisOf(`"db": 0`)},
		"max_replica_lag negative":     {redisOf(`"max_replica_lag": "-1s"`), `redis store: max_replica_lag -1s: it must be positive`},
		"shard's db negative":          {shardsOf(`{"name": "a", "primary": "redis-a", "db": -1}`), `redis store: shard a: db -1: it must not be negative`},
		"shard's pool_size":            {shardsOf(`{"name": "a", "primary": "redis-a", "pool_size": 1001}`), `redis store: shard a: pool_size 1001: it must be from 1 to 1000`},
		"shard's dial_timeout":         {shardsOf(`{"name": "a", "primary": "redis-a", "dial_timeout": "-1s"}`), `redis store: shard a: dial_timeout -1s: it must be positive`},
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
		t.Run(name, func(t *testing.T) {
			loads(t, configOf(test.app, withZone(`"log_key": true`)), test.want)
		})
	}
}

// TestConfigOfTLSFiles: what is wrong with them is told when the config is
// loaded, with their paths.
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
