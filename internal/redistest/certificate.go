package redistest

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"time"
)

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

// Renew replaces the certificate and its key, in the same files, with new ones
// for the same subject that expire at notAfter. Each file changes at once, but
// the key's first: who reads both in between gets two that do not belong
// together. A server goes on showing what it has read before, see
// [Server.ReloadCertificate]. It fails if the files cannot be written.
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
