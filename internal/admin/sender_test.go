package admin

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"net/http"
	"strings"
	"testing"
)

// TestSenderIsNamed by its address and by its certificate, even if another certificate has the same subject.
func TestSenderIsNamed(t *testing.T) {
	with := func(name, raw string) *tls.ConnectionState {
		return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{{Subject: pkix.Name{CommonName: name}, Raw: []byte(raw)}}}
	}
	for want, r := range map[string]*http.Request{
		"a Unix socket":  {RemoteAddr: "@"},
		"192.0.2.1:4242": {RemoteAddr: "192.0.2.1:4242", TLS: &tls.ConnectionState{}},
		"192.0.2.1:4242, certificate CN=ops, SHA-256 7692c3ad3540bb80...":                             {RemoteAddr: "192.0.2.1:4242", TLS: with("ops", "one")},
		"192.0.2.1:4242, certificate CN=ops, SHA-256 3fc4ccfe745870e2...":                             {RemoteAddr: "192.0.2.1:4242", TLS: with("ops", "two")},
		"192.0.2.1:4242, certificate CN=" + strings.Repeat("x", 97) + ", SHA-256 3fc4ccfe745870e2...": {RemoteAddr: "192.0.2.1:4242", TLS: with(strings.Repeat("x", 1000), "two")},
	} {
		if got := senderOf(r); got != want {
			t.Errorf("it is %q, want %q", got, want)
		}
	}
}
