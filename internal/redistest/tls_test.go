//go:build check

package redistest_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestTLS(t *testing.T) {
	ca := redistest.StartAuthority(t)
	s := redistest.Start(t, redistest.TLS(issueServer(t, ca, inAnHour())))
	set(t, s, "key", "value")

	// This is not the server's own client: it trusts the authority alone.
	client := issueClient(t, ca, inAnHour())
	if err := pingTLS(t, s, ca, client); err != nil {
		t.Errorf("ping with a client certificate: %v", err)
	}
	if err := pingTLS(t, s, ca, nil); err == nil {
		t.Error("the server takes clients without certificates")
	}
	if err := pingTLS(t, s, ca, issueClient(t, ca, anHourAgo())); err == nil {
		t.Error("the server takes an expired client certificate")
	}
	other := redistest.StartAuthority(t)
	if err := pingTLS(t, s, ca, issueClient(t, other, inAnHour())); err == nil {
		t.Error("the server takes a certificate of another authority")
	}
	var unknown x509.UnknownAuthorityError
	if err := pingTLS(t, s, other, client); !errors.As(err, &unknown) {
		t.Errorf("a client of another authority got %v, want %T", err, unknown)
	}
	if err := newClient(t, s, "", "").Ping(t.Context()).Err(); err == nil {
		t.Error("the server takes clients without TLS")
	}

	must(t, s.Restart())
	requireValue(t, s, "key", "")
}

func TestTLSWithoutClientCertificates(t *testing.T) {
	ca := redistest.StartAuthority(t)
	s := redistest.Start(t, redistest.TLS(issueServer(t, ca, inAnHour())), redistest.Args("--tls-auth-clients", "no"))
	if err := pingTLS(t, s, ca, nil); err != nil {
		t.Errorf("ping without a client certificate: %v", err)
	}
}

func TestTLSHosts(t *testing.T) {
	ca := redistest.StartAuthority(t)
	s := redistest.Start(t, redistest.TLS(issueServer(t, ca, inAnHour(), "redis.example", "10.0.0.1")))
	var wrong x509.HostnameError
	if err := pingTLS(t, s, ca, issueClient(t, ca, inAnHour())); !errors.As(err, &wrong) {
		t.Errorf("ping by address got %v, want %T", err, wrong)
	}
}

func TestRenewedCertificate(t *testing.T) {
	ca := redistest.StartAuthority(t)
	certificate := issueServer(t, ca, anHourAgo())
	s := redistest.Start(t, redistest.TLS(certificate))
	client := issueClient(t, ca, anHourAgo())
	requireExpired := func(err error) {
		t.Helper()
		var invalid x509.CertificateInvalidError
		if !errors.As(err, &invalid) || invalid.Reason != x509.Expired {
			t.Errorf("ping got %v, want an expired certificate", err)
		}
	}
	requireExpired(pingTLS(t, s, ca, client))

	// The server shows the old certificate until it reloads or restarts.
	must(t, certificate.Renew(inAnHour()))
	requireExpired(pingTLS(t, s, ca, client))
	must(t, s.ReloadCertificate(t.Context()))
	if err := pingTLS(t, s, ca, client); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("ping with an expired client certificate got %v", err)
	}
	must(t, client.Renew(inAnHour()))
	if err := pingTLS(t, s, ca, client); err != nil {
		t.Errorf("ping with both certificates renewed: %v", err)
	}

	// A key of another certificate changes nothing.
	key, err := os.ReadFile(issueServer(t, ca, inAnHour()).KeyFile())
	must(t, err)
	must(t, os.WriteFile(certificate.KeyFile(), key, 0o600))
	if err := s.ReloadCertificate(t.Context()); err == nil {
		t.Error("reloaded a certificate with the key of another")
	}
	if err := pingTLS(t, s, ca, client); err != nil {
		t.Errorf("ping after a failed reload: %v", err)
	}
}

func TestReloadCertificateWithoutTLS(t *testing.T) {
	if err := redistest.Start(t).ReloadCertificate(t.Context()); err == nil {
		t.Error("reloaded the certificate of a server that has none")
	}
}

func TestTLSShardWithSentinels(t *testing.T) {
	t.Parallel()
	ca := redistest.StartAuthority(t)
	shard := redistest.StartShard(t, 1, redistest.TLS(issueServer(t, ca, inAnHour())))
	set(t, shard.Primary, "key", "value")
	must(t, shard.Replicas[0].WaitInSync(t.Context()))
	requireValue(t, shard.Replicas[0], "key", "value")

	sentinels := redistest.StartSentinels(t, masterName, shard.Primary, 1, patient)
	if err := newClient(t, sentinels.Nodes[0], "", "").Ping(t.Context()).Err(); err == nil {
		t.Error("the sentinel takes clients without TLS")
	}
	if err := pingTLS(t, sentinels.Nodes[0], ca, issueClient(t, ca, inAnHour())); err != nil {
		t.Errorf("ping of the sentinel: %v", err)
	}
	must(t, sentinels.Failover(t.Context()))
	waitForMaster(t, sentinels, shard.Primary.Addr())
	must(t, sentinels.WaitForReplicas(t.Context(), 1))
	must(t, shard.Primary.WaitInSyncWith(t.Context(), shard.Replicas[0]))
}

func TestTLSCluster(t *testing.T) {
	t.Parallel()
	ca := redistest.StartAuthority(t)
	cluster := redistest.StartCluster(t, 2, 1, redistest.TLS(issueServer(t, ca, inAnHour())), redistest.NodeTimeout(waitLimit))
	client := goredis.NewClusterClient(&goredis.ClusterOptions{
		Addrs: cluster.Addrs(), TLSConfig: tlsConfig(t, ca, issueClient(t, ca, inAnHour())),
	})
	defer client.Close()
	for _, key := range []string{"a", "b", "c", "d"} {
		must(t, client.Set(t.Context(), key, "value", 0).Err())
		from := masterOf(t, cluster, key)
		to := otherMaster(cluster, from)
		must(t, cluster.MigrateSlot(t.Context(), redistest.Keyslot(key), from, to))
		requireValue(t, to, key, "value")
	}
}

func TestNewAuthorityFails(t *testing.T) {
	if _, err := redistest.NewAuthority(t.TempDir() + "/missing"); err == nil {
		t.Error("made an authority in a directory that is not there")
	}
}

func inAnHour() time.Time  { return time.Now().Add(time.Hour) }
func anHourAgo() time.Time { return time.Now().Add(-time.Hour) }

func issueServer(t *testing.T, ca *redistest.Authority, notAfter time.Time, hosts ...string) *redistest.Certificate {
	t.Helper()
	certificate, err := ca.IssueServer(notAfter, hosts...)
	must(t, err)
	return certificate
}

func issueClient(t *testing.T, ca *redistest.Authority, notAfter time.Time) *redistest.Certificate {
	t.Helper()
	certificate, err := ca.IssueClient("limiter", notAfter)
	must(t, err)
	return certificate
}

// tlsConfig is for a client that trusts ca, with a certificate unless it is nil.
func tlsConfig(t *testing.T, ca *redistest.Authority, certificate *redistest.Certificate) *tls.Config {
	t.Helper()
	text, err := os.ReadFile(ca.File())
	must(t, err)
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(text) || !config.RootCAs.Equal(ca.Pool()) {
		t.Fatalf("%s does not hold the authority's certificate", ca.File())
	}
	if certificate != nil {
		pair, err := tls.LoadX509KeyPair(certificate.CertFile(), certificate.KeyFile())
		must(t, err)
		config.Certificates = []tls.Certificate{pair}
	}
	return config
}

// pingTLS pings a server through a new connection.
func pingTLS(t *testing.T, s *redistest.Server, ca *redistest.Authority, certificate *redistest.Certificate) error {
	t.Helper()
	client := goredis.NewClient(&goredis.Options{
		Addr: s.Addr(), TLSConfig: tlsConfig(t, ca, certificate), MaxRetries: -1, DialerRetries: 1,
	})
	defer client.Close()
	return client.Ping(t.Context()).Err()
}
