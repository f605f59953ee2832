package shardlimit

import (
	"encoding/json"
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// problem is the body of a refusal, by RFC 9457 and the problem types of
// draft-ietf-httpapi-ratelimit-headers-10.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Violated []string `json:"violated-policies,omitempty"`
}

const (
	problemTypes         = "https://iana.org/assignments/http-problem-types#"
	problemQuotaExceeded = problemTypes + "quota-exceeded"
	problemReduced       = problemTypes + "temporary-reduced-capacity"
)

// writeProblem answers a request that the limiter ended because of err, unless
// an error route does. It returns what is left to be handled.
func (p *part) writeProblem(w http.ResponseWriter, r *http.Request, err error) error {
	var handlerErr caddyhttp.HandlerError
	if !errors.As(err, &handlerErr) || handlerErr.StatusCode == statusClientClosedRequest || hasErrorRoute(r, handlerErr) {
		return err
	}
	body, marshalErr := json.Marshal(p.problem(handlerErr.StatusCode))
	if marshalErr != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(handlerErr.StatusCode)
	if r.Method != http.MethodHead {
		// Who does not take the body has left.
		_, _ = w.Write(body)
	}
	return nil
}

// problem tells why the part ended the request.
func (p *part) problem(status int) problem {
	tell := problem{Type: problemReduced, Title: "The service is short of capacity", Status: status}
	for i, z := range p.zones {
		if !p.refuses(i) {
			continue
		}
		tell.Violated = append(tell.Violated, z.Name)
		if p.reason(i) != reasonReserved {
			tell.Type, tell.Title = problemQuotaExceeded, "The quota is exceeded"
		}
	}
	return tell
}

// hasErrorRoute tells whether the server has a route for the error, which gets
// the request as it came.
func hasErrorRoute(r *http.Request, err caddyhttp.HandlerError) bool {
	server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || server == nil || server.Errors == nil || len(server.Errors.Routes) == 0 {
		return false
	}
	if original, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request); ok {
		came := *r
		came.Method, came.RemoteAddr, came.RequestURI, came.URL = original.Method, original.RemoteAddr, original.RequestURI, original.URL
		r = &came
	}
	return anyRoute(server.Errors.Routes, server.Errors.WithError(r, err))
}

// anyRoute tells whether a route is for r. One whose matchers cannot tell counts
// as one that is.
func anyRoute(routes caddyhttp.RouteList, r *http.Request) bool {
	for _, route := range routes {
		if matches, err := route.MatcherSets.AnyMatchWithError(r); err == nil && !matches {
			continue
		}
		for _, handler := range route.Handlers {
			if sub, ok := handler.(*caddyhttp.Subroute); !ok || anyRoute(sub.Routes, r) {
				return true
			}
		}
	}
	return false
}
