//go:build check

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"
)

// This file has the calls of the feature service: a rate_limit_service in the same site, with the zones of
// the handlers, so that what it counts and what they count is in one bucket.

const servicePath = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"

// service is the handler of the calls. A descriptor names a zone, and then has what requests have as
// headers.
func (s *pairSite) service() string {
	var b strings.Builder
	fmt.Fprintf(&b, "route %s {\nheader X-Life %d\nrate_limit_service {\n%s\ndomain pair {\n", servicePath, s.p.life, strings.Join(s.handlerLines, "\n"))
	for _, zone := range s.zonesOf() {
		fmt.Fprintf(&b, "descriptor in %s {\ndescriptor x-key {\ndescriptor x-group {\ndescriptor x-staff {\ndescriptor x-events zone %[1]s\n}\n}\n}\n}\n", zone)
	}
	b.WriteString("}\n")
	for _, zone := range s.zonesOf() {
		b.WriteString(s.zoneText(zone))
	}
	b.WriteString("}\n}\n")
	return b.String()
}

// mayCall reports whether a request can be a call: JSON has no bytes that are no characters, and a call has no
// status.
func (p *pairRun) mayCall(r *pairRequest) bool {
	return p.has("service") && !r.free && !r.login && utf8.ValidString(r.key)
}

// call asks the service in place of the site, about all zones in one call.
func (p *pairRun) call(r pairRequest) pairAnswer {
	a := pairAnswer{pairRequest: r, outcome: map[string]string{}}
	type entry struct {
		Key   string `json:"key"`
		Value string `json:"value"`
	}
	type descriptor struct {
		Entries []entry `json:"entries"`
	}
	asked := struct {
		Domain      string       `json:"domain"`
		Descriptors []descriptor `json:"descriptors"`
	}{Domain: "pair"}
	events := pairLimit
	if r.low {
		events = lowLimit
	}
	for _, zone := range p.zones {
		asked.Descriptors = append(asked.Descriptors, descriptor{[]entry{
			{"in", zone}, {"x-key", r.key}, {"x-group", r.group},
			{"x-staff", map[bool]string{true: "yes", false: "no"}[r.staff]}, {"x-events", strconv.Itoa(events)},
		}})
	}
	text, err := json.Marshal(asked)
	if err != nil {
		a.err = err
		return a
	}
	resp, err := p.client.Post("http://pair"+servicePath, "application/json", bytes.NewReader(text))
	if err != nil {
		a.err = err
		return a
	}
	defer resp.Body.Close()
	var said struct {
		OverallCode string
		Statuses    []struct {
			Code         string
			CurrentLimit *struct{}
		}
	}
	if a.err = json.NewDecoder(resp.Body).Decode(&said); a.err != nil {
		return a
	}
	a.status, a.header = resp.StatusCode, resp.Header
	a.life, _ = strconv.Atoi(resp.Header.Get("X-Life"))
	switch {
	case resp.StatusCode != http.StatusOK || len(said.Statuses) != len(p.zones):
		a.err = errors.New("no answer of the service")
	case said.OverallCode == "OVER_LIMIT":
		a.status = http.StatusTooManyRequests
	default:
		for i, zone := range p.zones {
			if a.outcome[zone] = "allowed"; said.Statuses[i].CurrentLimit == nil {
				a.outcome[zone] = "error_allowed" // the store has not answered
			}
		}
	}
	return a
}
