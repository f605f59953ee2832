package shardlimit

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// simulationPatience bounds a simulation.
const simulationPatience = 5 * time.Second

// adminSimulate answers POST /rate_limit/simulate: what would become of a
// request, of which nothing is counted.
func adminSimulate(_ runningConfig, r *http.Request) (any, error) {
	w := nowhere{}
	asked, err := readSimulatedRequest(w, r.Body)
	if err != nil {
		return nil, err
	}
	web, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return nil, apiError(http.StatusNotFound, errors.New("the running config has no HTTP servers"))
	}
	ctx, cancel := context.WithTimeout(r.Context(), simulationPatience)
	defer cancel()
	request, server, err := asked.prepare(ctx, w, web.(*caddyhttp.App))
	if err != nil {
		if apiErr := new(caddy.APIError); !errors.As(err, apiErr) {
			err = apiError(http.StatusBadRequest, err)
		}
		return nil, err
	}
	s := newSimulation(w)
	k := &walk{server: server, w: w, groups: map[string]bool{}, meet: s.Meet}
	err = k.routes(server.Routes, request, func(*http.Request) error { return nil })
	if err != nil {
		s.Answer.Error = err.Error()
	}
	s.Answer.PassedOver = k.passedOver
	return s.Answer, nil
}

// nowhere is where the response of a request goes that is simulated.
type nowhere http.Header

// Header implements [http.ResponseWriter].
func (w nowhere) Header() http.Header { return http.Header(w) }

// Write implements [http.ResponseWriter].
func (nowhere) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements [http.ResponseWriter].
func (nowhere) WriteHeader(int) {}
