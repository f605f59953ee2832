package redisstore

import (
	"bytes"
	"crypto/tls"
	"encoding/pem"
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
	textOf := func(a *redistest.Authority) []byte {
		text, err := os.ReadFile(a.File())
		redistest.Must(t, err)
		return text
	}
	trust := func(text ...[]byte) { redistest.Must(t, os.WriteFile(trusted, bytes.Join(text, nil), 0o600)) }
	trust(textOf(ca))
	c, err := loadCertificates(trusted, issued.CertFile(), issued.KeyFile())
	redistest.Must(t, err)
	var reported []error
	stop := c.listen(func(fault error) { reported = append(reported, fault) })
	shown := func() []byte {
		t.Helper()
		config := new(tls.Config)
		c.addTo(config)
		if !config.RootCAs.Equal(ca.Pool()) {
			t.Error("other authorities are trusted")
		}
		pair, err := config.GetClientCertificate(nil)
		redistest.Must(t, err)
		return pair.Certificate[0]
	}
	renew := func() { redistest.Must(t, issued.Renew(time.Now().Add(2*time.Hour))) }
	first := shown()
	if !bytes.Equal(first, shown()) || len(reported) > 0 {
		t.Errorf("unchanged files are reported as %v", reported)
	}
	renew()
	second := shown()
	if bytes.Equal(first, second) || len(reported) > 0 {
		t.Errorf("a new certificate is not used, or reported as %v", reported)
	}
	spoilClient := map[string]func(){
		"garbage": func() { redistest.Must(t, os.WriteFile(issued.CertFile(), []byte("garbage"), 0o600)) },
		"missing": func() { redistest.Must(t, os.Remove(issued.CertFile())) },
		"key of another": func() {
			other, err := ca.IssueClient("other", time.Now().Add(time.Hour))
			redistest.Must(t, err)
			redistest.Must(t, os.Rename(other.KeyFile(), issued.KeyFile()))
		},
	}
	spoilAuthorities := map[string]func(){
		"garbage":                 func() { trust([]byte("garbage")) },
		"missing":                 func() { redistest.Must(t, os.Remove(trusted)) },
		"half of the authorities": func() { trust(textOf(ca), textOf(ca)[:200]) },
		"nothing that can be parsed": func() {
			trust(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("garbage")}))
		},
	}
	// requireFault has the other half renewed while one is spoilt, and then both.
	requireFault := func(fault string, spoil func(), isOfClient bool) {
		t.Helper()
		reported = nil
		before := shown()
		spoil()
		if !bytes.Equal(before, shown()) {
			t.Errorf("%s: the previous certificate is not used", fault)
		}
		if isOfClient {
			ca = redistest.StartAuthority(t)
			trust(textOf(ca))
		} else {
			renew()
		}
		meanwhile := shown()
		if bytes.Equal(before, meanwhile) != isOfClient {
			t.Errorf("%s: the client's certificate is kept or replaced wrongly", fault)
		}
		if shown(); len(reported) != 1 || reported[0] == nil {
			t.Errorf("%s: reported %v, want one fault", fault, reported)
		}
		trust(textOf(ca))
		renew()
		if after := shown(); bytes.Equal(meanwhile, after) || len(reported) != 2 || reported[1] != nil {
			t.Errorf("%s: after the repair %v is reported", fault, reported)
		}
	}
	for fault, spoil := range spoilClient {
		requireFault("client: "+fault, spoil, true)
	}
	for fault, spoil := range spoilAuthorities {
		requireFault("authorities: "+fault, spoil, false)
	}
	stop()
	redistest.Must(t, os.Remove(issued.CertFile()))
	shown()
	renew()
	ca = redistest.StartAuthority(t)
	trust(textOf(ca))
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
