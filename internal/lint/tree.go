package lint

import (
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
	"github.com/shardlimit/caddy-shardlimit/internal/routes"
)

// Fields are the fields of an object in JSON.
type Fields = map[string]any

// Handler is a handler in the routes of a server.
type Handler struct {
	// Module is the name of its module in http.handlers.
	Module string

	lists  []*list
	route  *route
	index  int
	load   func() Fields
	fields Fields
	// set is what it sets, once that has been read.
	set    []setting
	isRead bool
}

// Fields returns the fields of its JSON, those of routes in it left out. They are empty if the handler has no
// JSON.
func (h *Handler) Fields() Fields {
	if h.fields == nil {
		if h.fields = h.load(); h.fields == nil {
			h.fields = Fields{}
		}
	}
	return h.fields
}

// Place returns where the JSON of the server has the handler.
func (h *Handler) Place() string {
	return fmt.Sprintf("%s.handle[%d]", h.route.place(), h.index)
}

// phase is when the routes in a handler run.
type phase int

const (
	// onTheWay is when a request passes the handler.
	onTheWay phase = iota
	// onError is when a handler of the list before has failed.
	onError
	// onResponse is when a handler behind has answered.
	onResponse
)

// list is a list of routes: that of a server, or one in a handler.
type list struct {
	// name is the field that has it.
	name   string
	phase  phase
	parent *Handler
	routes []*route
	// errors are the routes that get its errors, or nil.
	errors *list
	// caching is what mayCache returns, once it is known.
	caching *bool
}

type route struct {
	group    string
	terminal bool
	handlers []*Handler

	list    *list
	index   int
	load    func() []Fields
	matches []Fields
	isRead  bool
	region  *region
	// isAnswer is what answers returns, once it is known.
	isKnown, isAnswer bool
	// refusals is what takesRefusals returns, once it is known.
	refusals *answer
}

// match returns the matcher sets.
func (r *route) match() []Fields {
	if !r.isRead {
		r.matches, r.isRead = r.load(), true
	}
	return r.matches
}

func (r *route) place() string {
	before := ""
	if r.list.parent != nil {
		before = r.list.parent.Place() + "."
	}
	return fmt.Sprintf("%s%s[%d]", before, r.list.name, r.index)
}

// way returns the routes that the handler is in, the innermost first.
func (h *Handler) way() iter.Seq[*route] {
	return func(yield func(*route) bool) {
		for at := h; at != nil; at = at.route.list.parent {
			if !yield(at.route) {
				return
			}
		}
	}
}

// isIn reports whether the route is part of error routes, whichever handlers are between.
func (r *route) isIn(p phase) bool {
	return r.list.phase == p || r.list.parent != nil && r.list.parent.route.isIn(p)
}

// builder builds the tree of a server, from modules or from JSON.
type builder struct {
	limiters []*Handler
	// named returns the named route that an invoke handler runs, if there is one.
	named func(b *builder, name string, l *list)
	// depth is the nesting of named routes, which can invoke themselves, and invoked their number.
	depth, invoked int
	// isPartial is set if a route has not been loaded.
	isPartial bool
}

const (
	maxDepth   = 20
	maxInvoked = 10_000
)

func (b *builder) addHandler(r *route, h *Handler) {
	h.route, h.index = r, len(r.handlers)
	r.handlers = append(r.handlers, h)
	if h.Module == "rate_limit" {
		b.limiters = append(b.limiters, h)
	}
}

// addList adds an empty list of routes to a handler.
func addList(h *Handler, name string, p phase) *list {
	if h.Module == "intercept" {
		p = onResponse
	}
	l := &list{name: name, parent: h, phase: p}
	if p == onError {
		for _, before := range h.lists {
			before.errors = l
		}
	}
	h.lists = append(h.lists, l)
	return l
}

func (b *builder) addRoute(l *list, r *route) {
	r.list, r.index = l, len(l.routes)
	l.routes = append(l.routes, r)
}

// invoke adds the named route to the handler that runs it.
func (b *builder) invoke(h *Handler) {
	name, _ := h.Fields()["name"].(string)
	if b.invoked++; b.depth >= maxDepth || b.invoked > maxInvoked {
		return
	}
	b.depth++
	defer func() { b.depth-- }()
	b.named(b, name, addList(h, "named_routes."+name, onTheWay))
}

// The tree of modules.

// fromModules returns the limiters of a server that has been loaded, and whether all of it has been.
func fromModules(server *caddyhttp.Server) (limiters []*Handler, isWhole bool) {
	b := &builder{named: func(b *builder, name string, l *list) {
		if r := server.NamedRoutes[name]; r != nil {
			b.loaded(l, caddyhttp.RouteList{*r})
		}
	}}
	var errors *list
	if server.Errors != nil {
		errors = &list{name: "errors.routes", phase: onError}
		b.loaded(errors, server.Errors.Routes)
	}
	b.loaded(&list{name: "routes", errors: errors}, server.Routes)
	return b.limiters, !b.isPartial
}

func (b *builder) loaded(l *list, all caddyhttp.RouteList) {
	for i := range all {
		from := &all[i]
		b.isPartial = b.isPartial || len(from.HandlersRaw) > 0 || len(from.MatcherSetsRaw) > 0
		r := &route{group: from.Group, terminal: from.Terminal, load: func() []Fields { return matcherSets(from.MatcherSets) }}
		b.addRoute(l, r)
		for _, handler := range from.Handlers {
			id := routes.ModuleID(handler)
			h := &Handler{Module: strings.TrimPrefix(string(id), "http.handlers."), load: func() Fields { return fieldsOf(handler) }}
			b.addHandler(r, h)
			if h.Module == "invoke" {
				b.invoke(h)
				continue
			}
			b.listsIn(h, reflect.Indirect(reflect.ValueOf(handler)))
		}
	}
}

// listsIn adds the routes in the fields of a handler.
func (b *builder) listsIn(h *Handler, v reflect.Value) {
	if v.Kind() != reflect.Struct {
		return
	}
	for i := range v.NumField() {
		field := v.Type().Field(i)
		name := option.JSONName(field)
		if !field.IsExported() || name == "" || name == "-" {
			continue
		}
		switch in := v.Field(i).Interface().(type) {
		case caddyhttp.RouteList:
			b.loaded(addList(h, name, onTheWay), in)
		case *caddyhttp.HTTPErrorConfig:
			if in != nil {
				b.loaded(addList(h, name+".routes", onError), in.Routes)
			}
		case []caddyhttp.ResponseHandler:
			for n := range in {
				b.loaded(addList(h, fmt.Sprintf("%s[%d].routes", name, n), onTheWay), in[n].Routes)
			}
		}
	}
}

// Documented is a handler that keeps its JSON, because loading it removes parts.
type Documented interface{ Document() []byte }

func fieldsOf(module any) (fields Fields) {
	text, err := []byte(nil), error(nil)
	switch d, is := module.(Documented); {
	case is:
		text = d.Document()
	case isOfCaddy(module):
		text, err = json.Marshal(module)
	default:
		return nil
	}
	if err != nil || json.Unmarshal(text, &fields) != nil {
		return nil
	}
	return fields
}

// isOfCaddy reports whether a module is one of Caddy's own, which do not change once they have been loaded: those of
// plugins may, while they are written into JSON. No rule reads their fields.
func isOfCaddy(module any) bool {
	of := reflect.TypeOf(module)
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	return strings.HasPrefix(of.PkgPath(), "github.com/caddyserver/caddy/v2/")
}

func matcherSets(sets caddyhttp.MatcherSets) []Fields {
	all := make([]Fields, 0, len(sets))
	for _, set := range sets {
		fields := Fields{}
		for _, m := range set {
			name := strings.TrimPrefix(caddy.GetModuleID(m), "http.matchers.")
			if not, ok := reflect.Indirect(reflect.ValueOf(m)).Interface().(caddyhttp.MatchNot); ok {
				inner := []any{}
				for _, f := range matcherSets(not.MatcherSets) {
					inner = append(inner, f)
				}
				fields[name] = inner
				continue
			}
			var value any
			if isOfCaddy(m) {
				if text, err := json.Marshal(m); err == nil {
					_ = json.Unmarshal(text, &value)
				}
			}
			fields[name] = value
		}
		all = append(all, fields)
	}
	return all
}

// The tree of JSON.

// fromJSON returns the limiters of a server.
func fromJSON(server Fields) []*Handler {
	named := object(server["named_routes"])
	b := &builder{named: func(b *builder, name string, l *list) {
		if r := object(named[name]); r != nil {
			b.written(l, []any{r})
		}
	}}
	errors := &list{name: "errors.routes", phase: onError}
	b.written(errors, array(object(server["errors"])["routes"]))
	b.written(&list{name: "routes", errors: errors}, array(server["routes"]))
	return b.limiters
}

func (b *builder) written(l *list, all []any) {
	for _, one := range all {
		from := object(one)
		r := &route{group: text(from["group"]), load: func() []Fields { return objects(from["match"]) }}
		r.terminal, _ = from["terminal"].(bool)
		b.addRoute(l, r)
		for _, one := range array(from["handle"]) {
			fields := object(one)
			h := &Handler{Module: text(fields["handler"]), load: func() Fields { return fields }}
			b.addHandler(r, h)
			if h.Module == "invoke" {
				b.invoke(h)
				continue
			}
			b.writtenIn(h, fields)
		}
	}
}

func (b *builder) writtenIn(h *Handler, fields Fields) {
	if all := array(fields["routes"]); all != nil {
		b.written(addList(h, "routes", onTheWay), all)
	}
	if all := array(object(fields["errors"])["routes"]); all != nil {
		b.written(addList(h, "errors.routes", onError), all)
	}
	for n, one := range array(fields["handle_response"]) {
		b.written(addList(h, fmt.Sprintf("handle_response[%d].routes", n), onTheWay), array(object(one)["routes"]))
	}
}

func object(v any) Fields { o, _ := v.(map[string]any); return o }
func array(v any) []any   { a, _ := v.([]any); return a }
func text(v any) string   { s, _ := v.(string); return s }

func objects(v any) (all []Fields) {
	for _, one := range array(v) {
		all = append(all, object(one))
	}
	return all
}

// texts returns the texts of a list, or the only text.
func texts(v any) (all []string) {
	if s, ok := v.(string); ok {
		return []string{s}
	}
	for _, one := range array(v) {
		all = append(all, text(one))
	}
	return all
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
