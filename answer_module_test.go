package shardlimit_test

import (
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(new(answerModule))
	httpcaddyfile.RegisterHandlerDirective("test_answer", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		if !h.NextArg() {
			return nil, h.ArgErr()
		}
		return &answerModule{How: h.Val()}, nil
	})
	httpcaddyfile.RegisterDirectiveOrder("test_answer", httpcaddyfile.Before, "respond")
}

// answerModule is a handler that answers in ways that Caddy's own do not.
type answerModule struct {
	How string `json:"how"`
}

func (*answerModule) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_answer", New: func() caddy.Module { return new(answerModule) }}
}

func (a *answerModule) ServeHTTP(w http.ResponseWriter, _ *http.Request, _ caddyhttp.Handler) error {
	controller := http.NewResponseController(w)
	switch a.How {
	case "panic":
		panic(http.ErrAbortHandler)
	case "panic-late":
		_, _ = io.WriteString(w, "some")
		_ = controller.Flush()
		panic(http.ErrAbortHandler)
	case "hijack":
		conn, _, err := controller.Hijack()
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = io.WriteString(conn, "HTTP/1.1 418 I'm a teapot\r\nContent-Length: 0\r\n\r\n")
		return err
	case "flush":
		return controller.Flush()
	case "controller":
		if err := controller.SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		if err := controller.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	case "silent":
		return nil
	case "twice":
		w.WriteHeader(http.StatusAccepted)
		w.WriteHeader(http.StatusInternalServerError)
		return nil
	case "error":
		return caddyhttp.Error(http.StatusInsufficientStorage, nil)
	default:
		return fmt.Errorf("test_answer cannot %s", a.How)
	}
}

var _ caddyhttp.MiddlewareHandler = (*answerModule)(nil)
