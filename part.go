package shardlimit

import (
	"context"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// part is what one handler asks of its store for one request. Its slices have
// the same length.
type part struct {
	handler *Handler
	zones   []*Zone
	reqs    []store.Request
	states  []store.State
	// local tells which states came from the local counts.
	local []bool
	// open is the store, held until the request has settled.
	open *openedStore

	// Room for the few zones that most handlers have.
	zonesRoom [2]*Zone
	reqsRoom  [2]store.Request
}

func (p *part) add(z *Zone, req store.Request) {
	p.zones = append(p.zones, z)
	p.reqs = append(p.reqs, req)
}

// check sets the states. An error of the store is a state's; the error it
// returns ends the request.
func (p *part) check(r *http.Request) (err error) {
	use := p.handler.use
	if p.open, err = use.enter(); err != nil {
		p.states = make([]store.State, len(p.reqs))
		for i := range p.states {
			p.states[i].Err = err
		}
	} else {
		p.states = p.open.store.Check(r.Context(), p.reqs)
	}
	for i, z := range p.zones {
		err := p.states[i].Err
		if err == nil {
			continue
		}
		if r.Context().Err() != nil {
			// The client left while the store was asked.
			return caddyhttp.Error(statusClientClosedRequest, err)
		}
		use.failed(p.handler.now(), z.Name, err)
		if z.onError == onErrorLocal && p.open != nil {
			if p.local == nil {
				p.local = make([]bool, len(p.zones))
			}
			p.local[i] = true
			p.states[i] = p.open.local.Check(r.Context(), p.reqs[i:i+1])[0]
		}
	}
	return nil
}

// statusClientClosedRequest is what Caddy reports where a client left.
const statusClientClosedRequest = 499

// charge spends what the request costs where its status is not free, and makes
// the states show it.
func (p *part) charge(status int) {
	if p.states == nil {
		// The check did not come to an end.
		return
	}
	charged := p.reqs
	for i, z := range p.zones {
		if z.isFree(status) {
			charged = nil
			continue
		}
		st := &p.states[i]
		st.Used += p.reqs[i].Cost
		st.Remaining = max(st.Limit-st.Used, 0)
		if p.local != nil && p.local[i] {
			p.open.local.Charge(context.Background(), p.reqs[i:i+1])
		}
	}
	if charged == nil {
		for i, z := range p.zones {
			if !z.isFree(status) {
				charged = append(charged, p.reqs[i])
			}
		}
	}
	switch {
	case len(charged) == 0 || p.open == nil:
	case p.open.detacher != nil:
		p.open.detacher.ChargeDetached(charged)
	default:
		p.open.store.Charge(context.Background(), charged)
	}
}

// release lets go of the store.
func (p *part) release() {
	if p.open != nil {
		p.open = nil
		p.handler.use.leave()
	}
}
