package shardlimit

import (
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// logAccess adds what the limiter decided to the request's entry in the access
// log, if there is one.
func (t *tracker) logAccess(r *http.Request) {
	server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || server == nil || server.Logs == nil {
		return
	}
	if fields, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
		fields.Set(zap.Object("rate_limit", t))
	}
}

// MarshalLogObject implements [zapcore.ObjectMarshaler]. It is called when the
// request is over.
func (t *tracker) MarshalLogObject(to zapcore.ObjectEncoder) error {
	p, i := t.reported()
	if p == nil {
		return nil
	}
	for _, name := range zonePlaceholders {
		switch value := p.placeholder(i, name).(type) {
		case string:
			if value != "" {
				to.AddString(name, value)
			}
		case int64:
			to.AddInt64(name, value)
		}
	}
	return nil
}

// Interface guard.
var _ zapcore.ObjectMarshaler = (*tracker)(nil)
