package lint

import "slices"

// harmless are handlers that need no protection: they prepare a request or a response, or give a fixed one.
var harmless = []string{
	"copy_response", "copy_response_headers", "encode", "error", "file_server", "headers", "intercept", "invoke", "log_append", "map",
	"request_body", "rewrite", "static_response", "subroute", "templates", "tracing", "vars",
}

// errorRoute finds limiters in error routes that protect nothing: what was to be limited has happened.
func errorRoute(s *Subject) {
	if !s.InErrors || !s.SeesAll || slices.ContainsFunc(s.After, func(h *Handler) bool { return !slices.Contains(harmless, h.Module) }) {
		return
	}
	s.Report("", "it is in an error route, where the request has failed already, and nothing behind it needs protection",
		"remove it there, and write a rate_limit before the handler that fails, with count_status, such as count_status 401")
}
