package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// bucketQuery is which of a zone's buckets an admin request is about.
type bucketQuery struct {
	zone    *limiter.Zone
	use     *stores.Handle
	buckets []limiter.NamedBucket
}

// bucketParameters are what such a request can say.
var bucketParameters = []string{"key", "client_key", "store"}

// bucketQuery reads it.
func newBucketQuery(running runningConfig, zone, rawQuery string) (*bucketQuery, error) {
	query, err := url.ParseQuery(rawQuery)
	if err != nil {
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("query: %w", err))
	}
	for name, values := range query {
		switch {
		case !slices.Contains(bucketParameters, name):
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("parameter %q is unknown; there is %s", name, strings.Join(bucketParameters, ", ")))
		case name != "key" && len(values) > 1:
			return nil, apiError(http.StatusBadRequest, fmt.Errorf("parameter %s is given twice", name))
		}
	}
	storeNames := storesOfZones(running)
	in, ok := storeNames[zone]
	if !ok {
		return nil, unknownZone(zone, storeNames)
	}
	name := query.Get("store")
	switch {
	case name == "" && len(in) == 1:
		name = in[0]
	case name == "":
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("zone %s counts in several stores: add store= with one of %s", zone, strings.Join(in, ", ")))
	case !slices.Contains(in, name):
		return nil, apiError(http.StatusNotFound, fmt.Errorf("zone %s does not count in the store %q; there is %s", zone, name, strings.Join(in, ", ")))
	}
	q := zoneIn(running, zone, name)
	q.buckets, err = q.zone.BucketsOf(query["key"], query["client_key"])
	if err != nil {
		return nil, apiError(http.StatusBadRequest, fmt.Errorf("zone %s: %w", zone, err))
	}
	return q, nil
}

// zoneIn returns a zone, of one handler, that counts in a store. There is one.
func zoneIn(running runningConfig, zone, storeName string) *bucketQuery {
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			for _, use := range l.Stores() {
				if z.Name == zone && use.Name == storeName {
					return &bucketQuery{zone: z, use: use}
				}
			}
		}
	}
	return nil
}

// bucketsAnswer is what the admin API tells of some of a zone's buckets.
type bucketsAnswer struct {
	Zone    string         `json:"zone"`
	Store   string         `json:"store"`
	Buckets []bucketAnswer `json:"buckets"`
}

type bucketAnswer struct {
	limiter.NamedBucket
	copiesAnswer
	// Former is the shard that kept the bucket before a resharding.
	Former *copiesAnswer `json:"former,omitempty"`
	// Local is what this process has counted while the store did not answer.
	Local *stateAnswer `json:"local,omitempty"`
	// Ledger is what this process knows beyond what the store says.
	Ledger *accountAnswer `json:"ledger,omitempty"`
}

type copiesAnswer struct {
	Shard   string       `json:"shard,omitempty"`
	Servers []copyAnswer `json:"servers"`
}

// copyAnswer is a bucket as one server has it. There is no state if it has none.
type copyAnswer struct {
	Address string       `json:"address,omitempty"`
	Role    store.Role   `json:"role"`
	State   *stateAnswer `json:"state"`
	Error   string       `json:"error,omitempty"`
}

// stateAnswer is a state. Instants are seconds since the epoch.
type stateAnswer struct {
	Limit     int64   `json:"limit"`
	Used      int64   `json:"used"`
	Remaining int64   `json:"remaining"`
	Reset     float64 `json:"reset,omitempty"`
	Penalty   float64 `json:"penalty,omitempty"`
}

type accountAnswer struct {
	Used     int64 `json:"used"`
	InFlight int64 `json:"in_flight"`
	Unsent   int64 `json:"unsent"`
	Reserved int64 `json:"reserved,omitempty"`
	Full     bool  `json:"full"`
}

// resetAnswer tells of buckets that were emptied.
type resetAnswer struct {
	Zone    string        `json:"zone"`
	Store   string        `json:"store"`
	Buckets []resetBucket `json:"buckets"`
}

type resetBucket struct {
	limiter.NamedBucket
	Shard   string `json:"shard,omitempty"`
	Deleted bool   `json:"deleted"`
}

// adminInspect answers GET /rate_limit/buckets/<zone>: what there is of a
// client's buckets.
func adminInspect(running runningConfig, r *http.Request) (any, error) {
	q, open, err := openBuckets(running, r)
	if err != nil {
		return nil, err
	}
	defer q.use.Leave()
	inspector, ok := open.Store.(store.Inspector)
	if !ok {
		return nil, apiError(http.StatusNotImplemented, fmt.Errorf("store %s cannot tell what is in a bucket", q.use.Name))
	}
	answer := bucketsAnswer{Zone: q.zone.Name, Store: q.use.Name, Buckets: []bucketAnswer{}}
	for _, b := range q.buckets {
		req := q.zone.About(b)
		found := inspector.Inspect(r.Context(), req)
		told := bucketAnswer{NamedBucket: b, copiesAnswer: answerOfCopies(&found), Ledger: answerOfAccount(found.Account)}
		if found.Former != nil {
			former := answerOfCopies(found.Former)
			told.Former = &former
		}
		if local := open.Local.Buckets.Inspect(r.Context(), req).Copies[0]; local.Exists {
			told.Local = answerOfState(&local.State)
		}
		answer.Buckets = append(answer.Buckets, told)
	}
	return answer, nil
}

// adminReset answers DELETE /rate_limit/buckets/<zone>: it empties a client's
// buckets. All are tried, whatever becomes of the others; to repeat it does no
// harm.
func adminReset(running runningConfig, r *http.Request) (any, error) {
	q, open, err := openBuckets(running, r)
	if err != nil {
		return nil, err
	}
	defer q.use.Leave()
	resetter, ok := open.Store.(store.Resetter)
	if !ok {
		return nil, apiError(http.StatusNotImplemented, fmt.Errorf("store %s cannot reset a bucket", q.use.Name))
	}
	answer := resetAnswer{Zone: q.zone.Name, Store: q.use.Name, Buckets: []resetBucket{}}
	var failed []error
	for _, b := range q.buckets {
		req := q.zone.About(b)
		existed := mayHold(r.Context(), open, req)
		err := resetter.Reset(r.Context(), req)
		if err == nil {
			err = open.Local.Buckets.Reset(r.Context(), req)
		}
		if err != nil {
			failed = append(failed, err)
			continue
		}
		reset := resetBucket{NamedBucket: b, Deleted: existed}
		if s, ok := open.Store.(interface{ Owner(clientKey string) string }); ok {
			reset.Shard = s.Owner(b.ClientKey)
		}
		answer.Buckets = append(answer.Buckets, reset)
	}
	switch err := errors.Join(failed...); {
	case errors.Is(err, errors.ErrUnsupported):
		return nil, apiError(http.StatusNotImplemented, fmt.Errorf("store %s: %w", q.use.Name, err))
	case err != nil:
		// Caddy logs errors, so no client key is in it.
		return nil, apiError(http.StatusBadGateway, fmt.Errorf("%d of %d buckets may be there still, ask again: %s",
			len(failed), len(q.buckets), strings.ReplaceAll(err.Error(), "\n", "; ")))
	}
	return answer, nil
}

// mayHold tells whether there is something to reset, or that is not known.
func mayHold(ctx context.Context, open *stores.Opened, req store.Request) bool {
	inspector, ok := open.Store.(store.Inspector)
	if !ok || open.Local.Buckets.Inspect(ctx, req).Copies[0].Exists {
		return true
	}
	found := inspector.Inspect(ctx, req)
	if a := found.Account; a != nil && (a.Used > 0 || a.InFlight > 0 || a.Unsent > 0 || a.Reserved > 0) {
		return true
	}
	copies := found.Copies
	if found.Former != nil {
		copies = append(copies, found.Former.Copies...)
	}
	return slices.ContainsFunc(copies, func(c store.Copy) bool { return c.Exists || c.State.Err != nil })
}

// openBuckets reads which buckets a request is about, and opens their store
// until q.use.leave is called.
func openBuckets(running runningConfig, r *http.Request) (*bucketQuery, *stores.Opened, error) {
	q, err := newBucketQuery(running, r.PathValue("zone"), r.URL.RawQuery)
	if err != nil {
		return nil, nil, err
	}
	open, err := q.use.Enter()
	if err != nil {
		return nil, nil, apiError(http.StatusBadGateway, fmt.Errorf("store %s: %w", q.use.Name, err))
	}
	return q, open, nil
}

func answerOfCopies(found *store.Inspection) copiesAnswer {
	a := copiesAnswer{Shard: found.Shard, Servers: []copyAnswer{}}
	for i := range found.Copies {
		c := &found.Copies[i]
		told := copyAnswer{Address: c.Address, Role: c.Role}
		switch {
		case c.State.Err != nil:
			told.Error = c.State.Err.Error()
		case c.Exists:
			told.State = answerOfState(&c.State)
		}
		a.Servers = append(a.Servers, told)
	}
	return a
}

func answerOfState(st *store.State) *stateAnswer {
	return &stateAnswer{
		Limit: st.Limit, Used: st.Used, Remaining: st.Remaining, Reset: limiter.EpochSeconds(st.Reset), Penalty: limiter.EpochSeconds(st.Penalty),
	}
}

func answerOfAccount(a *store.Account) *accountAnswer {
	if a == nil {
		return nil
	}
	return &accountAnswer{Used: a.Used, InFlight: a.InFlight, Unsent: a.Unsent, Reserved: a.Reserved, Full: a.Full}
}
