package redisstore

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"regexp"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
)

// Connection has the settings of connections to the servers of a shard. A shard
// inherits each setting from its store unless it has its own. Connections with equal
// settings are shared, and kept when the config is replaced.
type Connection struct {
	// The ACL user and its password; a user without a password is an error.
	// `{env.*}` and `{file.*}` are resolved for each new connection: [rotating a
	// password](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/redis.md#passwords).
	// The admin API shows what is written here, so write a placeholder. Default:
	// none.
	Username string `json:"username,omitempty"`

	// The password. Placeholders such as `{env.REDIS_PASSWORD}` and
	// `{file./run/secrets/redis}` are resolved for each new connection; a line end
	// at the end of the file does not count. Write a placeholder, because Caddy's
	// admin API shows this value. Default: none.
	Password string `json:"password,omitempty"`

	// A command that prints the password, for
	// [tokens](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/redis.md#passwords)
	// that expire. Excludes `password`, and a `url` with a password. Default:
	// none.
	PasswordCommand *PasswordCommand `json:"password_command,omitempty"`

	// The ACL user of the sentinels and its password. Sentinels get neither
	// `username` nor `password`. Default: none.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// The password for the sentinels, like `password`, which they do not get.
	// Default: none.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// The number of the database; most clusters have only 0. Default: 0.
	DB *int `json:"db,omitempty"`

	// Uses TLS, to sentinels too:
	// [TLS](https://github.com/shardlimit/caddy-shardlimit/blob/main/docs/redis.md#tls).
	// `{}` trusts the authorities of the system. Default: none, no TLS.
	TLS *TLS `json:"tls,omitempty"`

	// Connections to each server for checks and takes, and as many again to each
	// primary for charges, refunds and penalties. Default: 4; 64 without
	// pipelining.
	PoolSize int `json:"pool_size,omitempty"`

	// How far a replica may be behind its primary to be asked. Default: 5s.
	MaxReplicaLag caddy.Duration `json:"max_replica_lag,omitempty"`
}

const maxPoolSize = 1000

// PasswordCommand is a command that prints a password.
type PasswordCommand struct {
	// The command and its arguments. It runs without a shell. Required.
	Command []string `json:"command,omitempty"`

	// How long a printed password is valid, at least 10s. Default: 10m.
	Lifetime caddy.Duration `json:"lifetime,omitempty"`
}

func (c *PasswordCommand) validate() error {
	switch {
	case c == nil:
		return nil
	case len(c.Command) == 0 || c.Command[0] == "":
		return option.Errorf("password_command", "is empty: name a command")
	case c.Lifetime != 0 && time.Duration(c.Lifetime) < minTokenLifetime:
		return option.In("password_command", "password_command", option.Errorf("lifetime", "%s: it must be at least %s", time.Duration(c.Lifetime), minTokenLifetime))
	}
	return nil
}

// over returns the settings of c, with these defaults where it has none.
func (c Connection) over(defaults Connection) Connection {
	if c.Password != "" {
		defaults.PasswordCommand = nil
	} else if c.PasswordCommand != nil {
		defaults.Password = ""
	}
	return Connection{
		PasswordCommand:  cmp.Or(c.PasswordCommand, defaults.PasswordCommand),
		Username:         cmp.Or(c.Username, defaults.Username),
		Password:         cmp.Or(c.Password, defaults.Password),
		SentinelUsername: cmp.Or(c.SentinelUsername, defaults.SentinelUsername),
		SentinelPassword: cmp.Or(c.SentinelPassword, defaults.SentinelPassword),
		DB:               cmp.Or(c.DB, defaults.DB),
		TLS:              cmp.Or(c.TLS, defaults.TLS),
		PoolSize:         cmp.Or(c.PoolSize, defaults.PoolSize),
		MaxReplicaLag:    cmp.Or(c.MaxReplicaLag, defaults.MaxReplicaLag),
	}
}

// database returns the number of the database.
func (c *Connection) database() int {
	if c.DB == nil {
		return 0
	}
	return *c.DB
}

// provision reads files and checks that placeholders of secrets can be resolved.
func (c *Connection) provision(l *loader) error {
	for _, secret := range []struct{ name, text string }{
		{"username", c.Username}, {"password", c.Password},
		{"sentinel_username", c.SentinelUsername}, {"sentinel_password", c.SentinelPassword},
	} {
		_, err := reveal(l.repl, secret.text)
		if err := l.check(secret.name, err); err != nil {
			return err
		}
	}
	if c.TLS == nil {
		return nil
	}
	return c.TLS.provision(l)
}

// TLS has the settings of encrypted connections to Redis, by TLS 1.2 or later.
// Files are read when the config is loaded, and again when they change; a config
// with a missing one does not start.
type TLS struct {
	// A file with the certificates of the authorities to trust instead, in PEM.
	// Caddy reads it again when it changes. Default: the system's.
	CA string `json:"ca,omitempty"`

	// Files with the client certificate and its key, in PEM, for servers that ask
	// for one. Caddy reads them again when they change. Default: none. In a
	// Caddyfile: `cert <file> <key>`.
	Cert string `json:"cert,omitempty"`

	// The file with the private key of `cert`, in PEM. In a Caddyfile: `cert
	// <file> <key>`.
	Key string `json:"key,omitempty"`

	// The name that the certificates of the servers must have. Default: the host
	// of the address.
	ServerName string `json:"server_name,omitempty"`

	// Accepts any certificate. For tests only. Default: off.
	InsecureSkipVerify bool `json:"insecure_skip_verify,omitempty"`

	// certificates has the contents of the files; nil without files.
	certificates *certificates
}

func (t *TLS) validate() error {
	switch {
	case t == nil:
		return nil
	case t.Cert != "" && t.Key == "":
		return option.Errorf("cert", "has no key: add the file with the private key")
	case t.Key != "" && t.Cert == "":
		return option.Errorf("key", "has no cert: add the file with the certificate")
	case t.InsecureSkipVerify && t.CA != "":
		return option.Errorf("ca", "has no effect with insecure_skip_verify: remove one of them")
	case t.ServerName != "" && !isDynamic(t.ServerName) && !isHost(t.ServerName):
		return option.Errorf("server_name", "%q: it must be a host's name or an IP address, without a port", t.ServerName)
	}
	return nil
}

// provision resolves placeholders and reads the files.
func (t *TLS) provision(l *loader) error {
	for _, file := range []struct {
		name  string
		value *string
	}{{"ca", &t.CA}, {"cert", &t.Cert}, {"key", &t.Key}, {"server_name", &t.ServerName}} {
		if err := l.check("tls: "+file.name, resolve(l.repl, file.value)); err != nil {
			return err
		}
	}
	err := t.validate()
	if err == nil && (t.CA != "" || t.Cert != "") {
		t.certificates, err = loadCertificates(t.CA, t.Cert, t.Key)
	}
	return l.check("tls", err)
}

// config returns the TLS configuration of connections, without the certificates in the files.
func (t *TLS) config() *tls.Config {
	if t == nil {
		return nil
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		ServerName:         t.ServerName,
		InsecureSkipVerify: t.InsecureSkipVerify,
	}
}

// credentials returns a function that resolves a user and a password for each
// connection, since they may change; nil if there are none.
func credentials(user, secret string) wire.Credentials {
	if user == "" && secret == "" {
		return nil
	}
	return func(context.Context) (username, password string, err error) {
		repl := caddy.NewReplacer()
		if username, err = reveal(repl, user); err != nil {
			return "", "", fmt.Errorf("username: %w", err)
		}
		if password, err = reveal(repl, secret); err != nil {
			return "", "", fmt.Errorf("password: %w", err)
		}
		return username, password, nil
	}
}

// source matches a placeholder that says where a secret is, without revealing it.
var source = regexp.MustCompile(`\{(env|file)\.[^{}]*\}`)

// reveal replaces the placeholders in a secret; an empty one is an error. Errors do
// not quote the secret.
func reveal(repl *caddy.Replacer, secret string) (string, error) {
	revealed, err := repl.ReplaceOrErr(secret, true, true)
	switch {
	case err == nil:
		return revealed, nil
	case source.MatchString(err.Error()):
		return "", missingError{fmt.Errorf("placeholder %s is empty: set it, or see that Caddy can read the file", source.FindString(err.Error()))}
	default:
		return "", errors.New("it has a placeholder that is not known: write {env.*} or {file.*}, or \\{ for a brace that begins no placeholder")
	}
}

// resolve replaces the placeholders in a value that is no secret; an empty one is an
// error.
func resolve(repl *caddy.Replacer, value *string) error {
	resolved, err := repl.ReplaceOrErr(*value, true, true)
	if err != nil {
		err = fmt.Errorf("%w: set it, or write \\{ for a brace that begins no placeholder", err)
		if source.MatchString(err.Error()) {
			return missingError{err}
		}
		return err
	}
	*value = resolved
	return nil
}

// certificates has the authorities to trust and the client's certificate, in files that may be replaced. Each of the two
// keeps its last readable version while its files are invalid.
type certificates struct {
	files [3]string // the authorities', the certificate's and the key's; empty for none

	mu    sync.Mutex
	roots *x509.CertPool
	pair  *tls.Certificate
	read  [3]os.FileInfo // of the files when they were read
	fault error          // why the present files are not in use
	// listeners are called with the fault when it changes.
	listeners map[*func(fault error)]bool
}

// hasChanged reports whether a file was replaced or written to.
func hasChanged(was, is os.FileInfo) bool {
	return was == nil || is == nil || !os.SameFile(was, is) || !was.ModTime().Equal(is.ModTime()) || was.Size() != is.Size()
}

func loadCertificates(ca, cert, key string) (*certificates, error) {
	c := &certificates{files: [3]string{ca, cert, key}, listeners: map[*func(error)]bool{}}
	c.load()
	return c, c.fault
}

// addTo adds the present certificates to the configuration of a connection.
func (c *certificates) addTo(config *tls.Config) {
	roots, pair := c.current()
	config.RootCAs = roots
	if pair != nil {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair, nil }
	}
}

// current returns the authorities to trust, or nil for the system's, and the client's certificate, or nil.
func (c *certificates) current() (*x509.CertPool, *tls.Certificate) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := fmt.Sprint(c.fault)
	c.load()
	if fmt.Sprint(c.fault) != before {
		for listen := range c.listeners {
			(*listen)(c.fault)
		}
	}
	return c.roots, c.pair
}

// load reads the files unless they have not changed since they were last used.
func (c *certificates) load() {
	// Before the files are read, so that the next call sees a later change.
	var now [3]os.FileInfo
	changed := c.fault != nil
	for i, file := range c.files {
		if file != "" {
			now[i], _ = os.Stat(file) // reading the file reports what is wrong
			changed = changed || hasChanged(c.read[i], now[i])
		}
	}
	if !changed {
		return
	}
	roots, rootsFault := readAuthorities(c.files[0])
	if roots != nil {
		c.roots = roots
	}
	pair, pairFault := readPair(c.files[1], c.files[2])
	if pair != nil {
		c.pair = pair
	}
	if c.fault = errors.Join(rootsFault, pairFault); c.fault == nil {
		c.read = now
	}
}

// readAuthorities returns nil without a file, or if one of its certificates is not whole: a file may be half-written. As
// everywhere in Go, authorities that crypto/x509 cannot parse are passed over: older bundles of systems have some.
func readAuthorities(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, missingFile(fmt.Errorf("read ca: %w", err))
	}
	whole := 0
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		whole++
	}
	roots := x509.NewCertPool()
	switch {
	case bytes.Count(text, []byte("-----BEGIN ")) > whole:
		return nil, fmt.Errorf("read ca %s: one of its certificates is not whole", file)
	case !roots.AppendCertsFromPEM(text):
		return nil, fmt.Errorf("read ca %s: it has no certificate in PEM", file)
	}
	return roots, nil
}

// readPair returns nil without files, or if they cannot be read.
func readPair(cert, key string) (*tls.Certificate, error) {
	if cert == "" {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, missingFile(fmt.Errorf("read cert %s and key %s: %w", cert, key, err))
	}
	return &pair, nil
}

// listen calls f, until stop is called, with the fault when the files become
// unusable, and with nil when they are usable again.
func (c *certificates) listen(f func(fault error)) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listeners[&f] = true
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.listeners, &f)
	}
}
