package limiter

import (
	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// evaluation is one request in the zones of one handler. Its slices have the same
// length.
type evaluation struct {
	limiter *Limiter
	repl    *caddy.Replacer
	zones   []inZone
	// reqs have their final cost once their zones have settled.
	reqs   []store.Request
	states []store.State
	// rare is nil for most requests.
	rare *rare
}

// rare holds the fields that few evaluations need. It is allocated on demand.
type rare struct {
	lease *lease
	// refusal is the decision that ended the request; only the first evaluation of a request has it.
	refusal *decision
	// zones are by index, as far as any needs it.
	zones []rareZone
}

// rareZone holds what few zones of a request need.
type rareZone struct {
	// openErr is why the store could not be opened.
	openErr error
	// block is how an operator has blocked the client.
	block store.Override
	// taken is the take from a zone that forgives, while the request runs.
	taken take
	// own is what the client's own bucket would be asked, where clients share one.
	own ownRequest
	// err is why the unknown bucket counts the request.
	err error
}

// ownRequest is what sets a client's own bucket apart from one that clients share.
type ownRequest struct {
	clientKey     string
	events, burst int64
}

// rarely returns e.rare, and makes it if there is none.
func (e *evaluation) rarely() *rare {
	if e.rare == nil {
		e.rare = new(rare)
	}
	return e.rare
}

// roomForOne is room for the slices of an evaluation in one zone, as most are, and
// roomForTwo for two. They are allocated with the tracker.
type roomForOne struct {
	zones  [1]inZone
	reqs   [1]store.Request
	states [1]store.State
}

type roomForTwo struct {
	zones  [2]inZone
	reqs   [2]store.Request
	states [2]store.State
}

func (r *roomForOne) lend(e *evaluation) {
	e.zones, e.reqs, e.states = r.zones[:0], r.reqs[:0], r.states[:0]
}

func (r *roomForTwo) lend(e *evaluation) {
	e.zones, e.reqs, e.states = r.zones[:0], r.reqs[:0], r.states[:0]
}

// rareZone returns what is rare about zone i, and makes room for it.
func (e *evaluation) rareZone(i int) *rareZone {
	r := e.rarely()
	if len(r.zones) <= i {
		r.zones = append(r.zones, make([]rareZone, i+1-len(r.zones))...)
	}
	return &r.zones[i]
}

// add adds a zone, with the block of its client, or nil.
func (e *evaluation) add(z *boundZone, req store.Request, block *store.Override) {
	added := inZone{boundZone: z}
	if !z.enforces(req.ClientKey) {
		added.role = observes
	}
	e.zones = append(e.zones, added)
	e.reqs = append(e.reqs, req)
	if block != nil {
		e.setBlock(len(e.zones)-1, block)
	}
}

// setBlock notes the block of the client of zone i.
func (e *evaluation) setBlock(i int, block *store.Override) {
	e.rareZone(i).block = *block
	e.zones[i].role = blocks
}
