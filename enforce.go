package shardlimit

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"sync"
)

// enforceSalt makes the order in which a zone is enforced independent of that
// in which clients are moved by a rollout. If it changed, it would be enforced
// for others.
const enforceSalt = 0x656e666f726365

// enforces tells whether the zone refuses this client, and does not only
// observe it.
func (z *compiledZone) enforces(clientKey string) bool {
	return z.enforced == places || placeOf(enforceSalt, clientKey) < z.enforced
}

// observes tells whether zone i only observes the client.
func (p *part) observes(i int) bool { return slices.Contains(p.observed, i) }

// observe asks the zones that only observe the client, while others are asked,
// and each by itself: no refusal of theirs may keep another zone from being
// asked. What it returns waits for the answers and deals with them.
func (p *part) observe(r *http.Request) (await func() error) {
	checks, takes := p.observedZones()
	if len(checks)+len(takes) == 0 {
		return func() error { return nil }
	}
	var calls sync.WaitGroup
	for _, i := range checks {
		calls.Go(func() { p.askIn(r.Context(), p.zones[i].in, (*openedStore).admit, []int{i}) })
	}
	for _, i := range takes {
		calls.Go(func() {
			p.askIn(context.WithoutCancel(r.Context()), p.zones[i].in, (*openedStore).take, []int{i})
		})
	}
	return func() error {
		calls.Wait()
		var errs [2]error
		if len(checks) > 0 {
			p.noteHeld(checks)
			errs[0] = p.handleErrors(r, checks)
		}
		if len(takes) > 0 {
			errs[1] = p.handleErrors(r, takes)
			p.noteTaken(takes)
		}
		return cmp.Or(errs[0], errs[1])
	}
}

// enforced are the zones that may refuse the client, apart from those that may
// have taken before the request waited.
func (p *part) enforced() []int {
	return p.where(func(i int) bool { return !p.observes(i) && (!p.zones[i].ChargeBefore || p.takes(i)) })
}

// observedZones are the zones that only observe the client, apart from those
// that have an answer already, and those that may have taken before the request
// waited.
func (p *part) observedZones() (checks, takes []int) {
	for _, i := range p.observed {
		switch {
		case p.wasAsked(i):
		case !p.zones[i].ChargeBefore:
			checks = append(checks, i)
		case p.takes(i):
			takes = append(takes, i)
		}
	}
	return checks, takes
}
