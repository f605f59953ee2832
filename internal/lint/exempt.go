package lint

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// pathExempt finds exemptions and reserves by a path that a backend may read in another way: matchers clean it,
// and a proxy hands on what the client wrote.
func pathExempt(s *Subject) {
	proxy := slices.IndexFunc(s.After, isProxy)
	if proxy < 0 || s.InErrors {
		return
	}
	look := func(zone, what string, patterns []pattern) bool {
		for _, p := range patterns {
			if !s.reaches(p.text, s.After[:proxy]) {
				continue
			}
			s.Report(zone, what+" by the path "+p.text+", which matchers compare without /../ and the like, and the backend gets as it was written",
				fmt.Sprintf("write %s in place of path %s, which compares what the backend gets", exactly(p.text), p.text))
			return true
		}
		return false
	}
	for r := range s.Limiter.way() {
		if look("", "it exempts requests", exempted(r.match())) {
			return
		}
	}
	for _, z := range s.Zones {
		if look(z.Name, "it exempts requests", exempted(objects(z.Fields["match"]))) {
			continue
		}
		for _, reserve := range objects(z.Fields["reserves"]) {
			if look(z.Name, "it keeps room for requests", chosen(objects(reserve["match"]))) {
				break
			}
		}
	}
}

// chosen returns the patterns of sets that ask for nothing but what clients write.
func chosen(sets []Fields) (all []pattern) {
	for _, set := range sets {
		if !slices.ContainsFunc(sortedKeys(set), func(name string) bool {
			return !slices.Contains([]string{"path", "path_regexp", "method", "header", "host", "query"}, name)
		}) {
			all = append(all, patternsIn([]Fields{set}, false)...)
		}
	}
	return all
}

// exempted returns the patterns of negated sets.
func exempted(sets []Fields) (all []pattern) {
	for _, set := range sets {
		all = append(all, chosen(objects(set["not"]))...)
	}
	return all
}

// reaches reports whether requests for a path come to a proxy, past the handlers before it.
func (s *Subject) reaches(path string, before []*Handler) bool {
	if strings.Trim(path, "/*") == "" {
		return false
	}
	sample := strings.ReplaceAll(path, "*", "x")
	return !slices.ContainsFunc(before, func(h *Handler) bool {
		return h.answers() && !h.route.contains(s.Limiter) && s.meets(h, sample) == yes
	})
}

// exactly returns a matcher of the path that compares the bytes of the URI.
func exactly(path string) string {
	if prefix, is := strings.CutSuffix(path, "*"); is {
		return "vars_regexp {uri} ^" + regexp.QuoteMeta(strings.TrimSuffix(prefix, "/")) + `(/\w[\w.-]*)*(\?|$)`
	}
	return "vars {uri} " + path
}
