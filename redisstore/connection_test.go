package redisstore

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestCertificatesAreReplaced with their files, and kept while these are invalid.
func TestCertificatesAreReplaced(t *testing.T) {
	ca := redistest.StartAuthority(t)
	issued, err := ca.IssueClient("limiter", time.Now().Add(time.Hour))
	redistest.Must(t, err)
	trusted := filepath.Join(t.TempDir(), "ca.pem")
	trust := func(a *redistest.Authority) error {
		text, err := os.ReadFile(a.File())
		redistest.Must(t, err)
		return os.WriteFile(trusted, text, 0o600)
	}
	redistest.Must(t, trust(ca))
	c, err := loadCertificates(trusted, issued.CertFile(), issued.KeyFile())
	redistest.Must(t, err)
	var reported []error
	stop := c.listen(func(fault error) { reported = append(reported, fault) })
	shown := func() []byte {
		t.Helper()
		pair, err := c.client(nil)
		redistest.Must(t, err)
		if !c.authorities().Equal(ca.Pool()) {
			t.Error("other authorities are trusted")
		}
		return pair.Certificate[0]
	}
	first := shown()
	if !bytes.Equal(first, shown()) || len(reported) > 0 {
		t.Errorf("unchanged files are reported as %v", reported)
	}
	redistest.Must(t, issued.Renew(time.Now().Add(2*time.Hour)))
	second := shown()
	if bytes.Equal(first, second) || len(reported) > 0 {
		t.Errorf("a new certificate is not used, or reported as %v", reported)
	}
	for fault, spoil := range map[string]func() error{
		"garbage": func() error { return os.WriteFile(issued.CertFile(), []byte("garbage"), 0o600) },
		"missing": func() error { return os.Remove(issued.CertFile()) },
		"key of another": func() error {
			other, err := ca.IssueClient("other", time.Now().Add(time.Hour))
			if err != nil {
				return err
			}
			return os.Rename(other.KeyFile(), issued.KeyFile())
		},
		"authorities' garbage": func() error { return os.WriteFile(trusted, []byte("garbage"), 0o600) },
		"no authorities":       func() error { return os.Remove(trusted) },
	} {
		reported = nil
		redistest.Must(t, spoil())
		for range 3 {
			if !bytes.Equal(second, shown()) {
				t.Errorf("%s: the previous certificate is not used", fault)
			}
		}
		if len(reported) != 1 || reported[0] == nil {
			t.Errorf("%s: reported %v, want one fault", fault, reported)
		}
		redistest.Must(t, trust(ca))
		redistest.Must(t, issued.Renew(time.Now().Add(2*time.Hour)))
		third := shown()
		if bytes.Equal(second, third) || len(reported) != 2 || reported[1] != nil {
			t.Errorf("%s: after the repair %v is reported", fault, reported)
		}
		second = third
	}
	stop()
	redistest.Must(t, os.Remove(issued.CertFile()))
	shown()
	redistest.Must(t, issued.Renew(time.Now().Add(time.Hour)))
	ca = redistest.StartAuthority(t)
	redistest.Must(t, trust(ca))
	shown()
	if len(reported) != 2 {
		t.Errorf("%v is reported after the end", reported)
	}
}

// TestCredentialsAreReadForEachConnection. A missing file yields an error and no empty
// password.
func TestCredentialsAreReadForEachConnection(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	t.Setenv("SHARDLIMIT_TEST_USER", "limiter")
	provide := credentials("{env.SHARDLIMIT_TEST_USER}", "{file."+file+"}")
	for _, step := range []struct{ content, want string }{
		{"first", "first"},
		{"second\n", "second"},
		{"third\r\n", "third"},
		// Only one line end is removed: others may belong to the password.
		{"fourth\n\n", "fourth\n"},
		{" a b{c} ", " a b{c} "},
	} {
		redistest.Must(t, os.WriteFile(file, []byte(step.content), 0o600))
		username, password, err := provide(t.Context())
		if err != nil || username != "limiter" || password != step.want {
			t.Errorf("a file with %q yields %q, %q, %v, want %q", step.content, username, password, err, step.want)
		}
	}
	for what, change := range map[string]func() error{
		"empty file":   func() error { return os.WriteFile(file, nil, 0o600) },
		"missing file": func() error { return os.Remove(file) },
	} {
		redistest.Must(t, change())
		_, password, err := provide(t.Context())
		if err == nil || password != "" || !strings.Contains(err.Error(), "password: placeholder {file."+file+"} is empty") {
			t.Errorf("%s: %q, %v", what, password, err)
		}
		redistest.Must(t, os.WriteFile(file, []byte("secret"), 0o600))
	}
	if credentials("", "") != nil {
		t.Error("empty credentials have a provider")
	}
}
