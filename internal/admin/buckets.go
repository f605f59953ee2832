package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// selection is the buckets of a zone that a request is about, and their store,
// which stays open until the store's handle is left.
type selection struct {
	zoneInStore
	open    *stores.Opened
	buckets []limiter.Bucket
}

// selectBuckets reads the request, which may have more parameters, and opens the store.
func selectBuckets(running runningConfig, r *http.Request, more ...string) (*selection, url.Values, error) {
	query, err := queryOf(r, append([]string{"key...", "client_key", "store"}, more...)...)
	if err != nil {
		return nil, nil, err
	}
	zones, zone, name := zonesInStores(running), r.PathValue("zone"), query.Get("store")
	if zones[zone] == nil {
		return nil, nil, unknownZone(zone, zones)
	}
	i, names := 0, storeNames(zones[zone])
	switch {
	case name == "" && len(names) > 1:
		return nil, nil, apiErrorf(http.StatusBadRequest, "zone %s counts in several stores: name one of %s (--store, in a URL store=)", zone, strings.Join(names, ", "))
	case name != "":
		if i = slices.Index(names, name); i < 0 {
			return nil, nil, apiErrorf(http.StatusNotFound, "zone %s does not count in the store %q; there is %s", zone, name, strings.Join(names, ", "))
		}
	}
	s := &selection{zoneInStore: zones[zone][i]}
	if s.buckets, err = s.BucketsOf(query["key"], query["client_key"]); err != nil {
		return nil, nil, apiErrorf(http.StatusBadRequest, "zone %s: %w", zone, err)
	}
	if s.open, err = s.store.Enter(); err != nil {
		return nil, nil, apiErrorf(http.StatusBadGateway, "store %s: %w", s.store.Name, err)
	}
	return s, query, nil
}

func nameOf(b limiter.Bucket) adminapi.BucketName {
	return adminapi.BucketName{Client: adminapi.Client(b.Client), Text: b.Text}
}

// about returns a request about a bucket with the limit that holds now or, where it depends on the
// request, that of the last request here. isKnown is false if there is none.
func (s *selection) about(b limiter.Bucket) (r store.Request, isKnown bool) {
	r = s.About(b.Key)
	s.open.Recall(&r)
	if s.limitNow()(&r) {
		return r, true
	}
	r.Events, r.Burst = algorithm.Of(r.Limit.Algorithm).MostEvents, 0
	return r, false
}

// inspect answers GET /rate_limit/buckets/<zone> with the state of a client's
// buckets.
func inspect(running runningConfig, r *http.Request) (any, error) {
	s, _, err := selectBuckets(running, r)
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	return s.inspect(r.Context())
}

func (s *selection) inspect(ctx context.Context) (*adminapi.Buckets, error) {
	if s.open.Operable == nil {
		return nil, apiErrorf(http.StatusNotImplemented, "store %s cannot tell what is in a bucket", s.store.Name)
	}
	all := &adminapi.Buckets{Zone: s.Name, Store: s.store.Name, Buckets: []adminapi.Bucket{}}
	for _, b := range s.buckets {
		req, isKnown := s.about(b)
		stateOf := func(st *store.State) *adminapi.State { return stateBy(&req, isKnown, st) }
		found := s.open.Inspect(ctx, req)
		bucket := adminapi.Bucket{
			BucketName: nameOf(b), Copies: *copiesOf(&found, stateOf), Ledger: (*adminapi.Account)(found.Account),
			LastRefused: limiter.LastRefusal(limiter.ZoneID{Store: s.store.Name, Zone: s.Name}, b.Key),
		}
		for _, before := range found.Previous {
			copies := copiesOf(&before, stateOf)
			if first := bucket.Previous; first != nil {
				copies.Shard, copies.Servers = first.Shard+", "+copies.Shard, append(first.Servers, copies.Servers...)
			}
			bucket.Previous = copies
		}
		if alone := s.open.Alone(req, found.Account); alone != nil {
			bucket.Local = stateOf(alone)
		}
		of := s.store.OverridesOf(s.Name, b.Key, time.Now)
		for _, o := range []*store.Override{of.Block, of.Limit, of.Grant} {
			if o != nil {
				bucket.Overrides = append(bucket.Overrides, obeyed(s.Zone, s.store.Name, o, bucket.Client))
			}
		}
		all.Buckets = append(all.Buckets, bucket)
	}
	return all, nil
}

// findTimeout bounds a search for a client.
const findTimeout = 5 * time.Second

// find answers GET /rate_limit/clients with the buckets of one client in all zones, or with the clients
// that begin with a text.
func find(running runningConfig, r *http.Request) (any, error) {
	query, err := queryOf(r, "name", "prefix")
	if err != nil {
		return nil, err
	}
	if query.Has("prefix") {
		if query.Has("name") {
			return nil, apiErrorf(http.StatusBadRequest, "write name or prefix, not both")
		}
		return findByPrefix(running, query.Get("prefix"))
	}
	name := query.Get("name")
	if name == "" {
		return nil, apiErrorf(http.StatusBadRequest, "name is empty: write what the placeholder of a zone's key has for the client")
	}
	selections := selectNamed(running, name)
	ctx, cancel := context.WithTimeout(r.Context(), findTimeout)
	defer cancel()
	// All at once, so that a server that does not answer delays the others by nothing.
	var calls sync.WaitGroup
	all, errs := make([]*adminapi.Buckets, len(selections)), make([]error, len(selections))
	for i, s := range selections {
		calls.Go(func() {
			if s.open, errs[i] = s.store.Enter(); errs[i] == nil {
				defer s.store.Leave()
				all[i], errs[i] = s.inspect(ctx)
			}
		})
	}
	calls.Wait()
	found := adminapi.Found{Zones: []adminapi.Buckets{}}
	for i, buckets := range all {
		if errs[i] != nil {
			found.Errors = append(found.Errors, fmt.Sprintf("zone %s in store %s: %v", selections[i].Name, selections[i].store.Name, errs[i]))
			continue
		}
		found.Zones = append(found.Zones, *buckets)
	}
	return found, nil
}

func copiesOf(found *store.Inspection, stateOf func(*store.State) *adminapi.State) *adminapi.Copies {
	copies := &adminapi.Copies{Shard: found.Shard, Servers: []adminapi.Copy{}}
	for i := range found.Copies {
		c := &found.Copies[i]
		answer := adminapi.Copy{Address: c.Address, Role: c.Role}
		switch {
		case c.State.Err != nil:
			answer.Error = c.State.Err.Error()
		case c.Exists:
			answer.State = stateOf(&c.State)
		}
		copies.Servers = append(copies.Servers, answer)
	}
	return copies
}

// stateBy describes the state that r saw. Unless isKnown is set, the limit of r is not the client's.
func stateBy(r *store.Request, isKnown bool, st *store.State) *adminapi.State {
	s := &adminapi.State{Penalty: limiter.EpochSeconds(st.Penalty)}
	if isKnown {
		s.Limit, s.Remaining = &st.Limit, &st.Remaining
	}
	// How fast a bucket drains depends on its limit.
	if isKnown || !algorithm.Of(r.Limit.Algorithm).Drains() {
		s.Used, s.Reset = &st.Used, limiter.EpochSeconds(st.Reset)
	}
	return s
}

// reset answers DELETE /rate_limit/buckets/<zone>: it empties a client's buckets.
// It tries all of them, whatever becomes of the others. Repeating it does no harm.
func reset(running runningConfig, r *http.Request) (any, error) {
	s, _, err := selectBuckets(running, r)
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	all := adminapi.Resets{Zone: s.Name, Store: s.store.Name, Buckets: []adminapi.Reset{}}
	var failed []error
	for _, b := range s.buckets {
		req, _ := s.about(b)
		existed := mayHold(r.Context(), s.open, req)
		err := s.open.Accounts.Reset(r.Context(), req)
		if err == nil {
			err = s.open.Local.Buckets.Reset(r.Context(), req)
		}
		if err != nil {
			failed = append(failed, err)
			continue
		}
		s.ForgetReports(s.store.Name, b.Key)
		limiter.AskAgain(limiter.ZoneID{Store: s.store.Name, Zone: s.Name}, b.Key)
		all.Buckets = append(all.Buckets, adminapi.Reset{BucketName: nameOf(b), Deleted: existed, Shard: s.open.Accounts.Owner(b.Key)})
	}
	if err := errors.Join(failed...); err != nil {
		// Caddy logs the error, so it names no client key.
		return nil, apiErrorf(http.StatusBadGateway, "%d of %d buckets may be there still, ask again: %s",
			len(failed), len(s.buckets), oneLine(err))
	}
	return all, nil
}

// oneLine returns the text of an error, which may be several joined ones, on one line, without the address from which this machine called, which
// differs from call to call.
func oneLine(err error) string {
	return caller.ReplaceAllString(strings.ReplaceAll(err.Error(), "\n", "; "), "")
}

var caller = regexp.MustCompile(`[^\s]+:\d+->`)

// mayHold reports whether there may be something to reset.
func mayHold(ctx context.Context, open *stores.Opened, req store.Request) bool {
	if open.Operable == nil || open.Local.Buckets.Inspect(ctx, req).Copies[0].Exists {
		return true
	}
	found := open.Inspect(ctx, req)
	if a := found.Account; a != nil && (a.Used > 0 || a.InFlight > 0 || a.Unsent > 0 || a.Reserved > 0) {
		return true
	}
	copies := found.Copies
	for _, before := range found.Previous {
		copies = append(copies, before.Copies...)
	}
	return slices.ContainsFunc(copies, func(c store.Copy) bool { return c.Exists || c.State.Err != nil })
}
