// Package plugins has stand-ins for plugins of Caddy: handlers with their module IDs, directives and default order,
// which do what matters to a rate limit beside them.
package plugins

import (
	"bytes"
	"errors"
	"net/http"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/caddyauth"
)

func init() {
	for _, module := range []caddy.Module{new(Cache), new(WAF), new(CrowdSec), new(AppSec), new(JWT), new(Authorizer)} {
		caddy.RegisterModule(module)
	}
	handler("cache", func() caddyhttp.MiddlewareHandler { return new(Cache) })
	handler("coraza_waf", func() caddyhttp.MiddlewareHandler { return new(WAF) })
	handler("crowdsec", func() caddyhttp.MiddlewareHandler { return new(CrowdSec) })
	handler("appsec", func() caddyhttp.MiddlewareHandler { return new(AppSec) })
	handler("jwtauth", func() caddyhttp.MiddlewareHandler { return authentication("jwt") })
	handler("authorize", func() caddyhttp.MiddlewareHandler { return authentication("authorizer") })
	// The others have no order by default.
	httpcaddyfile.RegisterDirectiveOrder("cache", httpcaddyfile.Before, "rewrite")
	httpcaddyfile.RegisterDirectiveOrder("authorize", httpcaddyfile.Before, "basicauth")
}

// handler registers a directive, whose arguments and block mean nothing.
func handler(directive string, made func() caddyhttp.MiddlewareHandler) {
	httpcaddyfile.RegisterHandlerDirective(directive, func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		for h.Next() {
			h.RemainingArgs()
			for h.NextBlock(0) {
				h.RemainingArgs()
			}
		}
		return made(), nil
	})
}

func authentication(provider string) caddyhttp.MiddlewareHandler {
	return caddyauth.Authentication{ProvidersRaw: caddy.ModuleMap{provider: caddyconfig.JSON(struct{}{}, nil)}}
}

// Cache stores each answer by its URL, and lets requests for the same URL wait for it meanwhile, as Souin does.
type Cache struct {
	mu       sync.Mutex
	answers  map[string]*answer
	isLoaded bool
}

type answer struct {
	done   chan struct{}
	status int
	header http.Header
	body   []byte
}

// CaddyModule implements [caddy.Module].
func (*Cache) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.cache", New: func() caddy.Module { return new(Cache) }}
}

// Provision implements [caddy.Provisioner].
func (c *Cache) Provision(caddy.Context) error {
	c.isLoaded = true
	return nil
}

// MarshalJSON implements [json.Marshaler]. It panics once the cache has been loaded: plugins may change meanwhile.
func (c *Cache) MarshalJSON() ([]byte, error) {
	if c.isLoaded {
		panic("a plugin that has been loaded is written into JSON")
	}
	return []byte("{}"), nil
}

// ServeHTTP implements [caddyhttp.MiddlewareHandler].
func (c *Cache) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	c.mu.Lock()
	found, isFirst := c.answers[r.RequestURI], false
	if found == nil {
		found, isFirst = &answer{done: make(chan struct{})}, true
		if c.answers == nil {
			c.answers = map[string]*answer{}
		}
		c.answers[r.RequestURI] = found
	}
	c.mu.Unlock()
	if isFirst {
		rec := caddyhttp.NewResponseRecorder(discard{http.Header{}}, new(bytes.Buffer), func(int, http.Header) bool { return true })
		if err := next.ServeHTTP(rec, r); err != nil {
			found.status, found.header = http.StatusInternalServerError, rec.Header()
			if failed := new(caddyhttp.HandlerError); errors.As(err, failed) {
				found.status = failed.StatusCode
			}
		} else {
			found.status, found.header, found.body = rec.Status(), rec.Header(), rec.Buffer().Bytes()
		}
		close(found.done)
	}
	<-found.done
	for name, values := range found.header {
		w.Header()[name] = values
	}
	w.WriteHeader(found.status)
	_, err := w.Write(found.body)
	return err
}

// discard is a response that nobody gets.
type discard struct{ header http.Header }

func (d discard) Header() http.Header       { return d.header }
func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) WriteHeader(int)             {}

// refuse answers 403 to what looks like an attack.
func refuse(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if strings.Contains(r.RequestURI, "attack") {
		return caddyhttp.Error(http.StatusForbidden, nil)
	}
	return next.ServeHTTP(w, r)
}

// WAF is Coraza.
type WAF struct{}

// CaddyModule implements [caddy.Module].
func (*WAF) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.waf", New: func() caddy.Module { return new(WAF) }}
}

// ServeHTTP implements [caddyhttp.MiddlewareHandler].
func (*WAF) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return refuse(w, r, next)
}

// CrowdSec is CrowdSec's bouncer.
type CrowdSec struct{ WAF }

// CaddyModule implements [caddy.Module].
func (*CrowdSec) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.crowdsec", New: func() caddy.Module { return new(CrowdSec) }}
}

// AppSec is CrowdSec's WAF.
type AppSec struct{ WAF }

// CaddyModule implements [caddy.Module].
func (*AppSec) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.appsec", New: func() caddy.Module { return new(AppSec) }}
}

// JWT is caddy-jwt. A token is "token-" and the user's name.
type JWT struct{}

// CaddyModule implements [caddy.Module].
func (*JWT) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.authentication.providers.jwt", New: func() caddy.Module { return new(JWT) }}
}

// Authenticate implements [caddyauth.Authenticator].
func (*JWT) Authenticate(_ http.ResponseWriter, r *http.Request) (caddyauth.User, bool, error) {
	user, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer token-")
	return caddyauth.User{ID: user}, ok, nil
}

// Authorizer is the authorization of caddy-security.
type Authorizer struct{ JWT }

// CaddyModule implements [caddy.Module].
func (*Authorizer) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.authentication.providers.authorizer", New: func() caddy.Module { return new(Authorizer) }}
}
