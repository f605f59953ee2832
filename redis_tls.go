package shardlimit

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"github.com/caddyserver/caddy/v2"
)

// RedisTLS is how connections to Redis are encrypted. TLS 1.2 is the least.
// Files are read when the config is loaded, and have to be there.
type RedisTLS struct {
	// The file with the certificates, in PEM, of the authorities that issue the
	// servers' certificates. Placeholders work. It is read again when the
	// config is loaded again, which takes `caddy reload --force` where nothing
	// else has changed. Default: the authorities that the system trusts.
	CA string `json:"ca,omitempty"`

	// The file with the certificate, in PEM, that Caddy shows to servers that
	// ask for one. Placeholders work. It is read again, with `key`, when either
	// changes; connections that exist stay. While the files do not belong
	// together or cannot be read, the certificate read before is used, and the
	// log says so. Default: none.
	Cert string `json:"cert,omitempty"`

	// The file with the private key to `cert`, in PEM, not encrypted.
	Key string `json:"key,omitempty"`

	// The name that the servers' certificates have to be for, which is also
	// what they are asked for (SNI). Placeholders work. Set it where servers
	// are found by IP addresses that their certificates do not mention, as
	// sentinels and clusters tell them. Default: the host of each address.
	ServerName string `json:"server_name,omitempty"`

	// Accept any certificate. Whoever can put himself between Caddy and Redis
	// then sees the password and can change counts: for tests only.
	InsecureSkipVerify bool `json:"insecure_skip_verify,omitempty"`

	roots       *x509.CertPool
	rootsDigest [sha256.Size]byte
	certificate *clientCertificate
}

func (t *RedisTLS) validate() error {
	switch {
	case t.Cert != "" && t.Key == "":
		return badOption("cert", "has no key: add the file with the private key")
	case t.Key != "" && t.Cert == "":
		return badOption("key", "has no cert: add the file with the certificate")
	case t.InsecureSkipVerify && t.CA != "":
		return badOption("ca", "has no effect with insecure_skip_verify: remove one of them")
	case t.ServerName != "" && !isDynamic(t.ServerName) && !isHost(t.ServerName):
		return badOption("server_name", "%q: it must be a host's name or an IP address, without a port", t.ServerName)
	}
	return nil
}

// provision resolves placeholders and reads the files.
func (t *RedisTLS) provision(repl *caddy.Replacer) error {
	for _, file := range []struct {
		name  string
		value *string
	}{{"ca", &t.CA}, {"cert", &t.Cert}, {"key", &t.Key}, {"server_name", &t.ServerName}} {
		if err := resolve(repl, file.value); err != nil {
			return fmt.Errorf("%s: %w", file.name, err)
		}
	}
	if err := t.validate(); err != nil {
		return err
	}
	if t.CA != "" {
		text, err := os.ReadFile(t.CA)
		if err != nil {
			return fmt.Errorf("read ca: %w", err)
		}
		if t.roots = x509.NewCertPool(); !t.roots.AppendCertsFromPEM(text) {
			return fmt.Errorf("read ca %s: it has no certificate in PEM", t.CA)
		}
		t.rootsDigest = sha256.Sum256(text)
	}
	if t.Cert == "" {
		return nil
	}
	var err error
	t.certificate, err = loadClientCertificate(t.Cert, t.Key)
	return err
}

// config is that of connections.
func (t *RedisTLS) config() *tls.Config {
	if t == nil {
		return nil
	}
	config := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		RootCAs:            t.roots,
		ServerName:         t.ServerName,
		InsecureSkipVerify: t.InsecureSkipVerify,
	}
	if t.certificate != nil {
		config.GetClientCertificate = t.certificate.get
	}
	return config
}
