package admin

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// maxReason bounds the text that an operator gives for an override.
	maxReason = 200
	// overrideTimeout bounds a list of overrides.
	overrideTimeout = 5 * time.Second
)

// overrides answers GET /rate_limit/overrides with the blocks and grants in force.
func overrides(running runningConfig, r *http.Request) (any, error) {
	if _, err := queryOf(r); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), overrideTimeout)
	defer cancel()
	all := adminapi.Overrides{Overrides: []adminapi.Override{}}
	now, zones := time.Now().UnixMicro(), zonesInStores(running)
	for _, s := range running.Stores() {
		found, err := s.Overrides(ctx)
		if err != nil {
			all.Errors = append(all.Errors, s.Name+": "+oneLine(err))
		}
		for i := range found {
			if found[i].Until > now {
				all.Overrides = append(all.Overrides, overrideOf(s.Name, &found[i], clientOf(zones[found[i].Zone], s.Name, found[i].ClientKey)))
			}
		}
	}
	slices.SortFunc(all.Overrides, func(a, b adminapi.Override) int {
		return cmp.Or(cmp.Compare(a.Zone, b.Zone), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ClientKey, b.ClientKey), cmp.Compare(a.Store, b.Store))
	})
	return all, nil
}

// clientOf explains a client key of a zone in a store, where the running config may lack
// the zone.
func clientOf(zone []zoneInStore, storeName, clientKey string) adminapi.Client {
	if i := slices.Index(storeNames(zone), storeName); i >= 0 {
		return zone[i].ClientOf(clientKey)
	}
	return adminapi.Client{ClientKey: limiter.ShownKey(clientKey), Note: "of a zone that the running config lacks", Unknown: true}
}

func overrideOf(storeName string, o *store.Override, client adminapi.Client) adminapi.Override {
	return adminapi.Override{
		Kind: o.Kind, Zone: o.Zone, Store: storeName, Client: client, Events: o.Events, Reason: o.Reason, By: o.By,
		Since: limiter.EpochSeconds(o.Since), Until: limiter.EpochSeconds(o.Until),
	}
}

// block answers POST /rate_limit/blocks/<zone>: it refuses all requests of a client for
// some time.
func block(running runningConfig, r *http.Request) (any, error) {
	// It is read first: without it, the command's last value stands in its place.
	text := r.URL.Query().Get("for")
	length, err := caddy.ParseDuration(text)
	if err != nil || length < time.Second || length > store.MaxWindow {
		return nil, apiErrorf(http.StatusBadRequest, "for=%q: it must be a time span from 1s to 100 years, such as 1h; in a command it is the last argument", text)
	}
	s, query, err := selectBuckets(running, r, "for", "reason")
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	end := time.Now().Add(length).UnixMicro()
	return s.set(r, query, store.Override{Kind: store.OverrideBlock}, func(int) int64 { return end })
}

// grant answers POST /rate_limit/grants/<zone>: it admits more events of a client in the
// window that is open.
func grant(running runningConfig, r *http.Request) (any, error) {
	text := r.URL.Query().Get("events")
	events, err := strconv.ParseInt(text, 10, 64)
	if err != nil || events < 1 || events > store.MaxEvents {
		return nil, apiErrorf(http.StatusBadRequest, "events=%q: it must be a whole number from 1 to 2^52; in a command it is the last argument", text)
	}
	s, query, err := selectBuckets(running, r, "events", "reason")
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	ends := make([]int64, len(s.buckets))
	for i, b := range s.buckets {
		req, _ := s.about(b)
		st := s.open.Peek(r.Context(), req)
		if st.Err != nil {
			return nil, apiErrorf(http.StatusBadGateway, "store %s: %w", s.store.Name, st.Err)
		}
		ends[i] = s.WindowEnd(st, time.Now())
	}
	return s.set(r, query, store.Override{Kind: store.OverrideGrant, Events: events}, func(i int) int64 { return ends[i] })
}

// set begins an override for each of the selected buckets, which has an end of its own.
func (s *selection) set(r *http.Request, query url.Values, o store.Override, until func(i int) int64) (any, error) {
	if o.Reason = query.Get("reason"); len(o.Reason) > maxReason {
		return nil, apiErrorf(http.StatusBadRequest, "reason has %d bytes: it must have at most %d", len(o.Reason), maxReason)
	}
	o.Zone, o.By, o.Since = s.Name, senderOf(r), time.Now().UnixMicro()
	all := adminapi.Overrides{Overrides: []adminapi.Override{}}
	for i, b := range s.buckets {
		if stores.IsShared(b.Key) {
			return nil, apiErrorf(http.StatusBadRequest, "client_key %q is a bucket that clients share: name a client", b.Key)
		}
		o.ClientKey, o.Until = b.Key, until(i)
		before := s.inForce(o.Kind, b.Key)
		if err := s.store.SetOverride(r.Context(), o); err != nil {
			return nil, s.overrideError(err)
		}
		s.limiter.ReportOverride(&o, false)
		begun := overrideOf(s.store.Name, &o, b.Client)
		if before != nil {
			begun.ReplacedUntil = limiter.EpochSeconds(before.Until)
		}
		all.Overrides = append(all.Overrides, begun)
	}
	return all, nil
}

// inForce returns the override of a client that is in force as far as is known, or nil.
func (s *selection) inForce(kind store.OverrideKind, clientKey string) *store.Override {
	block, grant := s.store.OverridesOf(s.Name, clientKey, time.Now())
	if kind == store.OverrideBlock {
		return block
	}
	return grant
}

// unblock answers DELETE /rate_limit/blocks/<zone>.
func unblock(running runningConfig, r *http.Request) (any, error) {
	return remove(running, r, store.OverrideBlock)
}

// ungrant answers DELETE /rate_limit/grants/<zone>.
func ungrant(running runningConfig, r *http.Request) (any, error) {
	return remove(running, r, store.OverrideGrant)
}

// selectOverridden selects the clients whose overrides a request ends. A client key is taken
// as it is listed, because the config may have changed since: its store is the one that
// the request names, or the only one in which the zone counts.
func selectOverridden(running runningConfig, r *http.Request) (*selection, error) {
	query, err := queryOf(r, "key", "client_key", "store")
	if err != nil {
		return nil, err
	}
	zones, zone, name := zonesInStores(running), r.PathValue("zone"), query.Get("store")
	bound := zones[zone]
	if name == "" && len(bound) == 1 {
		name = bound[0].store.Name
	}
	all := running.Stores()
	i := slices.IndexFunc(all, func(s *stores.Handle) bool { return s.Name == name })
	if !query.Has("client_key") || query.Has("key") || i < 0 {
		s, _, err := selectBuckets(running, r)
		return s, err
	}
	key := limiter.KeyOf(query.Get("client_key"))
	s := &selection{zoneInStore: zoneIn(running, bound, zone, all[i])}
	s.buckets = []adminapi.BucketName{{Client: clientOf(bound, name, key), Key: key}}
	if s.open, err = s.store.Enter(); err != nil {
		return nil, apiErrorf(http.StatusBadGateway, "store %s: %w", name, err)
	}
	return s, nil
}

// zoneIn returns the zone of that name in a store. Where the config lacks it, it reports with
// the logger of the store, and no client keys.
func zoneIn(running runningConfig, bound []zoneInStore, zone string, handle *stores.Handle) zoneInStore {
	if i := slices.Index(storeNames(bound), handle.Name); i >= 0 {
		return bound[i]
	}
	reporter := &limiter.Limiter{Config: limiter.Config{Logger: handle.Logger}}
	if all := running.Limiters(); len(all) > 0 {
		reporter.Events = all[0].Events
	}
	return zoneInStore{&limiter.Zone{Name: zone}, handle, reporter}
}

// remove ends overrides, and answers with those that there were. It is an error if there was none: the
// client may be mistyped.
func remove(running runningConfig, r *http.Request, kind store.OverrideKind) (any, error) {
	s, err := selectOverridden(running, r)
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	all := adminapi.Overrides{Overrides: []adminapi.Override{}}
	for _, b := range s.buckets {
		o := store.Override{Kind: kind, Zone: s.Name, ClientKey: b.Key, By: senderOf(r)}
		isThere := func() bool { return s.inForce(kind, b.Key) != nil }
		wasThere := isThere()
		removed, err := s.store.RemoveOverride(r.Context(), kind, s.Name, b.Key)
		// It may have been removed where it was, while another shard is away.
		if err != nil && (!wasThere || isThere()) {
			return nil, s.overrideError(err)
		}
		if !removed && !wasThere {
			continue
		}
		s.limiter.ReportOverride(&o, true)
		all.Overrides = append(all.Overrides, overrideOf(s.store.Name, &o, b.Client))
	}
	if len(all.Overrides) == 0 {
		return nil, apiErrorf(http.StatusNotFound, "zone %s has no %s of this client in store %s", s.Name, kind, s.store.Name)
	}
	return all, nil
}

// senderOf returns the address from which a request came.
func senderOf(r *http.Request) string {
	if r.RemoteAddr == "" || r.RemoteAddr == "@" {
		return "a Unix socket" // its other end has no name
	}
	return r.RemoteAddr
}

func (s *selection) overrideError(err error) error {
	status := http.StatusBadGateway
	if errors.Is(err, errors.ErrUnsupported) {
		status = http.StatusNotImplemented
	}
	return apiErrorf(status, "store %s: %s", s.store.Name, oneLine(err))
}
