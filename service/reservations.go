package service

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/service/limitv1"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// record is what is shared of a call under its ID, in a [store.Record]. Whoever replaces it has read it, and
// the store refuses the second of two: so each step is made once. Where a step may be made twice, because a
// Caddy or a reply was lost, that charges twice, and never gives back twice.
type record struct {
	Phase phase `json:"phase"`
	// Began is when the reservation began, by the store's clock, in microseconds since the epoch.
	Began int64 `json:"began,omitempty"`
	// Nonce makes equal records of two writers differ.
	Nonce string `json:"nonce"`
	// Digest identifies what was asked.
	Digest string `json:"digest"`
	// TTL is how long a reservation lasts. What is done is kept as long, or keptFor if that is more.
	TTL time.Duration `json:"ttl,omitempty"`
	// Answer is that of Take or Reserve.
	Answer []byte         `json:"answer,omitempty"`
	Parts  []part         `json:"parts,omitempty"`
	Holds  []limiter.Hold `json:"holds,omitempty"`
	// Outcome is how it has ended; empty while it is open.
	Outcome string `json:"outcome,omitempty"`
	// Charged is what each hold costs in the end, and Owed what of that the stores do not have yet: more
	// than 0 to charge, less to give back. Tries counts how often they could not take it.
	Charged []int64 `json:"charged,omitempty"`
	Owed    []int64 `json:"owed,omitempty"`
	Tries   int     `json:"tries,omitempty"`
}

// part is what a descriptor asks.
type part struct {
	// Hold is the index of the hold in which it counts, or -1.
	Hold int `json:"hold"`
	// Hits are those that were asked for, each of which costs Cost.
	Hits int64 `json:"hits"`
	Cost int64 `json:"cost"`
	// IsMore is set if it is of the same descriptor as the part before, in another zone.
	IsMore bool `json:"more,omitempty"`
}

// phase is how far a call is.
type phase string

const (
	// taking: somebody asks the stores. Once it is due, its maker has died, and another may ask.
	taking phase = "taking"
	// open is a reservation. Once it is due, it expires.
	open phase = "open"
	// owing: it has ended, and nobody has begun to settle what is owed.
	owing phase = "owing"
	// settling: somebody charges or gives back. Once it is due, that one has died: what was to be given
	// back may have been.
	settling phase = "settling"
	// done is kept for calls that are repeated. What has expired can be committed meanwhile.
	done phase = "done"
)

func (p phase) isKnown() bool {
	switch p {
	case taking, open, owing, settling, done:
		return true
	}
	return false
}

// Outcomes.
const (
	taken     = "taken"
	committed = "committed"
	released  = "released"
	expired   = "expired"
)

const (
	// leastPatience is how long a call may take at least before its maker is taken to have died.
	leastPatience = 5 * time.Second
	// settlePause is the first pause before what a store could not take is tried again, and
	// longestPause the longest; mostTries is how often it is.
	settlePause  = time.Second
	longestPause = time.Minute
	mostTries    = 100
)

// How much longer a record gets when the reservation ends, and of that for each hold: what it costs, and what
// is owed.
const (
	endingBytes       = len(`"phase":"settling","outcome":"committed","charged":[],"owed":[],"tries":100,`)
	endingBytesOfHold = len(`4503599627370496,-4503599627370496,`)
)

// idPrefix begins the IDs of records, so that none has the form in which a store keeps another. oldPrefix did
// in version 0.1.0, which knew no domains.
const (
	idPrefix  = "in:"
	oldPrefix = "id:"
)

// kept returns how long the record is kept once it is done.
func (r *record) kept() time.Duration { return max(r.TTL, keptFor) }

// isLate reports whether r has expired, and what it costs can still be committed. Version 0.1.0 kept too little.
func (r *record) isLate() bool {
	return r.Outcome == expired && len(r.Owed) == len(r.Holds) && len(r.Charged) == len(r.Holds)
}

// stored returns r as it is kept: once it is done, as much as calls that are repeated need.
func (r *record) stored() *record {
	if r.Phase != done || r.isLate() {
		return r
	}
	is := *r
	is.Began, is.TTL, is.Holds, is.Owed, is.Tries = 0, 0, nil, nil, 0
	for i := range r.Holds {
		h := &r.Holds[i]
		is.Holds = append(is.Holds, limiter.Hold{Limit: store.Limit{Zone: h.Limit.Zone}, Cost: h.Cost, IsTaken: h.IsTaken})
	}
	return &is
}

// costs returns what each hold costs if the descriptors were that many hits.
func (r *record) costs(hits []uint64) ([]int64, error) {
	descriptors := 0
	for _, u := range r.Parts {
		if !u.IsMore {
			descriptors++
		}
	}
	if len(hits) > 1 && len(hits) != descriptors {
		return nil, invalid("hits has %d numbers, and the reservation %d descriptors: send one for each, or one for all", len(hits), descriptors)
	}
	costs := make([]int64, len(r.Holds))
	i := -1
	for _, u := range r.Parts {
		if !u.IsMore {
			i++
		}
		n := u.Hits
		switch {
		case len(hits) == 1:
			n = int64(hits[0])
		case len(hits) > 1:
			n = int64(hits[i])
		}
		if u.Hold >= 0 {
			costs[u.Hold] = min(costs[u.Hold]+limiter.Times(n, u.Cost), store.MaxEvents)
		}
	}
	return costs, nil
}

// settlements are what the holds have cost in the end.
func (r *record) settlements() (all []*limitv1.Settlement) {
	for i := range r.Holds {
		h := &r.Holds[i]
		all = append(all, &limitv1.Settlement{Zone: h.Limit.Zone, Reserved: uint64(h.Cost), Charged: uint64(r.Charged[i])})
	}
	return all
}

// ended returns the record of a reservation, open or expired, that ends with these costs.
func (r *record) ended(outcome string, costs []int64) *record {
	next := *r
	next.Phase, next.Outcome, next.Tries, next.Charged, next.Owed = done, outcome, 0, slices.Clone(costs), make([]int64, len(costs))
	for i := range r.Holds {
		h := &r.Holds[i]
		if next.Owed[i] = costs[i] - h.Cost; r.isLate() {
			next.Owed[i] = costs[i] - r.Charged[i] + r.Owed[i]
		}
		if next.Owed[i] < 0 && !h.IsTaken {
			// Nobody knows in which window it is charged, if at all.
			next.Owed[i], next.Charged[i] = 0, h.Cost
		}
		if next.Owed[i] != 0 {
			next.Phase = owing
		}
	}
	return &next
}

// records calls f with what keeps the records, if the store keeps any. Unless opens is set, nothing is
// called once the store is closed.
func (s *Service) records(opens bool, f func(kept store.Records) error) error {
	handle := s.limiter.Store
	opened := handle.EnterOpen()
	if opened == nil && opens {
		var err error
		if opened, err = handle.Enter(); err != nil {
			return err
		}
	}
	if opened == nil {
		return nil
	}
	defer handle.Leave()
	if opened.Operable == nil {
		return errors.ErrUnsupported
	}
	return f(opened.Operable)
}

// put puts r in place of what was read, due after a while; nil removes what was read. It returns what is
// there then. It does not end when the caller leaves, because its outcome has to be known.
func (s *Service) put(ctx context.Context, before store.Record, r *record, left time.Duration) (is store.Record, err error) {
	next := store.Record{ID: before.ID, Shard: before.Shard, Version: before.Version, Left: left}
	if r != nil {
		r.Nonce = rand.Text()[:12]
		text, err := json.Marshal(r.stored())
		if err != nil {
			return is, fmt.Errorf("%w: encode a record: %w", store.ErrFinal, err)
		}
		if r.Phase == open && len(text)+endingBytes+len(r.Holds)*endingBytesOfHold > store.MaxRecord {
			return is, fmt.Errorf("%w: it has %d, and needs some to end", store.ErrRecordSize, len(text))
		}
		next.Value = string(text)
	}
	err = s.records(true, func(kept store.Records) (err error) {
		is, err = kept.PutRecord(context.WithoutCancel(ctx), next)
		return err
	})
	return is, err
}

// read returns the record in what was read, or an error if it cannot be read, or none such can have been put.
func read(from store.Record) (*record, error) {
	r := new(record)
	if err := json.Unmarshal([]byte(from.Value), r); err != nil {
		return nil, fmt.Errorf("%w: decode the record of a request_id: %w", store.ErrDamaged, err)
	}
	n := len(r.Holds)
	isSum := func(amount int64) bool { return amount >= 0 && amount <= store.MaxEvents }
	isValid := r.Phase.isKnown() && r.TTL >= 0 && r.TTL <= maxTTL && r.Tries >= 0 && r.Tries <= mostTries &&
		n <= maxDescriptors && len(r.Parts) <= maxDescriptors &&
		(len(r.Charged) == n || r.Charged == nil) && (len(r.Owed) == n || r.Owed == nil) &&
		!slices.ContainsFunc(r.Charged, func(amount int64) bool { return !isSum(amount) }) &&
		!slices.ContainsFunc(r.Owed, func(amount int64) bool { return !isSum(max(amount, -amount)) }) &&
		!slices.ContainsFunc(r.Holds, func(h limiter.Hold) bool { return !isSum(h.Cost) }) &&
		!slices.ContainsFunc(r.Parts, func(u part) bool { return u.Hold < -1 || u.Hold >= n || !isSum(u.Hits) || !isSum(u.Cost) })
	if !isValid {
		return nil, fmt.Errorf("%w: the record of a request_id, in the phase %.20q with %d holds, %d costs and %d debts, has what none can have", store.ErrDamaged, r.Phase, n, len(r.Charged), len(r.Owed))
	}
	if r.Phase == done && !r.isLate() {
		return r, nil
	}
	for i := range r.Holds {
		if err := r.Holds[i].Validate(); err != nil {
			return nil, fmt.Errorf("the record of a request_id: %w", err)
		}
	}
	return r, nil
}

// failure is the error of a call whose record, of that ID, could not be read or written. Whatever on_error
// says, nothing passes without a record. Callers are not told of servers.
func (s *Service) failure(id string, err error) error {
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return connect.NewError(connect.CodeUnimplemented, errors.New("the store of the service keeps no records of request_ids: use redis or memory"))
	case errors.Is(err, store.ErrRecordSize):
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("the record of the request_id would take more than %d bytes: send fewer descriptors", store.MaxRecord))
	case errors.Is(err, store.ErrRecordsFull):
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("records of request_ids, or those of the domain, take as much of %d bytes as they may: try again once reservations have ended, and their answers are not kept any more", store.MaxRecords))
	case errors.Is(err, store.ErrChanged):
		return connect.NewError(connect.CodeUnavailable, errors.New("the call took so long that another one with this request_id took over: try again"))
	}
	s.limiter.Store.ReportError(s.limiter.Now(), "", id, err)
	if errors.Is(err, store.ErrDamaged) {
		return connect.NewError(connect.CodeUnavailable, errors.New("the record of this request_id cannot be read: send another request_id; if all fail, give all Caddys the same key_secret and version"))
	}
	return connect.NewError(connect.CodeUnavailable, errors.New("the store cannot keep the record of the request_id: try again"))
}

// once makes a call of that digest that fills the answer, unless it was made under the ID of a record before: then
// the answer is that of then. ask gets the store's time, and returns the record of what the call holds, or nil if it
// was refused or nothing limits it, so that it may be repeated.
func (s *Service) once(ctx context.Context, id, digest string, answer proto.Message, ask func(now int64) (*record, error)) error {
	mine, before, err := s.begin(ctx, id, digest)
	if err != nil {
		return err
	}
	if before != nil {
		if err := proto.Unmarshal(before.Answer, answer); err != nil {
			return s.failure(id, fmt.Errorf("%w: %w", store.ErrDamaged, err))
		}
		return nil
	}
	r, err := ask(mine.Now)
	if err != nil || r == nil {
		// If this fails, a repeated call waits until the record is due.
		_, _ = s.put(ctx, mine, nil, 0)
		return err
	}
	kept := *r
	if kept.Digest = digest; r.Phase == done {
		kept.Parts, kept.Holds = nil, nil
	}
	if _, err = s.put(ctx, mine, &kept, r.TTL); err == nil {
		return nil
	}
	if errors.Is(err, store.ErrNotExecuted) {
		// Nobody will know of it. Unless another call has taken over, this one can be repeated at once.
		_, owedErr := s.carryOut(r.ended(released, costless(r)))
		s.report(owedErr)
		_, _ = s.put(ctx, mine, nil, 0)
	}
	return s.failure(id, err)
}

// costless returns the costs of nothing.
func costless(r *record) []int64 { return make([]int64, len(r.Holds)) }

// The pauses before a call looks again whether another one under its ID has ended.
const (
	firstLook = 10 * time.Millisecond
	lastLook  = 200 * time.Millisecond
)

// begin makes the call under the ID of a record this one's, or returns the record of one that has ended. It waits for
// one that is being made, and takes over from one that was not ended in time.
func (s *Service) begin(ctx context.Context, id, digest string) (mine store.Record, before *record, err error) {
	expected := store.Record{ID: id}
	for pause := firstLook; ; pause = min(2*pause, lastLook) {
		there, err := s.put(ctx, expected, &record{Phase: taking, Digest: digest}, s.patience)
		switch {
		case err == nil:
			return there, nil, nil
		case !errors.Is(err, store.ErrChanged):
			return mine, nil, s.failure(id, err)
		case there.Version == "":
			// It was removed meanwhile.
			expected.Version = ""
			continue
		}
		r, err := read(there)
		switch {
		case err != nil:
			return mine, nil, s.failure(id, err)
		case r.Digest != digest:
			return mine, nil, connect.NewError(connect.CodeAlreadyExists, errors.New("request_id was used for something else: send another one"))
		case r.Phase != taking:
			return mine, r, nil
		case there.Left <= 0:
			expected.Version = there.Version
			continue
		}
		expected.Version = ""
		select {
		case <-time.After(min(pause, there.Left)):
		case <-ctx.Done():
			return mine, nil, connect.NewError(connect.CodeUnavailable, errors.New("another call with this request_id is being made: try again"))
		}
	}
}

// finish ends the reservation under the ID of a record with these costs, unless it has ended so before.
func (s *Service) finish(ctx context.Context, id, outcome string, costsOf func(r *record) ([]int64, error)) (*record, error) {
	for pause := firstLook; ; pause = min(2*pause, lastLook) {
		there, r, err := s.find(ctx, id)
		if err != nil {
			return nil, err
		}
		costs, err := r.ending(outcome, costsOf)
		if err != nil || r.Outcome == outcome {
			return r, err
		}
		if r.Phase == settling {
			if err := s.awaitExpiry(ctx, there, r, pause); err != nil {
				return nil, err
			}
			continue
		}
		next := r.ended(outcome, costs)
		left := next.kept()
		if next.Phase == owing {
			left = settlePause
		}
		switch is, err := s.put(ctx, there, next, left); {
		case errors.Is(err, store.ErrChanged):
			continue
		case err != nil:
			if !errors.Is(err, store.ErrNotExecuted) {
				// It may have been written, and what is done names nothing that is held.
				s.endHolds(next)
			}
			return nil, s.failure(id, err)
		case next.Phase == owing:
			// Whoever finds it later goes on.
			s.report(s.settle(context.WithoutCancel(ctx), is, next))
		default:
			s.endHolds(next)
		}
		return next, nil
	}
}

// awaitExpiry waits a little for the Caddy that gives back an expired reservation, or takes over from a dead one.
func (s *Service) awaitExpiry(ctx context.Context, there store.Record, r *record, pause time.Duration) error {
	if there.Left <= 0 {
		s.report(s.settle(context.WithoutCancel(ctx), there, r))
		return nil
	}
	select {
	case <-time.After(min(pause, there.Left)):
		return nil
	case <-ctx.Done():
		return connect.NewError(connect.CodeUnavailable, errors.New("the reservation is expiring: try again"))
	}
}

// maxOpen is for how long a reservation can be kept open.
const maxOpen = 24 * time.Hour

// prolong keeps the reservation under the ID of a record open for ttl from now at least, and returns until when it is.
func (s *Service) prolong(ctx context.Context, id string, ttl time.Duration) (until time.Time, err error) {
	for {
		there, r, err := s.find(ctx, id)
		switch {
		case err != nil:
			return until, err
		case r.Phase != open:
			return until, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("the reservation has ended, and is %s: reserve anew", r.Outcome))
		}
		next := *r
		next.Began = cmp.Or(r.Began, there.Now)
		left := min(max(ttl, there.Left), time.UnixMicro(next.Began).Add(maxOpen).Sub(time.UnixMicro(there.Now)))
		if left < minTTL {
			return until, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("the reservation has been open for %s, which is the longest: commit what it was, and reserve anew", maxOpen))
		}
		next.TTL = max(r.TTL, left)
		is, err := s.put(ctx, there, &next, left)
		switch {
		case errors.Is(err, store.ErrChanged):
		case err != nil:
			return until, s.failure(id, err)
		default:
			return time.UnixMicro(is.Now).Add(is.Left), nil
		}
	}
}

// find returns the record of a reservation, which may have ended.
func (s *Service) find(ctx context.Context, id string) (there store.Record, r *record, err error) {
	err = s.records(true, func(kept store.Records) (err error) {
		if there, err = kept.Record(context.WithoutCancel(ctx), id); err == nil && there.Version == "" {
			// Version 0.1.0 may have made it.
			_, own, _ := strings.Cut(id, ownMark)
			there, err = kept.Record(context.WithoutCancel(ctx), oldPrefix+own)
		}
		return err
	})
	if err != nil {
		return there, nil, s.failure(id, err)
	}
	if there.Version == "" {
		return there, nil, connect.NewError(connect.CodeNotFound, errors.New("no reservation has this request_id, it ended some time ago, or no zone limits it: then its answer had no expires_at"))
	}
	if r, err = read(there); err != nil {
		return there, nil, s.failure(there.ID, err)
	}
	switch {
	case r.Outcome == taken:
		err = connect.NewError(connect.CodeFailedPrecondition, errors.New("request_id is that of a Take, which is charged already"))
	case r.Phase == taking:
		err = connect.NewError(connect.CodeUnavailable, errors.New("the reservation is being made: try again"))
	}
	return there, r, err
}

// endHolds makes what a reservation that has ended holds count for good, where nothing is given back.
func (s *Service) endHolds(r *record) {
	for i := range r.Holds {
		if h := &r.Holds[i]; h.IsTaken && h.Hold != 0 && r.Owed[i] >= 0 {
			s.report(s.guarded(func() error {
				s.limiter.EndHold(h)
				return nil
			}))
		}
	}
}

// ending returns the costs with which a reservation is to end, or has ended before.
func (r *record) ending(outcome string, costsOf func(r *record) ([]int64, error)) ([]int64, error) {
	if r.Phase != open && r.Outcome != outcome && !r.isLate() {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("the reservation has ended, and is %s", r.Outcome))
	}
	costs, err := costsOf(r)
	if err != nil {
		return nil, err
	}
	if r.Outcome == outcome && !slices.Equal(r.Charged, r.ended(outcome, costs).Charged) {
		return nil, connect.NewError(connect.CodeAlreadyExists, errors.New("the reservation was committed before with other hits"))
	}
	return costs, nil
}

// settle charges and gives back what a record owes, unless somebody else does.
func (s *Service) settle(ctx context.Context, at store.Record, r *record) error {
	mine := *r
	mine.Owed = slices.Clone(r.Owed)
	if r.Phase == settling {
		for i := range mine.Owed {
			mine.Owed[i] = max(mine.Owed[i], 0)
		}
	}
	mine.Phase = settling
	at, err := s.put(ctx, at, &mine, s.settleTime)
	if err != nil {
		return unlessChanged(err)
	}
	s.endHolds(&mine)
	mine.Owed, err = s.carryOut(&mine)
	mine.Phase = done
	left := mine.kept()
	if isOwed := slices.ContainsFunc(mine.Owed, func(owed int64) bool { return owed != 0 }); isOwed && mine.Tries < mostTries {
		left = min(settlePause<<min(mine.Tries, 10), longestPause)
		mine.Phase, mine.Tries = owing, mine.Tries+1
	}
	_, putErr := s.put(ctx, at, &mine, left)
	if mine.Phase == done && putErr == nil {
		s.reportGivenUp(&mine, err)
	}
	return errors.Join(err, unlessChanged(putErr))
}

// reportGivenUp logs what a record that is done still owes.
func (s *Service) reportGivenUp(r *record, err error) {
	for i, owed := range r.Owed {
		if owed == 0 {
			continue
		}
		did, h := "charged", &r.Holds[i]
		if owed < 0 {
			did = "given back"
		}
		s.logger.Error("what a reservation has cost was not "+did+", and is not tried again: correct the client's count if it matters",
			zap.String("zone", h.Limit.Zone), zap.String("store", h.Store), zap.Int64("amount", max(owed, -owed)), zap.Int("tries", r.Tries), zap.Error(err))
	}
}

// unlessChanged returns err, or nil if somebody else was first.
func unlessChanged(err error) error {
	if errors.Is(err, store.ErrChanged) {
		return nil
	}
	return err
}

// carryOut charges or gives back what is owed, and returns what of it has to be tried again: what certainly was
// not carried out, and any charge that failed.
func (s *Service) carryOut(r *record) (left []int64, err error) {
	owed, holds := r.Owed, r.Holds
	left, errs := make([]int64, len(owed)), make([]error, len(owed))
	var wg sync.WaitGroup
	for i, amount := range owed {
		if amount == 0 {
			continue
		}
		wg.Go(func() {
			errs[i] = s.guarded(func() error {
				if amount > 0 {
					return s.limiter.ChargeMore(&holds[i], amount)
				}
				return s.limiter.GiveBack(&holds[i], -amount)
			})
			if errors.Is(errs[i], store.ErrNotExecuted) || errs[i] != nil && amount > 0 {
				left[i] = amount
			}
		})
	}
	wg.Wait()
	return left, errors.Join(errs...)
}

// guarded calls f, and reports a panic: no record may end the process.
func (s *Service) guarded(f func() error) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			s.logger.Error("dealing with the record of a request_id panicked", zap.Any("reason", reason), zap.Stack("stack"))
			err = fmt.Errorf("%w: a panic: %v", store.ErrDamaged, reason)
		}
	}()
	return f()
}
