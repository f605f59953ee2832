package redistest

import (
	"crypto/tls"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// login is what a client needs to use a server.
type login struct {
	username, password string
	certificate        *Certificate // the server's; nil without TLS
}

// login is how the server's own client gets in.
func (o Options) login() login {
	l := login{username: o.Username, password: o.Password, certificate: o.TLS}
	if l.password == "" {
		l.password = argument(o.Args, "--requirepass")
	}
	if l.certificate == nil && o.ReplicaOf != nil {
		l.certificate = o.ReplicaOf.login.certificate
	}
	return l
}

func newClient(addr string, l login) *goredis.Client {
	var config *tls.Config
	if l.certificate != nil {
		config = l.certificate.authority.insider()
	}
	return goredis.NewClient(&goredis.Options{
		Addr:                     addr,
		Username:                 l.username,
		Password:                 l.password,
		TLSConfig:                config,
		DialTimeout:              patience,
		ReadTimeout:              patience,
		WriteTimeout:             patience,
		ContextTimeoutEnabled:    true,
		DialerRetries:            1,
		MaxRetries:               -1,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}
