package shardlimit

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// TestClientCertificateIsReplaced in its files, and kept while they are bad.
func TestClientCertificateIsReplaced(t *testing.T) {
	ca := redistest.StartAuthority(t)
	issued, err := ca.IssueClient("limiter", time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	c, err := loadClientCertificate(issued.CertFile(), issued.KeyFile())
	if err != nil {
		t.Fatal(err)
	}
	var told []error
	stop := c.listen(func(fault error) { told = append(told, fault) })
	shown := func() []byte {
		t.Helper()
		pair, err := c.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		return pair.Certificate[0]
	}
	change := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	first := shown()
	if !bytes.Equal(first, shown()) || len(told) > 0 {
		t.Errorf("files that do not change make %v be told", told)
	}
	change(issued.Renew(time.Now().Add(2 * time.Hour)))
	second := shown()
	if bytes.Equal(first, second) || len(told) > 0 {
		t.Errorf("a new certificate is not used, or makes %v be told", told)
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
	} {
		told = nil
		change(spoil())
		for range 3 {
			if !bytes.Equal(second, shown()) {
				t.Errorf("%s: the certificate before is not used", fault)
			}
		}
		if len(told) != 1 || told[0] == nil {
			t.Errorf("%s: told %v, want one fault", fault, told)
		}
		change(issued.Renew(time.Now().Add(2 * time.Hour)))
		third := shown()
		if bytes.Equal(second, third) || len(told) != 2 || told[1] != nil {
			t.Errorf("%s: after it was mended told %v", fault, told)
		}
		second = third
	}
	stop()
	change(os.Remove(issued.CertFile()))
	shown()
	if len(told) != 2 {
		t.Errorf("told %v after the end", told)
	}
}
