package shardlimit_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func inAnHour() time.Time { return time.Now().Add(time.Hour) }

func anHourAgo() time.Time { return time.Now().Add(-time.Hour) }

func issueServer(t *testing.T, ca *redistest.Authority, hosts ...string) *redistest.Certificate {
	t.Helper()
	certificate, err := ca.IssueServer(inAnHour(), hosts...)
	must(t, "issue a server's certificate", err)
	return certificate
}

func issueClient(t *testing.T, ca *redistest.Authority) *redistest.Certificate {
	t.Helper()
	certificate, err := ca.IssueClient("limiter", inAnHour())
	must(t, "issue a client's certificate", err)
	return certificate
}

// tlsBlock is the option tls, with more lines.
func tlsBlock(ca *redistest.Authority, client *redistest.Certificate, more ...string) string {
	lines := append([]string{"ca " + ca.File(), "cert " + client.CertFile() + " " + client.KeyFile()}, more...)
	return "tls {\n" + strings.Join(lines, "\n") + "\n}"
}

// cut ends all connections to servers but the tests'.
func cut(t *testing.T, servers ...*redistest.Server) {
	t.Helper()
	for _, server := range servers {
		must(t, "end connections", server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal").Err())
	}
}

// awaitStatus asks, for ever new clients, until the answer has a status, and
// limit headers if it is 200.
func awaitStatus(c *caddytest.Caddy, status int) {
	c.T.Helper()
	i := 0
	eventually(c.T, fmt.Sprintf("the status is %d", status), func() error {
		i++
		a := c.Ask("/", fmt.Sprintf("X-Key: %d-%d", status, i))
		return errors.Join(want("status", a.Status, status), want("having limit headers", a.IsLimited(), status == http.StatusOK))
	})
}

// awaitLeftOut asks, for ever new clients, until a server is left out because of
// an error with these words, and then is answered by on_error deny.
func awaitLeftOut(c *caddytest.Caddy, words string) {
	c.T.Helper()
	i := 0
	eventually(c.T, "a server is left out because "+words, func() error {
		i++
		c.Ask("/", fmt.Sprintf("X-Key: %s-%d", words, i))
		lines := storeLines(c)
		for _, line := range lines {
			if line.Level == "warn" && line.Msg == "server is left out" && strings.Contains(line.Error, words) {
				return nil
			}
		}
		return fmt.Errorf("the log says %+v", lines)
	})
	awaitStatus(c, http.StatusServiceUnavailable)
}

// TestTLSShardsOfEveryKind: their servers and sentinels want a certificate.
func TestTLSShardsOfEveryKind(t *testing.T) {
	t.Parallel()
	ca := redistest.StartAuthority(t)
	// Sentinels tell IP addresses, which need server_name if certificates do not
	// mention them.
	local := redistest.Options{TLS: issueServer(t, ca, "localhost")}
	named := redistest.Options{TLS: issueServer(t, ca, "redis.internal")}
	numbered := redistest.Options{TLS: issueServer(t, ca, "127.0.0.1")}
	var static, watched *redistest.Shard
	var sentinels *redistest.Sentinels
	var cluster *redistest.Cluster
	caddytest.Together(t, 3, func(i int) (err error) {
		switch i {
		case 0:
			static, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShardWith(0, local))
		case 1:
			watched, err = started(t, (*redistest.Shard).Stop)(redistest.LaunchShardWith(1, named))
			if err == nil {
				sentinels, err = started(t, (*redistest.Sentinels).Stop)(redistest.LaunchSentinels(
					masterName, watched.Primary, 1, redistest.SentinelOptions{}))
			}
		case 2:
			cluster, err = started(t, (*redistest.Cluster).Stop)(redistest.LaunchClusterWith(3, 0, numbered))
		}
		return err
	})
	client := issueClient(t, ca)
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardWith("static", "primary "+strings.Replace(static.Primary.Addr(), "127.0.0.1", "localhost", 1)),
		caddytest.ShardWith("watched", sentinelLine(sentinels), tlsBlock(ca, client, "server_name redis.internal")),
		caddytest.ShardWith("cluster", "cluster "+cluster.Addrs()[0]),
		tlsBlock(ca, client),
	), 3, "1h"))
	const clients = 30
	for i := range clients {
		key := fmt.Sprintf("client-%d", i)
		must(t, key, c.Ask("/", "X-Key: "+key).Is(http.StatusOK, 1))
	}
	eventually(t, "all clients are counted", func() error {
		of := []int{
			len(countsOn(t, "api", static.Primary)), len(countsOn(t, "api", watched.Primary)), len(countsOn(t, "api", cluster.Nodes...)),
		}
		if of[0] < 3 || of[1] < 3 || of[2] < 3 {
			return fmt.Errorf("clients are %v", of)
		}
		return want("clients", of[0]+of[1]+of[2], clients)
	})
	must(t, "log", want("lines of a healthy store", len(storeLines(c)), 0))
}

// TestClientCertificateIsReplacedInPlace, and one that is broken is not used.
func TestClientCertificateIsReplacedInPlace(t *testing.T) {
	t.Parallel()
	const password = "marker-of-a-secret"
	ca := redistest.StartAuthority(t)
	client := issueClient(t, ca)
	shard := redistest.StartShardWith(t, 1, redistest.Options{TLS: issueServer(t, ca), Args: []string{"--requirepass", password}})
	servers := []*redistest.Server{shard.Primary, shard.Replicas[0]}
	c := caddytest.Start(t, apiSite(caddytest.RedisStore(
		caddytest.ShardOf("a", shard), "password {file."+writeFile(t, password)+"}", "pool_size 1", "on_error deny", tlsBlock(ca, client),
	), 1_000_000, "1h"))
	awaitStatus(c, http.StatusOK)

	must(t, "spoil the certificate", os.WriteFile(client.CertFile(), []byte("garbage"), 0o600))
	cut(t, servers...)
	awaitStatus(c, http.StatusOK)
	awaitLine(c, "warn", "client certificate cannot be read, the one before stays in use: correct the files", client.CertFile())

	// Servers refuse a certificate that has expired, so it is seen which one
	// is shown. They do so after the handshake, in the middle of the first
	// call, which may see no more than that the connection breaks.
	must(t, "replace the certificate", client.Renew(anHourAgo()))
	cut(t, servers...)
	awaitLeftOut(c, "")
	must(t, "log", want("lines about what is wrong with the files", countLines(c, "client certificate cannot be read"), 1))
	must(t, "log", want("lines about what was", countLines(c, "client certificate can be read again"), 1))
	must(t, "replace the certificate", client.Renew(inAnHour()))
	awaitStatus(c, http.StatusOK)
	mustHide(c, password)
}

// TestServerCertificates that are not to be trusted: on_error applies, and the
// log says why.
func TestServerCertificates(t *testing.T) {
	t.Parallel()
	const password = "marker-of-a-secret"
	ca, other := redistest.StartAuthority(t), redistest.StartAuthority(t)
	client, certificate := issueClient(t, ca), issueServer(t, ca)
	shard := redistest.StartShardWith(t, 0, redistest.Options{TLS: certificate, Args: []string{"--requirepass", password}})
	site := func(onError, tls string) string {
		return apiSite(caddytest.RedisStore(caddytest.ShardOf("a", shard), "password "+password, "pool_size 1", "on_error "+onError, tls), 1_000_000, "1h")
	}
	c := caddytest.Start(t, site("deny", tlsBlock(other, client)))
	awaitLeftOut(c, "certificate signed by unknown authority")
	c.MustLoad(site("deny", tlsBlock(ca, client, "server_name redis.internal")))
	awaitLeftOut(c, "certificate is valid for localhost, not redis.internal")
	c.MustLoad(site("deny", "tls {\ninsecure_skip_verify\ncert "+client.CertFile()+" "+client.KeyFile()+"\n}"))
	awaitStatus(c, http.StatusOK)
	c.MustLoad(site("deny", tlsBlock(ca, client)))
	awaitStatus(c, http.StatusOK)

	must(t, "replace the certificate", certificate.Renew(anHourAgo()))
	must(t, "reload the certificate", shard.Primary.ReloadCertificate(t.Context()))
	cut(t, shard.Primary)
	awaitLeftOut(c, "certificate has expired")
	c.MustLoad(site("allow", tlsBlock(ca, client)))
	a := c.Ask("/", "X-Key: alice")
	must(t, "with on_error allow", errors.Join(want("status", a.Status, http.StatusOK), want("having limit headers", a.IsLimited(), false)))
	must(t, "replace the certificate", certificate.Renew(inAnHour()))
	must(t, "reload the certificate", shard.Primary.ReloadCertificate(t.Context()))
	awaitStatus(c, http.StatusOK)
	if text := c.Logs.String(); strings.Contains(text, password) {
		t.Error("the password is in the log")
	}
}
