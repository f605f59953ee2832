package shardlimit

import (
	"context"
)

// divert makes new clients beyond the bound share a bucket, in each store in
// which the part counts.
func (p *part) divert(ctx context.Context) {
	for in := range p.visits {
		open := p.visits[in].open
		if open == nil || open.newcomers == nil {
			continue
		}
		if !p.split {
			for _, i := range open.newcomers.strangers(ctx, p.reqs, p.limiter.Now()) {
				p.shareOverflow(i)
			}
			continue
		}
		for i, z := range p.zones {
			if z.in == in && len(open.newcomers.strangers(ctx, p.reqs[i:i+1], p.limiter.Now())) > 0 {
				p.shareOverflow(i)
			}
		}
	}
}

// shareOverflow makes zone i count the request in its overflow bucket.
func (p *part) shareOverflow(i int) {
	if p.diverted == nil {
		p.diverted = map[int]string{}
	}
	p.diverted[i] = p.reqs[i].ClientKey
	p.reqs[i].ClientKey = overflowKey
}

// resolvedKey is what the key of zone i yields for the request, whichever bucket
// counts it.
func (p *part) resolvedKey(i int) string {
	if key, ok := p.diverted[i]; ok {
		return key
	}
	return p.reqs[i].ClientKey
}
