package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// procedure is the path of the calls of rate_limit_service.
const procedure = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"

// call asks rate_limit_service, by JSON, and returns the response that a gateway would make of the answer: a
// refusal without limit headers is a store's failure.
func call(c *client, client *http.Client, url string) (r response) {
	asked := fmt.Sprintf(`{"domain": %q, "descriptors": [{"entries": [{"key": "x-client", "value": %q}, {"key": "x-events", "value": "%d"}]}]}`, zone, c.name, c.events)
	r.begun = time.Now()
	defer func() { r.ended = time.Now() }()
	resp, err := client.Post(url+procedure, "application/json", bytes.NewReader([]byte(asked)))
	if err != nil {
		return r
	}
	defer resp.Body.Close()
	var answer struct {
		OverallCode          string
		ResponseHeadersToAdd []struct{ Key, Value string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || resp.StatusCode != http.StatusOK {
		return r
	}
	header := http.Header{}
	for _, h := range answer.ResponseHeadersToAdd {
		header.Add(h.Key, h.Value)
	}
	r.limited = header.Get("X-RateLimit-Limit") != ""
	r.remaining, r.reset = header.Get("X-RateLimit-Remaining"), header.Get("X-RateLimit-Reset")
	switch {
	case answer.OverallCode == "OK":
		r.status = http.StatusOK
	case r.limited:
		r.status = http.StatusTooManyRequests
	default:
		r.status = http.StatusServiceUnavailable
	}
	return r
}
