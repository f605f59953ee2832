package limiter

import (
	"net/http"
	"reflect"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"go.uber.org/zap"
)

// hintForHeaderBehind returns the hint about a header among placeholders that, by the routes of the
// running config, a handler behind the limiter sets; "" if there is none.
func (l *Limiter) hintForHeaderBehind(placeholders []string) string {
	web, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return ""
	}
	for _, server := range web.(*caddyhttp.App).Servers {
		if hint := l.hintFromRoutes(server.Routes, placeholders); hint != "" {
			return hint
		}
	}
	return ""
}

func (l *Limiter) hintFromRoutes(routes caddyhttp.RouteList, placeholders []string) string {
	setters := map[string]string{}
	l.settersBehind(routes, false, setters)
	for _, name := range placeholders {
		header, isHeader := strings.CutPrefix(name, headerPrefix)
		if by := setters[http.CanonicalHeaderKey(header)]; isHeader && by != "" {
			return "put rate_limit into a route after " + by + ", which sets the header " + header
		}
	}
	return ""
}

// settersBehind adds, for each header, what sets it behind the limiter. It reports whether requests
// that have met the limiter, which isMet says of the routes before, go on to what follows.
func (l *Limiter) settersBehind(routes caddyhttp.RouteList, isMet bool, setters map[string]string) bool {
	var groups []string
	for _, route := range routes {
		// Of the routes of a group, a request takes one.
		if route.Group != "" && slices.Contains(groups, route.Group) {
			continue
		}
		met := isMet
		for _, h := range route.Handlers {
			met = l.settersFrom(h, met, setters)
		}
		switch {
		case met && !isMet && route.Terminal:
		case met:
			isMet, groups = true, append(groups, route.Group)
		}
	}
	return isMet
}

// settersFrom is settersBehind for one handler.
func (l *Limiter) settersFrom(h caddyhttp.MiddlewareHandler, isMet bool, setters map[string]string) bool {
	if limiting, is := h.(interface{ Limiter() *Limiter }); is {
		return isMet || limiting.Limiter() == l
	}
	if sub, is := h.(*caddyhttp.Subroute); is {
		return l.settersBehind(sub.Routes, isMet, setters)
	}
	if isMet {
		addSetters(h, "request_header", setters)
	}
	return isMet
}

// addSetters adds the headers of requests that a handler sets, or handlers inside of it. A Caddyfile calls
// it by the name.
func addSetters(h caddyhttp.MiddlewareHandler, name string, setters map[string]string) {
	if h, is := h.(*headers.Handler); is && h.Request != nil {
		for _, fields := range []http.Header{h.Request.Add, h.Request.Set} {
			for header := range fields {
				setters[http.CanonicalHeaderKey(header)] = name
			}
		}
	}
	for _, routes := range routesInside(h) {
		for _, route := range routes {
			for _, inner := range route.Handlers {
				addSetters(inner, innerName(h), setters)
			}
		}
	}
}

// innerName is what a Caddyfile calls the handlers inside of h: only forward_auth makes a
// reverse_proxy that sets headers of requests.
func innerName(h caddyhttp.MiddlewareHandler) string {
	if id := caddy.GetModuleID(h); id != "http.handlers.reverse_proxy" {
		return id
	}
	return "forward_auth"
}

// routesInside returns the routes that a handler has in its fields, of whichever module it is.
func routesInside(h caddyhttp.MiddlewareHandler) (all []caddyhttp.RouteList) {
	v := reflect.Indirect(reflect.ValueOf(h))
	if v.Kind() != reflect.Struct {
		return nil
	}
	for i := range v.NumField() {
		if !v.Type().Field(i).IsExported() {
			continue
		}
		switch field := v.Field(i).Interface().(type) {
		case caddyhttp.RouteList:
			all = append(all, field)
		case []caddyhttp.ResponseHandler:
			for _, handler := range field {
				all = append(all, handler.Routes)
			}
		}
	}
	return all
}

// hintFields are the hint of hintForHeaderBehind as fields of a log entry.
func (l *Limiter) hintFields(text string) []zap.Field {
	if hint := l.hintForHeaderBehind(PlaceholdersIn(text)); hint != "" {
		return []zap.Field{zap.String("hint", hint)}
	}
	return nil
}
