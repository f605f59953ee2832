package limiter

import (
	"errors"
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/internal/identity"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// Hold is what a call of rate_limit_service has spent of a bucket, as any process needs it to give it back
// or to charge more, whatever its config says of the zone by then.
type Hold struct {
	Store string      `json:"store,omitempty"`
	Limit store.Limit `json:"limit"`
	// ClientKey may have any bytes.
	ClientKey []byte `json:"key,omitempty"`
	Events    int64  `json:"events,omitempty"`
	Burst     int64  `json:"burst,omitempty"`
	// Cost is what is held.
	Cost int64 `json:"cost"`
	// IsTaken is set if the store has confirmed that the cost was spent, so that it can be given back. If
	// not, on_error has let the call pass.
	IsTaken bool          `json:"taken,omitempty"`
	ID      string        `json:"id,omitempty"`
	Receipt store.Receipt `json:"receipt,omitzero"`
	At      *store.Place  `json:"at,omitempty"`
	// Hold is the number under which the store holds it, or 0.
	Hold uint32 `json:"hold,omitempty"`
}

// Hold returns what the call holds in the zone at that place of its decisions, once it has ended, and
// whether the zone counts it: one that only observes does not where there is no room.
func (p *Passage) Hold(place int) (h Hold, counts bool) {
	e := p.tracker.own[0]
	z := e.zones[place]
	req := z.ask.Request
	if o := z.outcome(); o != telemetry.Allowed && o != telemetry.ErrorAllowed {
		return Hold{}, false
	}
	return Hold{
		Store: z.handle.Name, Limit: *req.Limit, ClientKey: []byte(req.ClientKey), Events: req.Events, Burst: req.Burst,
		Cost: req.Cost, IsTaken: z.stored == phaseTaken, ID: req.ID, Receipt: req.Receipt, At: req.At, Hold: req.Hold,
	}, true
}

// Validate returns an error, which wraps [store.ErrDamaged], unless h can be what [Passage.Hold] returns: what a
// store keeps may be damaged.
func (h *Hold) Validate() error {
	l := &h.Limit
	isValid := l.Zone != "" && algorithm.CheckLimit(l) == nil &&
		algorithm.CheckEvents(l.Algorithm, h.Events) == nil && algorithm.CheckBurst(l, h.Events, h.Burst) == nil &&
		len(h.ClientKey) > 0 && len(h.ClientKey) <= store.MaxClientKey &&
		h.Cost >= 0 && h.Cost <= store.MaxEvents && isSound(h.Receipt)
	for p := h.At; p != nil; p = p.More {
		isValid = isValid && isSound(p.Receipt)
	}
	if !isValid {
		return fmt.Errorf("%w: no call can hold %d in zone %.100q", store.ErrDamaged, h.Cost, l.Zone)
	}
	return nil
}

func isSound(r store.Receipt) bool {
	return r.Period >= 0 && r.Period <= store.MaxInteger && r.Position >= 0 && r.Position <= store.MaxInteger
}

// GiveBack gives back a part of what is held, and waits for that. The error wraps [store.ErrNotExecuted]
// if it has to be tried again. Shards at which that is done are in h no more.
func (l *Limiter) GiveBack(h *Hold, amount int64) error {
	handle, open, err := l.enterFor(h)
	if err != nil {
		return err
	}
	defer handle.Leave()
	var left *store.Place
	request := h.request(amount)
	for _, part := range request.Parts() {
		refunded := make(chan error, 1)
		open.Accounts.RefundReported(*part, func(st store.State) { refunded <- st.Err })
		if remote, is := open.Base.(store.Remote); is {
			remote.Hurry(string(h.ClientKey))
		}
		failed := <-refunded
		if err = errors.Join(err, failed); errors.Is(failed, store.ErrNotExecuted) && part.At != nil {
			left = &store.Place{Shard: part.At.Shard, More: left, Receipt: part.Receipt}
		}
	}
	if left != nil {
		h.At, h.Receipt = left, left.Receipt
	}
	if err != nil {
		return err
	}
	if z := l.zoneOf(h); z != nil {
		z.Counts.Refunded.Add(amount)
		z.room.wake(string(h.ClientKey))
	}
	return nil
}

// EndHold makes what is held count for good, without waiting.
func (l *Limiter) EndHold(h *Hold) {
	handle, open, err := l.enterFor(h)
	if err != nil {
		return
	}
	defer handle.Leave()
	r := h.request(0)
	open.Refund([]*store.Request{&r})
}

// ChargeMore charges an amount to the bucket of a hold, whether or not it fits, as charges of requests are:
// without waiting, and while the shard is away once it is back. The error wraps [store.ErrNotExecuted].
func (l *Limiter) ChargeMore(h *Hold, amount int64) error {
	handle, open, err := l.enterFor(h)
	if err != nil {
		return err
	}
	defer handle.Leave()
	req := h.request(amount)
	if req.Receipt, req.Hold = (store.Receipt{}), 0; req.ID != "" {
		// What is under the old ID stays.
		req.ID = identity.NewRequestID()
	}
	open.Charge([]*store.Request{&req})
	if z := l.zoneOf(h); z != nil {
		z.Counts.Charged.Add(amount)
	}
	return nil
}

func (h *Hold) request(cost int64) store.Request {
	return store.Request{
		Limit: &h.Limit, ClientKey: string(h.ClientKey), Events: h.Events, Burst: h.Burst, Cost: cost, ID: h.ID, Receipt: h.Receipt, At: h.At, Hold: h.Hold,
	}
}

// enterFor enters the store of a hold.
func (l *Limiter) enterFor(h *Hold) (handle *stores.Handle, open *stores.Opened, err error) {
	for _, handle := range l.Stores() {
		if handle.Name != h.Store {
			continue
		}
		if open, err = handle.Enter(); err != nil {
			err = store.NotExecuted(err)
		}
		return handle, open, err
	}
	return nil, nil, fmt.Errorf("%w: store %s is none of this config's", store.ErrNotExecuted, h.Store)
}

// zoneOf returns the zone of a hold in its store, or nil if the config has none of that name.
func (l *Limiter) zoneOf(h *Hold) *boundZone {
	for _, z := range l.Zones {
		for in, handle := range l.Stores() {
			if z.Name == h.Limit.Zone && handle.Name == h.Store {
				return &z.bound[in]
			}
		}
	}
	return nil
}
