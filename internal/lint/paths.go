package lint

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

// answer is whether a matcher matches a path; it is not sure of what depends on more than the path.
type answer int

const (
	no answer = iota
	unsure
	yes
)

// matchesPath reports whether matcher sets match a path.
func matchesPath(sets []Fields, at string) answer {
	if len(sets) == 0 {
		return yes
	}
	best := no
	for _, set := range sets {
		all := yes
		for name, value := range set {
			all = min(all, matcherMatches(name, value, at))
		}
		best = max(best, all)
	}
	return best
}

func matcherMatches(name string, value any, at string) answer {
	switch name {
	case "path":
		for _, pattern := range texts(value) {
			if fits(pattern, at) {
				return yes
			}
		}
		return no
	case "path_regexp":
		re, err := regexp.Compile(text(object(value)["pattern"]))
		switch {
		case err != nil:
			return unsure
		case re.MatchString(at):
			return yes
		}
		return no
	case "not":
		return yes - matchesPath(objects(value), at)
	case "file":
		// What it tries last may be there for all paths.
		if names := texts(object(value)["try_files"]); len(names) > 0 && !strings.Contains(names[len(names)-1], "{http.request.uri") {
			return yes
		}
	}
	return unsure
}

// fits reports whether a path fits a pattern of the matcher path.
func fits(pattern, at string) bool {
	pattern, at = strings.ToLower(pattern), strings.ToLower(at)
	inner := strings.Trim(pattern, "*")
	switch begins, ends := strings.HasPrefix(pattern, "*"), strings.HasSuffix(pattern, "*"); {
	case strings.ContainsAny(inner, "*?["):
		isMatch, _ := path.Match(pattern, at)
		return isMatch
	case begins && ends:
		return strings.Contains(at, inner)
	case begins:
		return strings.HasSuffix(at, inner)
	case ends:
		return strings.HasPrefix(at, inner)
	}
	return pattern == at
}

// pattern is what a matcher asks of paths.
type pattern struct {
	text string
	// isNot is set if the matcher is negated.
	isNot bool
}

var (
	// pathCall is a path matcher in an expression.
	pathCall = regexp.MustCompile(`\bpath\(\s*(?:'([^']*)'|"([^"]*)")`)
	// beginning is what an anchored regular expression asks of the beginning of a path.
	beginning = regexp.MustCompile(`^\^(/[\w/-]+)`)
)

// patternsIn returns the patterns of the paths that matcher sets ask for.
func patternsIn(sets []Fields, isNot bool) (all []pattern) {
	for _, set := range sets {
		for _, name := range sortedKeys(set) {
			switch value := set[name]; name {
			case "path":
				for _, p := range texts(value) {
					all = append(all, pattern{p, isNot})
				}
			case "path_regexp":
				if m := beginning.FindStringSubmatch(text(object(value)["pattern"])); m != nil {
					all = append(all, pattern{m[1] + "*", isNot})
				}
			case "expression":
				expression := text(value)
				if o := object(value); o != nil {
					expression = text(o["expr"])
				}
				for _, m := range pathCall.FindAllStringSubmatch(expression, -1) {
					all = append(all, pattern{m[1] + m[2], isNot || strings.Contains(expression, "!path(")})
				}
			case "not":
				all = append(all, patternsIn(objects(value), !isNot)...)
			}
		}
	}
	return all
}

// movedPath finds limits by paths that no request has any more, because a handler before has changed them.
func movedPath(s *Subject) {
	for _, z := range s.Zones {
		own := patternsIn(objects(z.Fields["match"]), false)
		for _, reserve := range objects(z.Fields["reserves"]) {
			own = append(own, patternsIn(objects(reserve["match"]), false)...)
		}
		s.moved(z.Name, own, nil)
	}
	for r := range s.Limiter.way() {
		s.moved("", patternsIn(r.match(), false), r)
	}
}

// moved looks whether requests whose path fits a pattern have another path when the pattern is matched: by the
// limiter, or by its route.
func (s *Subject) moved(zone string, all []pattern, by *route) {
	for _, p := range all {
		if strings.Contains(p.text, "%") || strings.Trim(p.text, "/*") == "" {
			continue
		}
		sample := strings.ReplaceAll(p.text, "*", "x")
		if !strings.HasPrefix(sample, "/") {
			sample = "/" + sample
		}
		at := sample
		var culprit *Handler
		for _, h := range s.Before {
			if h.Module != "rewrite" || by != nil && by.contains(h) {
				continue
			}
			switch s.meets(h, at) {
			case no:
				continue
			case unsure:
				return
			}
			moved, isSure := s.rewritten(h, at, p)
			if !isSure {
				return
			}
			if moved != at && culprit == nil {
				culprit = h
			}
			at = moved
		}
		if culprit == nil || slices.ContainsFunc(all, func(p pattern) bool { return fits(p.text, at) }) {
			continue
		}
		remedy := "move rate_limit before it, in a route block"
		if prefix := text(culprit.Fields()["strip_path_prefix"]); prefix != "" {
			left := "/" + strings.TrimLeft(strings.TrimPrefix(p.text, prefix), "/")
			remedy = fmt.Sprintf("write path %s, or move rate_limit before it, in a route block", left)
		}
		s.Report(zone, "it matches the path "+p.text+" when a handler before, "+culprit.rewriting()+", has made it "+at, remedy)
		return
	}
}

// contains reports whether a handler is in the route, or in a handler of it.
func (r *route) contains(h *Handler) bool {
	return h.route == r || h.route.list.parent != nil && r.contains(h.route.list.parent)
}

// meets reports whether a request with a path passes a handler before the limiter.
func (s *Subject) meets(h *Handler, at string) answer {
	sure := yes
	for r := range h.way() {
		matches := matchesPath(r.match(), at)
		// The limiter gets only what its own routes match.
		if matches == unsure && r.contains(s.Limiter) {
			matches = yes
		}
		sure = min(sure, matches)
	}
	return sure
}

// rewriting says what changes the path.
func (h *Handler) rewriting() string {
	fields := h.Fields()
	for _, option := range []string{"strip_path_prefix", "strip_path_suffix"} {
		if value := text(fields[option]); value != "" {
			return strings.Replace(option, "_path", "", 1) + " " + value
		}
	}
	switch uri := text(fields["uri"]); {
	case strings.HasPrefix(uri, "{http.matchers.file."):
		return "try_files"
	case uri != "":
		return "rewrite to " + uri
	}
	return "uri replace"
}

// rewritten returns what a handler makes of a path that a pattern asks for, if that is sure.
func (s *Subject) rewritten(h *Handler, at string, p pattern) (to string, isSure bool) {
	fields := h.Fields()
	if uri := text(fields["uri"]); uri != "" {
		if strings.HasPrefix(uri, "{http.matchers.file.") {
			return s.tried(h, at, p)
		}
		if at, isSure = replaced(uri, at); !isSure {
			return "", false
		}
	}
	if prefix := text(fields["strip_path_prefix"]); strings.Contains(prefix, "%") || strings.Contains(prefix, "{") {
		return "", false
	} else if rest, is := strings.CutPrefix(at, prefix); is {
		at = rest
	}
	at = strings.TrimSuffix(at, text(fields["strip_path_suffix"]))
	for _, part := range objects(fields["uri_substring"]) {
		find, with := text(part["find"]), text(part["replace"])
		if find == "" || strings.Contains(find+with, "{") {
			return "", false
		}
		n := -1
		if limit, _ := part["limit"].(float64); limit > 0 {
			n = int(limit)
		}
		at = strings.Replace(at, find, with, n)
	}
	for _, part := range objects(fields["path_regexp"]) {
		re, err := regexp.Compile(text(part["find"]))
		if err != nil || strings.Contains(text(part["replace"]), "{") {
			return "", false
		}
		at = re.ReplaceAllString(at, text(part["replace"]))
	}
	if !strings.HasPrefix(at, "/") {
		at = "/" + at
	}
	return path.Clean(at), true
}

// wholePaths are placeholders with the path.
var wholePaths = regexp.MustCompile(`\{http\.request\.(?:orig_)?uri(?:\.path)?(?:_escaped)?\}`)

// replaced returns the path that a URI with placeholders becomes.
func replaced(uri, at string) (to string, isSure bool) {
	to, _, _ = strings.Cut(wholePaths.ReplaceAllLiteralString(uri, at), "?")
	switch {
	case to == "":
		return at, true
	case strings.Contains(to, "{"):
		return "", false
	}
	return "/" + strings.TrimLeft(to, "/"), true
}

// tried returns what try_files makes of a path for which there is no file. That is sure if nothing behind serves
// files.
func (s *Subject) tried(h *Handler, at string, p pattern) (to string, isSure bool) {
	servesFiles := func(h *Handler) bool {
		return h.Module == "file_server" || text(object(h.Fields()["transport"])["protocol"]) == "fastcgi"
	}
	if p.isNot || path.Ext(p.text) != "" || slices.ContainsFunc(s.After, servesFiles) || !slices.ContainsFunc(s.After, isProxy) {
		return "", false
	}
	sets := h.route.match()
	if len(sets) != 1 {
		return "", false
	}
	names := texts(object(sets[0]["file"])["try_files"])
	if len(names) == 0 || strings.HasPrefix(names[len(names)-1], "=") {
		return at, true
	}
	return replaced(names[len(names)-1], at)
}

// isProxy reports whether a handler hands requests on to a backend, as forward_auth does not.
func isProxy(h *Handler) bool {
	return h.Module == "reverse_proxy" && (h.Fields()["rewrite"] == nil || h.Fields()["handle_response"] == nil)
}
