package shardlimit

import (
	"fmt"
	"net/http"
	"reflect"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// walk leads a request through the routes of a server, as that does, to the
// rate_limit handlers that it meets. Of other handlers it runs only those that
// do nothing but prepare the request.
type walk struct {
	server *caddyhttp.Server
	w      http.ResponseWriter
	groups map[string]bool
	depth  int
	// meet is called for each rate_limit handler, and tells whether the request
	// goes on.
	meet func(l *Limiter, r *http.Request) (goesOn bool, err error)
	// passedOver are the modules of handlers that were not run.
	passedOver []string
}

// limiting is a handler that has a limiter.
type limiting interface{ Limiter() *Limiter }

// step is what comes next for a request.
type step = func(r *http.Request) error

// maxDepth bounds routes in routes, for named ones can invoke themselves.
const maxDepth = 1000

// handlersRun prepare a request and do nothing else.
var handlersRun = map[caddy.ModuleID]bool{
	"http.handlers.headers": true,
	"http.handlers.map":     true,
	"http.handlers.rewrite": true,
	"http.handlers.vars":    true,
}

// handlersAside do nothing that a rate_limit after them could see.
var handlersAside = map[caddy.ModuleID]bool{
	"http.handlers.copy_response":         true,
	"http.handlers.copy_response_headers": true,
	"http.handlers.encode":                true,
	"http.handlers.intercept":             true,
	"http.handlers.log_append":            true,
	"http.handlers.push":                  true,
	"http.handlers.request_body":          true,
	"http.handlers.templates":             true,
	"http.handlers.tracing":               true,
}

// handlersLast answer the request, so that what comes after is not met. With the
// field that is named they may go on.
var handlersLast = map[caddy.ModuleID]string{
	"http.handlers.acme_server":     "",
	"http.handlers.error":           "",
	"http.handlers.file_server":     "PassThru",
	"http.handlers.metrics":         "",
	"http.handlers.reverse_proxy":   "HandleResponse",
	"http.handlers.static_response": "",
}

// routes leads r through a list of routes, and then to next.
func (k *walk) routes(routes caddyhttp.RouteList, r *http.Request, next step) error {
	if len(routes) == 0 {
		return next(r)
	}
	route := routes[0]
	rest := func(r *http.Request) error { return k.routes(routes[1:], r, next) }
	if route.Group != "" && k.groups[route.Group] {
		return rest(r)
	}
	matches, err := route.MatcherSets.AnyMatchWithError(r)
	switch {
	case err != nil:
		return fmt.Errorf("a route's matcher: %w", err)
	case !matches:
		return rest(r)
	}
	if route.Group != "" {
		k.groups[route.Group] = true
	}
	if route.Terminal {
		rest = func(*http.Request) error { return nil }
	}
	return k.handlers(route.Handlers, r, rest)
}

// handlers leads r through the handlers of a route, and then to next.
func (k *walk) handlers(handlers []caddyhttp.MiddlewareHandler, r *http.Request, next step) error {
	if len(handlers) == 0 {
		return next(r)
	}
	if k.depth++; k.depth > maxDepth {
		return fmt.Errorf("routes invoke each other without end")
	}
	rest := func(r *http.Request) error { return k.handlers(handlers[1:], r, next) }
	switch h := handlers[0].(type) {
	case limiting:
		goesOn, err := k.meet(h.Limiter(), r)
		if err != nil || !goesOn {
			return err
		}
		return rest(r)
	case *caddyhttp.Subroute:
		return k.routes(h.Routes, r, rest)
	case *caddyhttp.Invoke:
		route, ok := k.server.NamedRoutes[h.Name]
		if !ok {
			return fmt.Errorf("named route %q does not exist", h.Name)
		}
		return k.routes(caddyhttp.RouteList{*route}, r, rest)
	default:
		return k.other(h, r, rest)
	}
}

func (k *walk) other(h caddyhttp.MiddlewareHandler, r *http.Request, rest step) error {
	id := caddy.ModuleID(caddy.GetModuleID(h))
	field, isLast := handlersLast[id]
	switch {
	case handlersRun[id]:
		return h.ServeHTTP(k.w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error { return rest(r) }))
	case handlersAside[id]:
		return rest(r)
	case isLast && !isSet(h, field):
		return nil
	}
	if !slices.Contains(k.passedOver, string(id)) {
		k.passedOver = append(k.passedOver, string(id))
	}
	return rest(r)
}

// isSet tells whether a field of a handler, of a type that is not imported, has
// a value.
func isSet(h caddyhttp.MiddlewareHandler, field string) bool {
	v := reflect.Indirect(reflect.ValueOf(h))
	if field == "" || v.Kind() != reflect.Struct {
		return false
	}
	f := v.FieldByName(field)
	return f.IsValid() && !f.IsZero()
}
