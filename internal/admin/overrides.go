package admin

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	// maxReason bounds the text that an operator gives for an override, and maxBy that which says who
	// the operator is.
	maxReason = 200
	maxBy     = 100
	// overrideTimeout bounds a list of overrides.
	overrideTimeout = 5 * time.Second
)

// overrides answers GET /rate_limit/overrides with the overrides in force, of a zone or of all, and of
// some kinds or of all.
func overrides(running runningConfig, r *http.Request) (any, error) {
	query, err := queryOf(r, "zone", "kind")
	if err != nil {
		return nil, err
	}
	kinds, zone := strings.FieldsFunc(query.Get("kind"), func(c rune) bool { return c == ',' }), query.Get("zone")
	for _, kind := range kinds {
		if !slices.Contains(kindsOfOverrides, store.OverrideKind(kind)) {
			return nil, apiErrorf(http.StatusBadRequest, "kind %q is unknown; there is zone, limit, block, grant", kind)
		}
	}
	isListed := func(o *store.Override) bool {
		return (len(kinds) == 0 || slices.Contains(kinds, string(o.Kind))) && (zone == "" || o.Zone == zone)
	}
	ctx, cancel := context.WithTimeout(r.Context(), overrideTimeout)
	defer cancel()
	all := adminapi.Overrides{Overrides: []adminapi.Override{}}
	now, zones := time.Now().UnixMicro(), zonesInStores(running)
	isKnown := zone == "" || zones[zone] != nil
	for _, s := range running.Stores() {
		found, err := s.Overrides(ctx)
		if err = errors.Join(err, found.Damaged()); err != nil {
			all.Errors = append(all.Errors, s.Name+": "+oneLine(err))
		}
		found.All(func(o *store.Override) bool {
			if o.Until > now && isListed(o) {
				all.Overrides = append(all.Overrides, overrideIn(zones[o.Zone], s.Name, o))
			}
			isKnown = isKnown || o.Zone == zone
			return true
		})
	}
	if !isKnown && len(all.Errors) == 0 {
		return nil, unknownZone(zone, zones)
	}
	slices.SortFunc(all.Overrides, compareOverrides)
	return all, nil
}

var kindsOfOverrides = []store.OverrideKind{store.OverrideZone, store.OverrideLimit, store.OverrideBlock, store.OverrideGrant}

func compareOverrides(a, b adminapi.Override) int {
	return cmp.Or(cmp.Compare(a.Zone, b.Zone), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ClientKey, b.ClientKey), cmp.Compare(a.Store, b.Store))
}

// clientOf explains a client key of a zone in a store, where the running config may lack
// the zone. It is empty for the zone itself.
func clientOf(zone []zoneInStore, storeName, clientKey string) adminapi.Client {
	if clientKey == "" {
		return adminapi.Client{}
	}
	if i := slices.Index(storeNames(zone), storeName); i >= 0 {
		return adminapi.Client(zone[i].ClientOf(clientKey))
	}
	return adminapi.Client{ClientKey: limiter.ShownKey(clientKey), Note: "of a zone that the running config lacks", Unknown: true}
}

// overrideIn describes an override of a zone in a store, of which the running config may lack the zone, as the
// zone obeys it.
func overrideIn(zone []zoneInStore, storeName string, o *store.Override) adminapi.Override {
	client := clientOf(zone, storeName, o.ClientKey)
	if i := slices.Index(storeNames(zone), storeName); i >= 0 {
		return obeyed(zone[i].Zone, storeName, o, client)
	}
	return overrideOf(storeName, o, client)
}

// obeyed is [overrideOf] with the events and the burst that the zone can count.
func obeyed(zone *limiter.Zone, storeName string, o *store.Override, client adminapi.Client) adminapi.Override {
	shown := overrideOf(storeName, o, client)
	shown.Events, shown.Burst = zone.Bounded(o)
	return shown
}

func overrideOf(storeName string, o *store.Override, client adminapi.Client) adminapi.Override {
	shown := adminapi.Override{
		Kind: o.Kind, Zone: o.Zone, Store: storeName, Client: client, Events: o.Events, Burst: o.Burst, Enforce: o.Enforce, Rollout: o.Rollout,
		Reason: o.Reason, By: o.By, Since: limiter.EpochSeconds(o.Since), Version: o.Version,
	}
	if o.Until != store.NoEnd {
		shown.Until = limiter.EpochSeconds(o.Until)
	}
	return shown
}

// The parameters of all changes.
var changeParameters = []string{"reason", "by", "version"}

// block answers POST /rate_limit/blocks/<zone>: it refuses all requests of a client for
// some time.
func block(running runningConfig, r *http.Request) (any, error) {
	// It is read first: without it, the command's last value stands in its place.
	end, err := endOf(r, "; in a command it is the last argument: write it, as in block api alice 1h")
	if err != nil {
		return nil, err
	}
	s, query, err := selectBuckets(running, r, append(changeParameters, "for")...)
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	return s.set(r, query, store.Override{Kind: store.OverrideBlock, Until: end})
}

// endOf returns when what a request asks for ends: after the time span in its parameter for. The hint
// is part of the error.
func endOf(r *http.Request, hint string) (int64, error) {
	text := r.URL.Query().Get("for")
	length, err := caddy.ParseDuration(text)
	if err != nil || length < time.Second || length > store.MaxWindow {
		return 0, apiErrorf(http.StatusBadRequest, "for=%q: it must be a time span from 1s to 100 years, such as 1h%s", text, hint)
	}
	return time.Now().Add(length).UnixMicro(), nil
}

// grant answers POST /rate_limit/grants/<zone>: it admits more events of a client in the
// window that is open.
func grant(running runningConfig, r *http.Request) (any, error) {
	text := r.URL.Query().Get("events")
	events, err := strconv.ParseInt(text, 10, 64)
	if err != nil || events < 1 || events > store.MaxEvents {
		return nil, apiErrorf(http.StatusBadRequest, "events=%q: it must be a whole number from 1 to 2^52; in a command it is the last argument: write it, as in grant api alice 100", text)
	}
	s, query, err := selectBuckets(running, r, append(changeParameters, "events")...)
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	all := adminapi.Overrides{Overrides: []adminapi.Override{}}
	buckets := s.buckets
	for i, b := range buckets {
		req, _ := s.about(b)
		st := s.open.Peek(r.Context(), req)
		if st.Err != nil {
			return nil, apiErrorf(http.StatusBadGateway, "store %s: %w", s.store.Name, st.Err)
		}
		s.buckets = buckets[i : i+1]
		set, err := s.set(r, query, store.Override{Kind: store.OverrideGrant, Events: events, Until: s.WindowEnd(st, time.Now())})
		if err != nil {
			return nil, err
		}
		all.Overrides = append(all.Overrides, set.Overrides...)
	}
	return all, nil
}

// sign notes who asks for a change, and why.
func sign(o *store.Override, r *http.Request, query url.Values) error {
	if o.Reason = query.Get("reason"); len(o.Reason) > maxReason {
		return apiErrorf(http.StatusBadRequest, "reason has %d bytes: it must have at most %d", len(o.Reason), maxReason)
	}
	by := query.Get("by")
	if len(by) > maxBy {
		return apiErrorf(http.StatusBadRequest, "by has %d bytes: it must have at most %d", len(by), maxBy)
	}
	if o.By = senderOf(r); by != "" {
		o.By = by + " (" + o.By + ")"
	}
	o.Since = time.Now().UnixMicro()
	return nil
}

// set begins an override for each of the selected buckets.
func (s *selection) set(r *http.Request, query url.Values, o store.Override) (adminapi.Overrides, error) {
	changes := s.changes(query, store.OverrideChange{Override: o})
	for i := range changes {
		if err := s.allows(&changes[i].Override); err != nil {
			return adminapi.Overrides{}, apiErrorf(http.StatusBadRequest, "%w", err)
		}
	}
	return s.make(r, query, changes)
}

// changes returns a change for each of the selected buckets.
func (s *selection) changes(query url.Values, c store.OverrideChange) []store.OverrideChange {
	all := make([]store.OverrideChange, len(s.buckets))
	for i, b := range s.buckets {
		c.Zone, c.ClientKey, c.Expected = s.Name, b.Key, expected(query)
		all[i] = c
	}
	return all
}

// make makes changes that a request asks for and that are allowed, and answers with them. Removals of what is
// not there are no changes.
func (s *selection) make(r *http.Request, query url.Values, changes []store.OverrideChange) (all adminapi.Overrides, err error) {
	all.Overrides = []adminapi.Override{}
	for i := range changes {
		c := &changes[i]
		if c.Removes {
			c.Override = store.Override{Kind: c.Kind, Zone: c.Zone, ClientKey: c.ClientKey}
		}
		if err := sign(&c.Override, r, query); err != nil {
			return all, err
		}
	}
	outcomes, err := makeChanges(r.Context(), s.store, func(string) *limiter.Limiter { return s.limiter }, changes)
	if err != nil {
		return all, s.overrideError(err)
	}
	for i := range changes {
		c, outcome := &changes[i], &outcomes[i]
		switch {
		case isMade(c, outcome):
			all.Overrides = append(all.Overrides, s.answerTo(c, outcome))
		case outcome.Err != nil:
			return all, s.changeError(outcome)
		}
	}
	return all, nil
}

// answerTo describes a change that was made.
func (s *selection) answerTo(c *store.OverrideChange, outcome *store.OverrideOutcome) adminapi.Override {
	var client adminapi.Client
	if i := slices.IndexFunc(s.buckets, func(b limiter.Bucket) bool { return b.Key == c.ClientKey }); i >= 0 {
		client = adminapi.Client(s.buckets[i].Client)
	}
	o := c.Override
	if o.Version = outcome.Version; c.Removes {
		o.Since = 0
	}
	shown := obeyed(s.Zone, s.store.Name, &o, client)
	shown.ReplacedDamaged = outcome.WasDamaged
	shown.Warning = warningOf(s.store, outcome)
	if outcome.Copies.OfShards > 0 {
		shown.Copies = &outcome.Copies
	}
	if before := outcome.Before; !c.Removes && before != nil && before.Until > o.Since && before.Until != store.NoEnd {
		shown.ReplacedUntil = limiter.EpochSeconds(before.Until)
	}
	return shown
}

// warningOf says which shards of a store may lack a change that was made, or nothing.
func warningOf(handle *stores.Handle, outcome *store.OverrideOutcome) string {
	if outcome.Warning == nil {
		return ""
	}
	return fmt.Sprintf("store %s does not have the change on all shards: %s: a Caddy that knows it writes it to shards that were away, once they are back, unless that is given up", handle.Name, oneLine(outcome.Warning))
}

// allows returns why an override cannot be set, by whatever way, or nil.
func (z zoneInStore) allows(o *store.Override) error {
	switch {
	case stores.IsShared(o.ClientKey):
		return fmt.Errorf("client_key %q is a bucket that clients share: name a client", o.ClientKey)
	case o.Kind == store.OverrideZone && z.store != z.limiter.Store:
		return fmt.Errorf("what is set of zone %s is kept in store %s, which is that of its handler", z.Name, z.limiter.Store.Name)
	case o.Burst > 0 && o.Events < 1:
		return errors.New("burst needs events")
	case o.Kind == store.OverrideGrant && o.Until == store.NoEnd:
		return errors.New("until is missing: a grant ends; write kind limit for more events without end")
	case foreignField(o) != "":
		return fmt.Errorf("a %s has no %s", o.Kind, foreignField(o))
	case o.Kind == store.OverrideLimit && o.Events == 0:
		return errors.New("events is missing: it must be a whole number from 1 to 2^52, or unlimited")
	case o.Kind == store.OverrideZone && o.Events == 0 && o.Enforce == nil && o.Rollout == nil:
		return errors.New("nothing is set: there is events, burst, enforce and rollout")
	case len(o.Reason) > maxReason:
		return fmt.Errorf("reason has %d bytes: it must have at most %d", len(o.Reason), maxReason)
	case o.Check() != nil:
		return fmt.Errorf("this %q cannot be: kind is block, grant, limit or zone, events and burst are up to 2^52, enforce and rollout from 0 to 100", o.Kind)
	}
	return z.Check(o)
}

// unused says why a setting of an override has no effect in this config, or nothing: it may be of another one.
func (z zoneInStore) unused(o *store.Override) string {
	switch {
	case o.Burst > 0 && !z.Algorithm.HasBurst():
		return fmt.Sprintf("burst: zone %s has the algorithm %s, which has no burst", z.Name, z.Algorithm)
	case o.Rollout != nil && z.limiter.Rollout == nil:
		return fmt.Sprintf("rollout: the handler of zone %s has none, which names the other store", z.Name)
	case o.Rollout != nil && !z.limiter.Moves(z.Zone):
		return fmt.Sprintf("rollout: the first zone of the handler decides, which is %s", z.limiter.Zones[0].Name)
	}
	return ""
}

// foreignField returns the name of a field that is set, and that the override's kind does not have, or "".
func foreignField(o *store.Override) string {
	switch isBounded := o.Kind == store.OverrideBlock || o.Kind == store.OverrideGrant; {
	case o.Kind == store.OverrideBlock && o.Events != 0:
		return "events"
	case isBounded && o.Burst != 0:
		return "burst"
	case o.Kind != store.OverrideZone && o.Enforce != nil:
		return "enforce"
	case o.Kind != store.OverrideZone && o.Rollout != nil:
		return "rollout"
	}
	return ""
}

// makeChanges makes changes in a store, and reports those that were made, each by the limiter of its zone.
func makeChanges(ctx context.Context, handle *stores.Handle, limiterOf func(zone string) *limiter.Limiter, changes []store.OverrideChange) ([]store.OverrideOutcome, error) {
	outcomes, err := handle.ChangeOverrides(ctx, changes)
	if err != nil {
		return nil, err
	}
	for i := range changes {
		if c := &changes[i]; isMade(c, &outcomes[i]) {
			limiterOf(c.Zone).ReportOverride(&c.Override, c.Removes, outcomes[i].Warning)
		}
	}
	return outcomes, nil
}

// isMade reports whether a change was made: there was something if it is a removal.
func isMade(c *store.OverrideChange, outcome *store.OverrideOutcome) bool {
	return outcome.Err == nil && (!c.Removes || outcome.Before != nil)
}

// expected returns the version that a request expects, any if it names none.
func expected(query url.Values) string {
	if query.Has("version") {
		return query.Get("version")
	}
	return store.AnyVersion
}

// unblock answers DELETE /rate_limit/blocks/<zone>, and ungrant /rate_limit/grants/<zone>.
func unblock(running runningConfig, r *http.Request) (any, error) {
	return remove(running, r, store.OverrideBlock)
}

func ungrant(running runningConfig, r *http.Request) (any, error) {
	return remove(running, r, store.OverrideGrant)
}

// selectOverridden selects the clients whose overrides a request ends. A client key is taken
// as it is listed, because the config may have changed since: its store is the one that
// the request names, or the only one in which the zone counts.
func selectOverridden(running runningConfig, r *http.Request, more ...string) (*selection, url.Values, error) {
	query, err := queryOf(r, slices.Concat(changeParameters, more, []string{"key...", "client_key", "store"})...)
	if err != nil {
		return nil, nil, err
	}
	zones, zone, name := zonesInStores(running), r.PathValue("zone"), query.Get("store")
	bound := zones[zone]
	if name == "" && len(bound) == 1 {
		name = bound[0].store.Name
	}
	all := running.Stores()
	i := slices.IndexFunc(all, func(s *stores.Handle) bool { return s.Name == name })
	if !query.Has("client_key") || query.Has("key") || i < 0 {
		return selectBuckets(running, r, slices.Concat(changeParameters, more)...)
	}
	key := limiter.KeyOf(query.Get("client_key"))
	s := &selection{zoneInStore: zoneIn(running, bound, zone, all[i])}
	s.buckets = []limiter.Bucket{{Client: limiter.Client(clientOf(bound, name, key)), Key: key}}
	if s.open, err = s.store.Enter(); err != nil {
		return nil, nil, apiErrorf(http.StatusBadGateway, "store %s: %w", name, err)
	}
	return s, query, nil
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

// remove ends the overrides of a client of that kind.
func remove(running runningConfig, r *http.Request, kind store.OverrideKind) (any, error) {
	s, query, err := selectOverridden(running, r)
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	return s.removeAll(r, query, kind)
}

// removeAll is remove, and an error if there was none: the client may be mistyped.
func (s *selection) removeAll(r *http.Request, query url.Values, kind store.OverrideKind) (any, error) {
	all, err := s.remove(r, query, kind)
	if err == nil && len(all.Overrides) == 0 {
		err = apiErrorf(http.StatusNotFound, "zone %s has no %s of this client in store %s", s.Name, kind, s.store.Name)
	}
	return all, err
}

// remove ends overrides, and answers with those that there were.
func (s *selection) remove(r *http.Request, query url.Values, kind store.OverrideKind) (adminapi.Overrides, error) {
	return s.make(r, query, s.changes(query, store.OverrideChange{Override: store.Override{Kind: kind}, Removes: true}))
}

// senderOf returns the address from which a request came, and the certificate with which it did. Its subject
// alone proves nothing, because who has the key may write another one.
func senderOf(r *http.Request) string {
	if r.RemoteAddr == "" || r.RemoteAddr == "@" {
		return "a Unix socket" // its other end has no name
	}
	if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
		return r.RemoteAddr
	}
	certificate := r.TLS.PeerCertificates[0]
	subject := certificate.Subject.String()
	sum := sha256.Sum256(certificate.Raw)
	return fmt.Sprintf("%s, certificate %s, SHA-256 %x...", r.RemoteAddr, strings.ToValidUTF8(subject[:min(len(subject), maxBy)], ""), sum[:8])
}

func (s *selection) overrideError(err error) error {
	status := http.StatusBadGateway
	if errors.Is(err, errors.ErrUnsupported) {
		status = http.StatusNotImplemented
	}
	return apiErrorf(status, "store %s: %s", s.store.Name, oneLine(err))
}

// changeError returns the error of a change that was not made.
func (s *selection) changeError(outcome *store.OverrideOutcome) error {
	if errors.Is(outcome.Err, store.ErrChanged) {
		return apiErrorf(http.StatusConflict, "%s", conflictText(outcome))
	}
	return s.overrideError(outcome.Err)
}

// conflictText says what has come before a change.
func conflictText(outcome *store.OverrideOutcome) string {
	there := "there is none now"
	if o := outcome.Before; o != nil {
		there = fmt.Sprintf("now it is that of %s by %s", time.UnixMicro(o.Since).Format(time.RFC3339), o.By)
	}
	return fmt.Sprintf("%s; %s: look at it, and repeat your change if it is still right", oneLine(outcome.Err), there)
}
