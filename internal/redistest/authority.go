package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority is a certificate authority that nobody knows but who reads its
// file. It is valid for a day. Its methods are safe for concurrent use.
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

// writePEM makes the file at path hold one block, at once for who reads it.
func writePEM(path, block string, der []byte) error {
	next := path + ".next"
	if err := os.WriteFile(next, pem.EncodeToMemory(&pem.Block{Type: block, Bytes: der}), 0o600); err != nil {
		return err
	}
	return os.Rename(next, path)
}
