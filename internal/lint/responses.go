package lint

import (
	"regexp"
	"slices"
	"strings"
)

// cachedRefusal finds headers that let caches keep refusals for other clients.
func cachedRefusal(s *Subject) {
	const problem = "a refusal gets "
	if isProblem, _ := s.Limiter.Fields()["problem"].(bool); isProblem {
		for _, h := range s.Before {
			if isDeferred, _ := object(h.Fields()["response"])["deferred"].(bool); h.Module == "headers" && isDeferred {
				if header := h.caching(); header != "" {
					s.Report("", problem+header+" from a header with >, so caches may give it to other clients",
						"write it without >, so that the limiter's no-store replaces it")
				}
			}
		}
	}
	for l := s.Limiter.route.list; l != nil; l = l.outer() {
		if h := s.caches(l.errors); l.phase == onTheWay && h != nil {
			s.Report("", problem+h.caching()+" in an error route, so caches may give it to other clients",
				"write no-store there, or leave out 429, as in handle_errors 404 5xx")
			return
		}
	}
}

// outer returns the list around a list, or nil.
func (l *list) outer() *list {
	if l.parent == nil {
		return nil
	}
	return l.parent.route.list
}

// caches returns the handler of error routes that lets the limiter's refusals be cached, or nil.
func (s *Subject) caches(l *list) *Handler {
	if l == nil || !l.mayCache() {
		return nil
	}
	for _, r := range l.routes {
		takes := r.takesRefusals()
		if takes == no || r.where().isApartFrom(s.Limiter.way()) {
			continue
		}
		for _, h := range r.handlers {
			if h.caching() != "" && takes == yes {
				return h
			}
			for _, inner := range h.lists {
				if found := s.caches(inner); found != nil && inner.phase == onTheWay && takes == yes {
					return found
				}
			}
		}
		if takes == yes && r.answers() {
			return nil
		}
	}
	return nil
}

var (
	statusIn    = regexp.MustCompile(`\{http\.error\.status_code\} (?:in \[([\d, ]*)\]|== (\d+))`)
	statusRange = regexp.MustCompile(`\{http\.error\.status_code\} >= (\d+) && \{http\.error\.status_code\} <= (\d+)`)
)

// mayCache reports whether a handler in the list lets responses be cached.
func (l *list) mayCache() bool {
	if l.caching == nil {
		caches := slices.ContainsFunc(l.routes, func(r *route) bool {
			return slices.ContainsFunc(r.handlers, func(h *Handler) bool {
				return h.caching() != "" || slices.ContainsFunc(h.lists, (*list).mayCache)
			})
		})
		l.caching = &caches
	}
	return *l.caching
}

// takesRefusals reports whether an error route is for status 429.
func (r *route) takesRefusals() answer {
	if r.refusals == nil {
		takes := r.forRefusals()
		r.refusals = &takes
	}
	return *r.refusals
}

func (r *route) forRefusals() answer {
	if len(r.match()) == 0 {
		return yes
	}
	best := no
	for _, set := range r.match() {
		all := yes
		for name, value := range set {
			expression := text(value)
			if o := object(value); o != nil {
				expression = text(o["expr"])
			}
			switch name {
			case "host":
			case "expression":
				all = min(all, forRefusals(expression))
			default:
				all = min(all, unsure)
			}
		}
		best = max(best, all)
	}
	return best
}

// forRefusals reports whether an expression, as handle_errors writes it, is true for status 429.
func forRefusals(expression string) answer {
	rest := statusIn.ReplaceAllString(statusRange.ReplaceAllString(expression, ""), "")
	if strings.Trim(rest, " |") != "" {
		return unsure
	}
	for _, m := range statusIn.FindAllStringSubmatch(expression, -1) {
		if slices.Contains(strings.FieldsFunc(m[1]+" "+m[2], func(r rune) bool { return r == ',' || r == ' ' }), "429") {
			return yes
		}
	}
	for _, m := range statusRange.FindAllStringSubmatch(expression, -1) {
		if m[1] <= "429" && "429" <= m[2] {
			return yes
		}
	}
	return no
}

var (
	isCacheHeader = regexp.MustCompile(`(?i)^(?:(?:[\w-]+-)?Cache-Control|Surrogate-Control)$`)
	mayBeKept     = regexp.MustCompile(`(?i)\bpublic\b|\b(?:s-maxage|max-age)\s*=\s*"?0*[1-9]|\bimmutable\b`)
	mayNotBeKept  = regexp.MustCompile(`(?i)\b(?:no-store|no-cache|private)\b`)
)

// caching returns the header with which a handler lets caches keep a response, or "".
func (h *Handler) caching() string {
	response := object(h.Fields()["response"])
	if h.Module != "headers" || response["require"] != nil {
		return ""
	}
	set := object(response["set"])
	for _, name := range sortedKeys(set) {
		value := strings.Join(texts(set[name]), ", ")
		if isCacheHeader.MatchString(name) && mayBeKept.MatchString(value) && !mayNotBeKept.MatchString(value) {
			return name + " " + value
		}
	}
	return ""
}

// literalHeader finds placeholders of the limiter that are read before they have a value.
func literalHeader(s *Subject) {
	const prefix = "{http.rate_limit."
	for _, h := range s.Before {
		var ops []Fields
		response := object(h.Fields()["response"])
		isDeferred, _ := response["deferred"].(bool)
		switch {
		case h.Module == "headers" && !isDeferred && response["require"] == nil:
			ops = []Fields{object(response["set"]), object(response["add"])}
		case h.Module != "headers":
			continue
		}
		find := func(ops []Fields, remedy func(name string) string) {
			for _, op := range ops {
				for _, name := range sortedKeys(op) {
					if value := strings.Join(texts(op[name]), " "); strings.Contains(value, prefix) {
						s.Report("", "header "+name+" is set before it, so its value is the text "+value, remedy(name))
					}
				}
			}
		}
		find(ops, func(name string) string {
			return "write header >" + name + ", and for refusals write it in handle_errors as well"
		})
		request := object(h.Fields()["request"])
		find([]Fields{object(request["set"]), object(request["add"])}, func(string) string { return "move request_header behind rate_limit, in a route block" })
	}
}
