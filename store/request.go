package store

import (
	"math"
	"math/rand/v2"
	"time"
)

// Request asks about one bucket.
type Request struct {
	// Limit is the bucket's limit; it must not be nil, nor change while a call
	// runs. Equal limits are the same limit.
	Limit *Limit
	// ClientKey identifies the client, by any bytes, of which there are at most
	// MaxClientKey.
	ClientKey string
	// At is where the bucket is; nil for the client's owner. A Take sets it to where it has spent the cost, or may have
	// if that is uncertain.
	At *Place
	// Events is how many events the window admits for this client, from 1 to
	// MaxInteger. It is not part of the bucket: changing it keeps the count.
	Events int64
	// Burst is how many events [GCRA] admits at once; 0 means Events. The
	// other algorithms do not look at it.
	Burst int64
	// Reserved is how much of Events, or of Burst, this request may not use,
	// because it is kept for more important ones.
	Reserved int64
	// Ahead is what is waiting to be spent before this request: a Check asks
	// for as much more. It is 0 for the other operations.
	Ahead int64
	// Primary makes a Check or Peek ask the primary; a replica answers a Check only if the primary
	// cannot.
	Primary bool
	// Shared is set for a Charge that the client's other owners get as well: with its shard it is gone.
	Shared bool
	// Hold, unless it is 0, makes the state of a Check, Peek, Take or Refund say what is held in the bucket. A Take
	// under [NewHold] is held if it leaves little: what it has spent may come back. A Refund under the same number,
	// of any cost, ends that. Leases are not held.
	Hold uint32
	// Cost is what the request spends, or gets back, from 0 to MaxInteger.
	Cost int64
	// Batch is how many events this process may take at once, to serve other
	// requests from them: 0 for none, or [BatchAuto]. Only a ledger looks at it.
	Batch int64
	// ID distinguishes this request from all others where events are kept one by one:
	// under [SlidingLog] and [Concurrency], which need it to spend and to refund.
	ID string
	// Receipt is the State.Receipt of the Take that a Refund undoes.
	Receipt Receipt
	// Penalty is how long penalties of the zone last, which bounds what is believed of a
	// stored one, if it is more than a day; 0 if that is not known.
	Penalty time.Duration
	// Ends is when what a Charge spends stops counting: a charge that arrives late counts as long as one that
	// arrived when its request settled. A Check or Take that opens a window opens it until then. It is an
	// instant by the store's clock, in microseconds since 1970 or, less than 0, minus the time that is left; 0 is
	// as if the request had just settled. The store believes no later instant than a charge of now would have, and counts no charge
	// that is over. Under [GCRA] it is the arrival time that a Charge or Take gives an empty bucket, no later than that
	// of a full one. It does not matter under [Concurrency].
	Ends int64
	// Until is the instant at which a penalty ends. For a Check or Charge under
	// [FixedWindow] it is the end of the window that the caller knows to be open, or 0
	// if it knows none: the store may then look or charge without making sure, and the
	// answer shows whether it is so.
	Until int64
}

// HearsHeld is the Hold of a request that holds nothing.
const HearsHeld = 1

// NewHold returns a number under which a Take is held. Two that are equal count once.
func NewHold() uint32 { return HearsHeld + 1 + rand.Uint32N(math.MaxUint32-HearsHeld) }

// MayHold reports whether r may be held, or ends that as a refund.
func (r *Request) MayHold() bool { return r.Hold > HearsHeld }

// NoteHold notes whether the take of r, which was answered with st, is held. Its refund ends nothing otherwise.
func (r *Request) NoteHold(st *State) {
	if r.MayHold() && !st.IsHeld {
		r.Hold = 0
	}
}

// FetchBatch makes r take size events. If these are also for others, they are held under another number than r's.
func (r *Request) FetchBatch(size int64) {
	if r.Hold != 0 && size > r.Cost {
		r.Hold = NewHold()
	}
	r.Cost = size
}

// LeastUnheld returns the least that a Take leaves without being held: a quarter of the limit, or 16 if that is more.
func (r *Request) LeastUnheld() int64 { return max((r.Capacity()+3)/4, 16) }

// BatchAuto lets the traffic decide how large batches are.
const BatchAuto = -1

// Capacity is the most that may be spent for the request to be admitted.
func (r *Request) Capacity() int64 {
	if r.Burst > 0 && r.Limit.Algorithm.HasBurst() {
		return r.Burst - r.Reserved
	}
	return r.Events - r.Reserved
}

// Asked is the Events and Burst of a request. The zero value is that of none.
type Asked struct{ Events, Burst int64 }

// Note notes r, unless it says nothing of its limit.
func (a *Asked) Note(r *Request) {
	if r.Events > 0 {
		*a = Asked{r.Events, r.Burst}
	}
}

// Recall makes r ask for the same as the request that was noted last, and reports whether there
// was one.
func (a Asked) Recall(r *Request) bool {
	if a.Events == 0 {
		return false
	}
	r.Events, r.Burst = a.Events, a.Burst
	return true
}

// Need is what has to fit for the request to be admitted: its cost, and what
// is ahead of it.
func (r *Request) Need() int64 { return r.Cost + r.Ahead }

// Receipt identifies the part of a bucket that a Take has spent. Only the algorithm
// understands its fields. The zero value is the receipt of nothing.
type Receipt struct {
	// Period is the window in which it was spent or, without windows, the instant.
	Period int64
	// Position is how much had been spent in the time without pause. Where windows are those of the clock, it
	// is when the bucket was made, or last was empty: what was taken from an earlier one is not given back.
	Position int64
}

// Place is a shard that has a bucket of the client. It does not change.
type Place struct {
	Shard string `json:"shard"`
	// More are the other shards where a Take has spent the cost, if there are any; each Place has a Receipt then.
	More    *Place  `json:"more,omitempty"`
	Receipt Receipt `json:"receipt,omitzero"`
}

// Parts returns a request for each shard at which a Take has spent the cost of r: r itself unless there are several.
func (r *Request) Parts() (parts []*Request) {
	if r.At == nil || r.At.More == nil {
		return []*Request{r}
	}
	for p := r.At; p != nil; p = p.More {
		part := *r
		part.At, part.Receipt = &Place{Shard: p.Shard}, p.Receipt
		parts = append(parts, &part)
	}
	return parts
}

// Shard is the name of the shard whose bucket it is; empty for the client's owner.
func (r *Request) Shard() string {
	if r.At == nil {
		return ""
	}
	return r.At.Shard
}
