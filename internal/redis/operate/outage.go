package operate

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// outage returns the finding of a call that failed because of err. prefix is that of the
// options that log in.
func (d *shardDiagnoser) outage(err error, prefix string) store.Finding {
	login := fmt.Sprintf("check %susername and %spassword, and that the user is on", prefix, prefix)
	if m, ok := wire.MeaningOf(err); ok {
		switch {
		case m.Kind == store.KindAuth && strings.HasPrefix(err.Error(), "DENIED"):
			return finding(store.SeverityError, codeLogin, "it takes connections from its own machine alone", "set a password there and here, or protected-mode no")
		case m.Kind == store.KindAuth:
			return finding(store.SeverityError, codeLogin, loginRefused+": "+err.Error(), login)
		case m.Kind == store.KindConnection:
			return finding(store.SeverityError, codeUnreachable, "it takes no more connections: "+err.Error(), "raise maxclients there, or lower pool_size")
		}
		return finding(store.SeverityError, codeNotReady, "it refuses calls: "+err.Error(), "correct what the reply says, on the server")
	}
	code, remedy := codeTLS, ""
	moveRemedy := ""
	if d.shard.InCluster {
		moveRemedy = "; if it has moved, correct its cluster-announce-ip, or without that setting run CLUSTER MEET with its new address at another node"
	}
	var (
		authority  x509.UnknownAuthorityError
		hostname   x509.HostnameError
		invalid    x509.CertificateInvalidError
		plain      tls.RecordHeaderError
		unresolved *net.DNSError
	)
	switch {
	case isGarbled(err):
		return finding(store.SeverityError, codeUnreachable, "it does not answer as Redis does: "+err.Error(), "give the address of a Redis server")
	case errors.As(err, &authority) && d.shard.Options.TLSConfig().RootCAs != nil:
		remedy = "add the authority's certificate to the file of ca"
	case errors.As(err, &authority):
		remedy = "name the file with the authority's certificate in tls: ca <file>"
	case errors.As(err, &hostname):
		remedy = "give the address by a name that its certificate has, or set server_name in tls"
	case errors.As(err, &invalid):
		remedy = "renew the server's certificate"
	case errors.As(err, &plain):
		remedy = "it speaks no TLS at this port: remove tls, or give the port with TLS"
	case errors.As(err, &unresolved):
		code, remedy = codeUnreachable, "correct the name of the host, or the DNS"
	case isTimeout(err), errors.Is(err, context.Canceled):
		code, remedy = codeUnreachable, fmt.Sprintf("see that it runs and is not overloaded, and that no firewall is between; connecting has %s, and more with a longer check_timeout", d.shard.Options.ConnectTimeout())
		if d.shard.Options.TLS != nil {
			// A Redis without TLS takes the handshake for a command, and waits for its end.
			remedy += "; it may speak no TLS at this port"
		}
		remedy += moveRemedy
	case wire.IsDialError(err):
		code, remedy = codeUnreachable, "see that it runs, and that the address is right"
		remedy += moveRemedy
	case d.shard.Options.TLS != nil:
		// A server without room for a client ends the connection before the handshake.
		remedy = "see its log; it may want a client certificate (cert <file> <key> in tls), or have no connection left (its maxclients)"
	default:
		code, remedy = codeUnreachable, "see its log; it may speak TLS alone (option tls), or have no connection left (its maxclients)"
	}
	return finding(store.SeverityError, code, "it cannot be reached: "+err.Error(), remedy)
}

// garbled matches errors about answers that go-redis cannot read.
var garbled = regexp.MustCompile(`redis: (can't parse|invalid|got) `)

// isGarbled reports whether a call failed because the answer makes no sense.
func isGarbled(err error) bool {
	var number *strconv.NumError
	return errors.Is(err, wire.ErrFraming) || errors.As(err, &number) || err != nil && !wire.IsReply(err) && garbled.MatchString(err.Error())
}

// isTimeout reports whether one of the errors is that something took too long.
func isTimeout(err error) bool {
	var timed net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timed) && timed.Timeout()
}
