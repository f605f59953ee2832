package limiter

import (
	"maps"
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// limitingHandler is a handler with a limiter, as the directive's is.
type limitingHandler struct {
	caddyhttp.MiddlewareHandler
	limiter *Limiter
}

func (h limitingHandler) Limiter() *Limiter { return h.limiter }

func TestHeadersThatHandlersBehindTheLimiterSet(t *testing.T) {
	l := &Limiter{}
	route := func(handlers ...caddyhttp.MiddlewareHandler) caddyhttp.Route {
		return caddyhttp.Route{Handlers: handlers}
	}
	in := func(group string, isTerminal bool, r caddyhttp.Route) caddyhttp.Route {
		r.Group, r.Terminal = group, isTerminal
		return r
	}
	sub := func(routes ...caddyhttp.Route) caddyhttp.MiddlewareHandler {
		return &caddyhttp.Subroute{Routes: routes}
	}
	limit, other := limitingHandler{limiter: l}, limitingHandler{limiter: &Limiter{}}
	set := &headers.Handler{Request: &headers.HeaderOps{Set: http.Header{"x-user": {"a"}}}}
	responds := &headers.Handler{Response: &headers.RespHeaderOps{HeaderOps: &headers.HeaderOps{Set: http.Header{"X-User": {"a"}}}}}
	auth := &reverseproxy.Handler{HandleResponse: []caddyhttp.ResponseHandler{{Routes: caddyhttp.RouteList{route(set)}}}}
	for name, test := range map[string]struct {
		routes caddyhttp.RouteList
		by     string
	}{
		"behind in the route":    {caddyhttp.RouteList{route(limit, set)}, "request_header"},
		"behind in a later one":  {caddyhttp.RouteList{route(limit), route(auth)}, "forward_auth"},
		"behind its subroute":    {caddyhttp.RouteList{route(sub(route(limit)), sub(route(auth)))}, "forward_auth"},
		"before":                 {caddyhttp.RouteList{route(auth), route(limit)}, ""},
		"behind another":         {caddyhttp.RouteList{route(other, set)}, ""},
		"of the response":        {caddyhttp.RouteList{route(limit, responds)}, ""},
		"behind a terminal one":  {caddyhttp.RouteList{in("", true, route(limit)), route(set)}, ""},
		"in a terminal one":      {caddyhttp.RouteList{in("", true, route(limit, set)), route()}, "request_header"},
		"in the same group":      {caddyhttp.RouteList{in("g", false, route(limit)), in("g", false, route(set))}, ""},
		"in another group":       {caddyhttp.RouteList{in("g", false, route(limit)), in("h", false, route(set))}, "request_header"},
		"behind a group's other": {caddyhttp.RouteList{in("g", false, route(limit)), in("g", false, route(set)), route(auth)}, "forward_auth"},
	} {
		setters, want := map[string]string{}, map[string]string{}
		if test.by != "" {
			want["X-User"] = test.by
		}
		if l.settersBehind(test.routes, false, setters); !maps.Equal(setters, want) {
			t.Errorf("%s: %v, want %v", name, setters, want)
		}
		hint := ""
		if test.by != "" {
			hint = "put rate_limit into a route after " + test.by + ", which sets the header X-User"
		}
		if got := l.hintFromRoutes(test.routes, []string{"http.vars.x", "http.request.header.X-User"}); got != hint {
			t.Errorf("%s: hint %q, want %q", name, got, hint)
		}
	}
}
