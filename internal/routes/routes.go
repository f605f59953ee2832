// Package routes leads a request through the routes of a config to the rate_limit
// handlers that it would meet.
//
// Caddy compiles routes into closures that cannot be inspected, so a [Walk] follows
// their exported fields as [caddyhttp.RouteList.Compile] does. Handlers on the way are
// not run, because they may have effects; the exceptions are those that only prepare the
// request, such as rewrites, since matchers and keys depend on them. What a handler does
// to a request is known by its module ID alone (see handlersRun, handlersAside and
// handlersLast).
package routes

import (
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

// Walk leads a request through the routes of a server.
type Walk struct {
	Server *caddyhttp.Server
	W      http.ResponseWriter
	// Meet is called for each rate_limit handler. It reports whether the request goes
	// on.
	Meet func(l *limiter.Limiter, r *http.Request) (goesOn bool, err error)
	// PassedOver lists the modules of handlers that were not run and may matter.
	PassedOver []string

	groups map[string]bool
	depth  int
}

// Limiting is a handler that has a limiter.
type Limiting interface{ Limiter() *limiter.Limiter }

// StandIn is a handler in place of one that was not loaded, whose module it names.
type StandIn interface{ ModuleID() caddy.ModuleID }

// Lead leads a request through all routes of the server.
func (k *Walk) Lead(r *http.Request) error {
	return k.routes(k.Server.Routes, r, func(*http.Request) error { return nil })
}

// step continues a request with what comes next.
type step = func(r *http.Request) error

// maxDepth bounds the handlers of a walk, because named routes can invoke themselves.
const maxDepth = 1000

// handlersRun prepare a request and do nothing else, so they are run.
var handlersRun = map[caddy.ModuleID]bool{
	"http.handlers.headers": true,
	"http.handlers.map":     true,
	"http.handlers.rewrite": true,
	"http.handlers.vars":    true,
}

// handlersAside do nothing that a rate_limit after them could see, so they are
// skipped.
var handlersAside = map[caddy.ModuleID]bool{
	"http.handlers.copy_response":         true,
	"http.handlers.copy_response_headers": true,
	"http.handlers.encode":                true,
	"http.handlers.intercept":             true,
	"http.handlers.log_append":            true,
	"http.handlers.push":                  true,
	"http.handlers.rate_limit_service":    true,
	"http.handlers.request_body":          true,
	"http.handlers.templates":             true,
	"http.handlers.tracing":               true,
}

// handlersLast answer the request, which ends the walk. The value is a field of JSON
// that, if it is set, may let the request go on.
var handlersLast = map[caddy.ModuleID]string{
	"http.handlers.acme_server":     "",
	"http.handlers.error":           "",
	"http.handlers.file_server":     "pass_thru",
	"http.handlers.metrics":         "",
	"http.handlers.reverse_proxy":   "handle_response",
	"http.handlers.static_response": "",
}

// routes leads r through a list of routes, and then to next.
func (k *Walk) routes(routes caddyhttp.RouteList, r *http.Request, next step) error {
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
		if k.groups == nil {
			k.groups = map[string]bool{}
		}
		k.groups[route.Group] = true
	}
	if route.Terminal {
		rest = func(*http.Request) error { return nil }
	}
	return k.handlers(route.Handlers, r, rest)
}

// handlers leads r through the handlers of a route, and then to next.
func (k *Walk) handlers(handlers []caddyhttp.MiddlewareHandler, r *http.Request, next step) error {
	if len(handlers) == 0 {
		return next(r)
	}
	if k.depth++; k.depth > maxDepth {
		return errors.New("routes invoke each other without end")
	}
	rest := func(r *http.Request) error { return k.handlers(handlers[1:], r, next) }
	switch h := handlers[0].(type) {
	case Limiting:
		goesOn, err := k.Meet(h.Limiter(), r)
		if err != nil || !goesOn {
			return err
		}
		return rest(r)
	case *caddyhttp.Subroute:
		return k.routes(h.Routes, r, rest)
	case *caddyhttp.Invoke:
		route, ok := k.Server.NamedRoutes[h.Name]
		if !ok {
			return fmt.Errorf("named route %q does not exist", h.Name)
		}
		return k.routes(caddyhttp.RouteList{*route}, r, rest)
	default:
		return k.other(h, r, rest)
	}
}

func (k *Walk) other(h caddyhttp.MiddlewareHandler, r *http.Request, rest step) error {
	id := ModuleID(h)
	field, isLast := handlersLast[id]
	switch {
	case handlersRun[id]:
		return h.ServeHTTP(k.W, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error { return rest(r) }))
	case handlersAside[id]:
		return rest(r)
	case isLast && !isSet(h, field):
		return nil
	}
	if !slices.Contains(k.PassedOver, string(id)) {
		k.PassedOver = append(k.PassedOver, string(id))
	}
	return rest(r)
}

// Runs reports whether a walk runs the handlers of a module.
func Runs(id caddy.ModuleID) bool { return handlersRun[id] }

// Answers reports whether the handlers of a module, given without http.handlers, answer
// requests, unless a field has a value.
func Answers(module string) (unlessField string, isLast bool) {
	unlessField, isLast = handlersLast[caddy.ModuleID("http.handlers."+module)]
	return unlessField, isLast
}

// ModuleID returns the ID of a handler's module.
func ModuleID(h caddyhttp.MiddlewareHandler) caddy.ModuleID {
	if s, ok := h.(StandIn); ok {
		return s.ModuleID()
	}
	return caddy.ModuleID(caddy.GetModuleID(h))
}

// isSet reports whether a field of a handler, by its name in JSON, has a value. It uses
// reflection rather than importing the types of these handlers.
func isSet(h caddyhttp.MiddlewareHandler, field string) bool {
	v := reflect.Indirect(reflect.ValueOf(h))
	if field == "" || v.Kind() != reflect.Struct {
		return false
	}
	for i := range v.NumField() {
		if option.JSONName(v.Type().Field(i)) == field {
			return !v.Field(i).IsZero()
		}
	}
	return false
}
