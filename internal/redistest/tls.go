package redistest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Authority is a certificate authority that only readers of its file know. It is valid
// for a day. Its methods are safe for concurrent use.
type Authority struct {
	dir         string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	own         tls.Certificate // of the clients of this package
}

// The types of the blocks in PEM files.
const (
	certificateBlock = "CERTIFICATE"
	keyBlock         = "PRIVATE KEY"
)

// NewAuthority makes an authority that writes its files, keys included, to new
// names in the directory dir. It fails if it cannot write there.
func NewAuthority(dir string) (*Authority, error) {
	a, err := newAuthority(dir)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	return a, nil
}

func newAuthority(parent string) (*Authority, error) {
	dir, err := os.MkdirTemp(parent, "authority-")
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: filepath.Base(dir)},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(24 * time.Hour),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	a := &Authority{dir: dir, key: key}
	if a.certificate, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	if err := writePEM(a.File(), certificateBlock, der); err != nil {
		return nil, err
	}
	own := subject{name: "redistest", usages: clientUsages}
	certificate, secret, err := a.sign(own, a.certificate.NotAfter)
	if err != nil {
		return nil, err
	}
	a.own = tls.Certificate{Certificate: [][]byte{certificate}, PrivateKey: secret}
	return a, nil
}

// StartAuthority makes an authority whose files vanish when the test ends. The
// test fails if that is impossible.
func StartAuthority(tb testing.TB) *Authority {
	tb.Helper()
	a, err := NewAuthority(tb.TempDir())
	if err != nil {
		tb.Fatal(err)
	}
	return a
}

// File is the path of the authority's certificate, in PEM.
func (a *Authority) File() string {
	return filepath.Join(a.dir, "authority.pem")
}

// Pool is a new pool with the authority's certificate alone.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

// insider is the configuration of this package's own clients.
func (a *Authority) insider() *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{a.own},
		// Tests may give a server a certificate that no client should accept, and
		// still have to prepare it.
		InsecureSkipVerify: true,
	}
}

// IssueServer issues a certificate for a server that clients know by any of
// the hosts, which are names or IP addresses; without any by "localhost" and
// "127.0.0.1". It expires at notAfter, which may be past, and became valid an
// hour before that or before now. It fails if its files cannot be written.
func (a *Authority) IssueServer(notAfter time.Time, hosts ...string) (*Certificate, error) {
	if len(hosts) == 0 {
		hosts = []string{"localhost", loopback}
	}
	s := subject{name: hosts[0], usages: serverUsages}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			s.addresses = append(s.addresses, ip)
		} else {
			s.hosts = append(s.hosts, host)
		}
	}
	return a.issue(s, notAfter)
}

// IssueClient issues a certificate for a client with a common name. It is valid
// like one of [Authority.IssueServer], and fails like that.
func (a *Authority) IssueClient(name string, notAfter time.Time) (*Certificate, error) {
	return a.issue(subject{name: name, usages: clientUsages}, notAfter)
}

func (a *Authority) issue(s subject, notAfter time.Time) (*Certificate, error) {
	dir, err := os.MkdirTemp(a.dir, "certificate-")
	if err != nil {
		return nil, fmt.Errorf("issue certificate for %s: %w", s.name, err)
	}
	c := &Certificate{authority: a, subject: s, dir: dir}
	if err := c.write(notAfter); err != nil {
		return nil, fmt.Errorf("issue certificate for %s: %w", s.name, err)
	}
	return c, nil
}

// sign makes a new key and signs a certificate of it, which it returns in DER.
func (a *Authority) sign(s subject, notAfter time.Time) ([]byte, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	from := time.Now()
	if notAfter.Before(from) {
		from = notAfter
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: s.name},
		DNSNames:    s.hosts,
		IPAddresses: s.addresses,
		NotBefore:   from.Add(-time.Hour),
		NotAfter:    notAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: s.usages,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	return der, key, err
}

// writePEM atomically replaces the file at path by one block.
func writePEM(path, block string, der []byte) error {
	next := path + ".next"
	if err := os.WriteFile(next, pem.EncodeToMemory(&pem.Block{Type: block, Bytes: der}), 0o600); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// Certificate is a certificate that an [Authority] has issued, in PEM files
// with its key. Its methods are safe for concurrent use.
type Certificate struct {
	authority *Authority
	subject   subject
	dir       string

	writing sync.Mutex
}

// subject is whom a certificate is for.
type subject struct {
	name      string // the common name
	hosts     []string
	addresses []net.IP
	usages    []x509.ExtKeyUsage
}

var (
	clientUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	// A server shows the same certificate to its primary and to the other nodes
	// of a cluster.
	serverUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
)

// errNoTLS is the error of TLS operations on a server without.
var errNoTLS = errors.New("the server does not speak TLS")

// CertFile is the path of the certificate. It never changes.
func (c *Certificate) CertFile() string {
	return filepath.Join(c.dir, "certificate.pem")
}

// KeyFile is the path of the private key. It never changes.
func (c *Certificate) KeyFile() string {
	return filepath.Join(c.dir, "key.pem")
}

// Renew replaces the certificate and its key, in the same files, with new ones for the
// same subject that expire at notAfter. Each file changes at once, but the key's first:
// a reader in between gets two that do not belong together. A server goes on showing
// what it has read before, see [Server.ReloadCertificate]. It fails if the files cannot
// be written.
func (c *Certificate) Renew(notAfter time.Time) error {
	if err := c.write(notAfter); err != nil {
		return fmt.Errorf("renew certificate for %s: %w", c.subject.name, err)
	}
	return nil
}

func (c *Certificate) write(notAfter time.Time) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	certificate, key, err := c.authority.sign(c.subject, notAfter)
	if err != nil {
		return err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := writePEM(c.KeyFile(), keyBlock, secret); err != nil {
		return err
	}
	return writePEM(c.CertFile(), certificateBlock, certificate)
}

// arguments are redis-server's arguments for a server with this certificate;
// none if c is nil.
func (c *Certificate) arguments() []string {
	if c == nil {
		return nil
	}
	return []string{
		"--tls-cert-file", c.CertFile(), "--tls-key-file", c.KeyFile(),
		"--tls-ca-cert-file", c.authority.File(), "--tls-auth-clients", "yes",
		"--tls-replication", "yes", "--tls-cluster", "yes",
	}
}

// ReloadCertificate makes the server read its certificate and key again, as
// after a [Certificate.Renew]. Connections that exist stay. It fails, and the
// server keeps what it has, if the two do not belong together, and for a server
// without TLS.
func (s *Server) ReloadCertificate(ctx context.Context) error {
	err := errNoTLS
	if c := s.login.certificate; c != nil {
		err = s.client.Do(ctx, "CONFIG", "SET",
			"tls-cert-file", c.CertFile(), "tls-key-file", c.KeyFile()).Err()
	}
	if err != nil {
		return fmt.Errorf("reload the certificate of redis-server on %s: %w", s.Addr(), err)
	}
	return nil
}
