package admin

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// setZone answers POST /rate_limit/zones/<zone>: it changes settings of the zone in all Caddys.
func setZone(running runningConfig, r *http.Request) (any, error) {
	s, query, err := selectZone(running, r, "events", "burst", "enforce", "rollout", "for")
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	return s.setSettings(r, query, store.OverrideZone)
}

// setLimit answers POST /rate_limit/limits/<zone>: it gives a client a limit of its own.
func setLimit(running runningConfig, r *http.Request) (any, error) {
	s, query, err := selectBuckets(running, r, append(changeParameters, "events", "burst", "for")...)
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	return s.setSettings(r, query, store.OverrideLimit)
}

// unsetZone answers DELETE /rate_limit/zones/<zone>: the settings in its parameter settings, or all, are
// those of the config again.
func unsetZone(running runningConfig, r *http.Request) (any, error) {
	s, query, err := selectZone(running, r, "settings")
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	return s.unsetSettings(r, query, store.OverrideZone)
}

// unsetLimit answers DELETE /rate_limit/limits/<zone>, with settings too.
func unsetLimit(running runningConfig, r *http.Request) (any, error) {
	s, query, err := selectOverridden(running, r, "settings")
	if err != nil {
		return nil, err
	}
	defer s.store.Leave()
	return s.unsetSettings(r, query, store.OverrideLimit)
}

// settings are what an override may set.
var settings = []string{"events", "burst", "enforce", "rollout"}

// setSettings changes settings of the zone, or of the limits of the selected clients. Those that the request
// does not name stay as they were set before, whatever the config is now.
func (s *selection) setSettings(r *http.Request, query url.Values, kind store.OverrideKind) (any, error) {
	end := int64(store.NoEnd)
	switch isNamed := slices.ContainsFunc(settings, query.Has); {
	case query.Has("for"):
		var err error
		if end, err = endOf(r, ""); err != nil {
			return nil, err
		}
	case !isNamed:
		return nil, apiErrorf(http.StatusBadRequest, "nothing is set: there is events, burst, enforce and rollout")
	}
	var named store.Override
	if err := readSettings(&named, query); err != nil {
		return nil, err
	}
	if unused := s.unused(&named); unused != "" {
		return nil, apiErrorf(http.StatusBadRequest, "%s", unused)
	}
	all, err := s.currentSettings(r, query, kind)
	if err != nil {
		return nil, err
	}
	changes := make([]store.OverrideChange, len(all))
	for i := range all {
		o := all[i].Override
		checked := o
		checked.Events, checked.Burst = s.Bounded(&o)
		_ = readSettings(&o, query) // as above
		_ = readSettings(&checked, query)
		if err := s.allows(&checked); err != nil {
			return nil, apiErrorf(http.StatusBadRequest, "%w", err)
		}
		if err := renew(&o, query, end); err != nil {
			return nil, err
		}
		changes[i] = store.OverrideChange{Override: o, Expected: all[i].Expected}
	}
	return s.make(r, query, changes)
}

// renew gives an override another end. It is an error if settings end otherwise that the request does not name,
// unless it names none: there is one end for all of them.
func renew(o *store.Override, query url.Values, end int64) error {
	isNamed := slices.ContainsFunc(settings, query.Has)
	for _, name := range settings {
		if isNamed && !query.Has(name) && isSet(o, name) && o.Until != end {
			return apiErrorf(http.StatusConflict, "%s ends %s, and with the rest of the rule it would end %s: name %s too, or unset it first",
				name, endText(o.Until), endText(end), name)
		}
	}
	o.Until = end
	return nil
}

func endText(until int64) string {
	if until == store.NoEnd {
		return "when it is unset"
	}
	return "at " + time.UnixMicro(until).UTC().Format(time.RFC3339)
}

// isSet reports whether an override has a setting.
func isSet(o *store.Override, name string) bool {
	switch name {
	case "events":
		return o.Events != 0
	case "burst":
		return o.Burst != 0
	case "enforce":
		return o.Enforce != nil
	}
	return o.Rollout != nil
}

// unsetSettings ends the settings in the parameter settings, or all.
func (s *selection) unsetSettings(r *http.Request, query url.Values, kind store.OverrideKind) (any, error) {
	if kind == store.OverrideLimit && query.Get("settings") == "" {
		return s.removeAll(r, query, kind)
	}
	all, err := s.currentSettings(r, query, kind)
	if err != nil {
		return nil, err
	}
	var names []string
	if text := query.Get("settings"); text != "" {
		names = strings.Split(text, ",")
	}
	var changes []store.OverrideChange
	for _, c := range all {
		o := c.Override
		if err := endSettings(&o, names); err != nil {
			return nil, err
		}
		hasSome := slices.ContainsFunc(names, func(name string) bool { return isSet(&c.Override, name) })
		if c.isThere && (hasSome || len(names) == 0) {
			removes := len(names) == 0 || o.Events == 0 && o.Enforce == nil && o.Rollout == nil
			changes = append(changes, store.OverrideChange{Override: o, Removes: removes, Expected: c.Expected})
		}
	}
	made, err := s.make(r, query, changes)
	if err == nil && len(made.Overrides) == 0 {
		err = s.notSet(names)
	}
	return made, err
}

// notSet is the error of ending what is not set: some settings, or all.
func (s *selection) notSet(names []string) error {
	text := fmt.Sprintf("nothing of zone %s is set in store %s", s.Name, s.store.Name)
	if len(names) > 0 {
		text = fmt.Sprintf("zone %s has nothing set of %s in store %s", s.Name, strings.Join(names, ", "), s.store.Name)
	}
	if len(s.Key) == 0 {
		text += ", and the config lacks the zone"
	}
	return apiErrorf(http.StatusNotFound, "%s", text)
}

// endSettings makes settings those of the config again.
func endSettings(o *store.Override, names []string) error {
	for _, name := range names {
		switch name {
		case "events":
			o.Events, o.Burst = 0, 0
		case "burst":
			o.Burst = 0
		case "enforce":
			o.Enforce = nil
		case "rollout":
			o.Rollout = nil
		default:
			return apiErrorf(http.StatusBadRequest, "settings has %q; there is events, burst, enforce, rollout", name)
		}
	}
	return nil
}

// readSettings reads the settings that a request names.
func readSettings(o *store.Override, query url.Values) error {
	for name, n := range map[string]*int64{"events": &o.Events, "burst": &o.Burst} {
		text := query.Get(name)
		if text == "" && !query.Has(name) || name == "events" && text == limiter.UnlimitedWord {
			continue
		}
		number, err := strconv.ParseInt(text, 10, 64)
		if err != nil || number < 1 || number > store.MaxEvents {
			return apiErrorf(http.StatusBadRequest, "%s=%q: it must be a whole number from 1 to 2^52%s", name, text, map[string]string{"events": ", or unlimited"}[name])
		}
		*n = number
	}
	if query.Get("events") == limiter.UnlimitedWord {
		o.Events = store.Unlimited
		if !query.Has("burst") {
			o.Burst = 0
		}
	}
	for name, percent := range map[string]**float64{"enforce": &o.Enforce, "rollout": &o.Rollout} {
		if !query.Has(name) {
			continue
		}
		text := query.Get(name)
		n, err := strconv.ParseFloat(strings.TrimSuffix(text, "%"), 64)
		if err != nil || !(n >= 0 && n <= 100) {
			return apiErrorf(http.StatusBadRequest, "%s=%q: it must be a percentage from 0 to 100", name, text)
		}
		*percent = &n
	}
	return nil
}

// currentSetting is what the store has of the zone or a client, to be changed.
type currentSetting struct {
	store.OverrideChange
	// isThere is set if the store has something, which may be damaged.
	isThere bool
}

// currentSettings returns what the store says now of the zone, or of the limits of the selected clients. A
// change expects that, unless the request names a version.
func (s *selection) currentSettings(r *http.Request, query url.Values, kind store.OverrideKind) (all []currentSetting, err error) {
	set, err := s.store.Overrides(r.Context())
	if err != nil {
		return nil, s.overrideError(err)
	}
	ids := []store.OverrideID{{Kind: kind, Zone: s.Name}}
	if kind != store.OverrideZone {
		ids = ids[:0]
		for _, b := range s.buckets {
			ids = append(ids, store.OverrideID{Kind: kind, Zone: s.Name, ClientKey: b.Key})
		}
	}
	for _, id := range ids {
		c := currentSetting{isThere: set.IsDamaged(s.store.KeptID(id))}
		c.Until = store.NoEnd
		if before := set.Of(s.store.KeptID(id), time.Now().UnixMicro()); before != nil {
			c.Override, c.Expected, c.isThere = *before, before.Version, true
		}
		c.Kind, c.Zone, c.ClientKey, c.Version = id.Kind, id.Zone, id.ClientKey, ""
		if query.Has("version") {
			c.Expected = query.Get("version")
		}
		all = append(all, c)
	}
	return all, nil
}

// selectZone selects a zone in the store of its handler, where rules of it are kept, and opens that.
func selectZone(running runningConfig, r *http.Request, more ...string) (*selection, url.Values, error) {
	query, err := queryOf(r, slices.Concat(changeParameters, []string{"store"}, more)...)
	if err != nil {
		return nil, nil, err
	}
	zones, zone, name := zonesInStores(running), r.PathValue("zone"), query.Get("store")
	own := slices.DeleteFunc(slices.Clone(zones[zone]), func(z zoneInStore) bool {
		return z.store != z.limiter.Store || name != "" && z.store.Name != name
	})
	if all := running.Stores(); len(own) == 0 && r.Method == http.MethodDelete {
		// What was set of it ends, also after the zone has left the config, or the store.
		i := slices.IndexFunc(all, func(s *stores.Handle) bool { return s.Name == name || name == "" && len(all) == 1 })
		if i >= 0 {
			own = []zoneInStore{zoneIn(running, zones[zone], zone, all[i])}
		}
	}
	switch {
	case len(own) == 0 && zones[zone] == nil:
		return nil, nil, unknownZone(zone, zones)
	case len(own) == 0:
		return nil, nil, apiErrorf(http.StatusNotFound, "no handler with zone %s has the store %q", zone, name)
	case len(own) > 1:
		return nil, nil, apiErrorf(http.StatusBadRequest, "zone %s counts in several stores: name one of %s (--store, in a URL store=)", zone, strings.Join(storeNames(own), ", "))
	}
	s := &selection{zoneInStore: own[0]}
	if s.open, err = s.store.Enter(); err != nil {
		return nil, nil, apiErrorf(http.StatusBadGateway, "store %s: %w", s.store.Name, err)
	}
	return s, query, nil
}

// blockEverywhere answers POST /rate_limit/blocks: it blocks a client in all zones whose key can yield
// its name.
func blockEverywhere(running runningConfig, r *http.Request) (any, error) {
	end, err := endOf(r, "; in a command it is the last argument")
	if err != nil {
		return nil, err
	}
	return everywhere(running, r, store.OverrideBlock, func(s *selection, query url.Values) (adminapi.Overrides, error) {
		return s.set(r, query, store.Override{Kind: store.OverrideBlock, Until: end})
	}, "for")
}

// endEverywhere returns what answers DELETE /rate_limit/blocks and /rate_limit/grants.
func endEverywhere(kind store.OverrideKind) call {
	return func(running runningConfig, r *http.Request) (any, error) {
		return everywhere(running, r, kind, func(s *selection, query url.Values) (adminapi.Overrides, error) {
			return s.remove(r, query, kind)
		})
	}
}

// everywhere changes overrides of one kind for a client, by its name, in all zones. It is an error if no zone knows
// the client, or nothing was changed.
func everywhere(running runningConfig, r *http.Request, kind store.OverrideKind, change func(s *selection, query url.Values) (adminapi.Overrides, error), more ...string) (any, error) {
	query, err := queryOf(r, append(more, "name", "reason", "by")...)
	if err != nil {
		return nil, err
	}
	name := query.Get("name")
	found := selectNamed(running, name)
	if name == "" || len(found) == 0 {
		return nil, apiErrorf(http.StatusNotFound, "name=%q: no zone's key can yield that; write what the placeholder of a key has for the client", name)
	}
	all := adminapi.Overrides{Overrides: []adminapi.Override{}}
	var failed []error
	for _, s := range found {
		some, err := s.within(func() (adminapi.Overrides, error) { return change(s, query) })
		all.Overrides = append(all.Overrides, some.Overrides...)
		if err != nil {
			failed = append(failed, err)
			all.Errors = append(all.Errors, fmt.Sprintf("zone %s in store %s: %s", s.Name, s.store.Name, oneLine(err)))
		}
	}
	switch {
	case len(all.Overrides) > 0:
		return all, nil
	case len(failed) > 0:
		return nil, failed[0]
	}
	return nil, apiErrorf(http.StatusNotFound, "name=%q: this client has no %s in any zone", name, kind)
}

// within opens the store during a call.
func (s *selection) within(call func() (adminapi.Overrides, error)) (adminapi.Overrides, error) {
	var err error
	if s.open, err = s.store.Enter(); err != nil {
		return adminapi.Overrides{}, err
	}
	defer s.store.Leave()
	return call()
}

// selectNamed selects the buckets of a client in all zones and stores, by its name. The stores are not
// open.
func selectNamed(running runningConfig, name string) (found []*selection) {
	zones := zonesInStores(running)
	for _, zone := range sortedKeys(zones) {
		for _, bound := range zones[zone] {
			if buckets := bound.Find(name); len(buckets) > 0 {
				found = append(found, &selection{zoneInStore: bound, buckets: buckets})
			}
		}
	}
	return found
}

// audit answers GET /rate_limit/audit with the last changes of overrides, of a zone or of all.
func audit(running runningConfig, r *http.Request) (any, error) {
	query, err := queryOf(r, "zone")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), overrideTimeout)
	defer cancel()
	all, zones, zone := adminapi.Audit{Changes: []adminapi.AuditedChange{}}, zonesInStores(running), query.Get("zone")
	for _, s := range running.Stores() {
		found, err := s.Audit(ctx)
		if err != nil {
			all.Errors = append(all.Errors, s.Name+": "+oneLine(err))
		}
		for i := range found {
			if a := &found[i]; zone == "" || a.ID.Zone == zone {
				all.Changes = append(all.Changes, auditedIn(s, zones, a))
			}
		}
	}
	if zone != "" && zones[zone] == nil && len(all.Changes)+len(all.Errors) == 0 {
		return nil, unknownZone(zone, zones)
	}
	slices.SortStableFunc(all.Changes, func(a, b adminapi.AuditedChange) int { return cmp.Compare(b.At, a.At) })
	all.Changes = all.Changes[:min(len(all.Changes), store.MaxAudited)]
	return all, nil
}

func auditedIn(s *stores.Handle, zones map[string][]zoneInStore, a *store.Audited) adminapi.AuditedChange {
	client := clientOf(zones[a.ID.Zone], s.Name, a.ID.ClientKey)
	change := adminapi.AuditedChange{At: limiter.EpochSeconds(a.At), Store: s.Name, Zone: a.ID.Zone, Kind: a.ID.Kind, Client: client, By: a.By, Reason: a.Reason}
	for from, to := range map[*store.Override]**adminapi.Override{a.Before: &change.Before, a.After: &change.After} {
		if from != nil {
			shown := overrideOf(s.Name, from, client)
			*to = &shown
		}
	}
	return change
}
