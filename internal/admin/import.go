package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// maxImport bounds an import, in bytes.
const maxImport = 64 << 20

// importOverrides answers POST /rate_limit/overrides: it makes overrides be as in the request, and with
// the parameter prune removes limits and rules of zones that are not in it. With dry_run it only answers
// what it would change.
func importOverrides(running runningConfig, r *http.Request) (any, error) {
	query, err := queryOf(r, "prune", "dry_run", "reason", "by")
	if err != nil {
		return nil, err
	}
	prunes, err := flagOf(query, "prune")
	if err != nil {
		return nil, err
	}
	onlyTells, err := flagOf(query, "dry_run")
	if err != nil {
		return nil, err
	}
	var wanted adminapi.ImportedOverrides
	if err := readBody(r.Body, maxImport, &wanted); err != nil {
		return nil, err
	}
	if wanted.Overrides == nil {
		return nil, apiErrorf(http.StatusBadRequest, "body: overrides is missing: write a list, such as rules --export does, or [] for none")
	}
	in := &importing{zones: zonesInStores(running), by: map[*stores.Handle]*importedStore{}, now: time.Now().UnixMicro()}
	if err := sign(&in.signature, r, query); err != nil {
		return nil, err
	}
	// What no store could have is an error before anything is changed.
	for i := range wanted.Overrides {
		if err := in.want(r.Context(), &wanted.Overrides[i]); err != nil {
			return nil, apiErrorf(statusOf(err, http.StatusBadRequest), "overrides[%d]: %w", i, err)
		}
	}
	if prunes {
		// What is skipped here would be removed there.
		if err := in.skipped(); err != nil {
			return nil, err
		}
		if err := in.prune(r.Context(), running.Stores()); err != nil {
			return nil, err
		}
	}
	return in.carryOut(r.Context(), running.Stores(), onlyTells)
}

// importing is an import under way.
type importing struct {
	zones     map[string][]zoneInStore
	by        map[*stores.Handle]*importedStore
	now       int64
	signature store.Override
	answer    adminapi.Imported
}

// importedStore is what a store has, and what is to change there.
type importedStore struct {
	current *store.OverrideSet
	// unused says of changed overrides what has no effect.
	unused  map[store.OverrideID]string
	kept    func(store.OverrideID) store.OverrideID
	wanted  map[store.OverrideID]bool
	changes []store.OverrideChange
}

// in returns what is imported into a store.
func (in *importing) in(ctx context.Context, handle *stores.Handle) (*importedStore, error) {
	if there := in.by[handle]; there != nil {
		return there, nil
	}
	current, err := handle.Overrides(ctx)
	if err != nil {
		return nil, apiErrorf(http.StatusBadGateway, "store %s: %s", handle.Name, oneLine(err))
	}
	there := &importedStore{current: current, kept: handle.KeptID, wanted: map[store.OverrideID]bool{}, unused: map[store.OverrideID]string{}}
	in.by[handle] = there
	return there, nil
}

// statusOf returns the status that an error of the API has, or another one.
func statusOf(err error, other int) int {
	if api := (caddy.APIError{}); errors.As(err, &api) {
		return api.HTTPStatus
	}
	return other
}

// want adds the change that an override of the request needs. One that has ended, or whose zone the config
// does not count in that store, needs none.
func (in *importing) want(ctx context.Context, shown *adminapi.Override) error {
	if shown.Until != 0 && shown.Until*1e6 <= float64(in.now) {
		in.answer.Ended++
		return nil
	}
	bound, ok, err := in.zoneOf(shown)
	if err != nil || !ok {
		return err
	}
	o, err := in.read(shown, bound)
	if err != nil {
		return err
	}
	there, err := in.in(ctx, bound.store)
	if err != nil {
		return err
	}
	id := there.kept(o.ID())
	if there.wanted[id] {
		return fmt.Errorf("the %s of %s in zone %s is there twice", o.Kind, o.ClientKey, o.Zone)
	}
	there.wanted[id] = true
	before := there.current.Of(id, in.now)
	if before != nil && isSame(before, &o, bound.Zone) {
		in.answer.Unchanged++
		return nil
	}
	there.changes = append(there.changes, store.OverrideChange{Override: o, Expected: versionOf(before)})
	there.unused[id] = bound.unused(&o)
	return nil
}

func versionOf(o *store.Override) string {
	if o == nil {
		return ""
	}
	return o.Version
}

// isSame reports whether overrides do the same in a zone.
func isSame(a, b *store.Override, zone *limiter.Zone) bool {
	same := func(a, b *float64) bool { return a == b || a != nil && b != nil && *a == *b }
	const millisecond = 1000         // Seconds in JSON are not exact.
	events, burst := zone.Bounded(a) // as rules shows it
	return events == b.Events && burst == b.Burst && same(a.Enforce, b.Enforce) && same(a.Rollout, b.Rollout) &&
		max(a.Until-b.Until, b.Until-a.Until) < millisecond && a.Reason == b.Reason
}

// zoneOf returns the zone of an override of the request in its store, unless the config has none: then the
// override is skipped.
func (in *importing) zoneOf(shown *adminapi.Override) (bound zoneInStore, ok bool, err error) {
	all := in.zones[shown.Zone]
	i := slices.Index(storeNames(all), shown.Store)
	switch {
	case shown.Store == "" && len(all) == 1:
		i = 0
	case shown.Store == "" && len(all) > 1:
		return bound, false, fmt.Errorf("zone %s counts in several stores: name one of %s", shown.Zone, strings.Join(storeNames(all), ", "))
	}
	if i >= 0 {
		return all[i], true, nil
	}
	why := fmt.Sprintf("the config has no zone %q", shown.Zone)
	if len(all) > 0 {
		why = fmt.Sprintf("zone %s does not count in the store %q; there is %s", shown.Zone, shown.Store, strings.Join(storeNames(all), ", "))
	}
	in.answer.Skipped = append(in.answer.Skipped, adminapi.ImportedChange{After: shown, Error: why})
	return bound, false, nil
}

// skipped returns an error if an override is skipped whose zone counts in other stores.
func (in *importing) skipped() error {
	for _, c := range in.answer.Skipped {
		if len(in.zones[c.After.Zone]) > 0 {
			return apiErrorf(http.StatusBadRequest, "with prune, %s", c.Error)
		}
	}
	return nil
}

// read returns an override of the request in its zone.
func (in *importing) read(shown *adminapi.Override, bound zoneInStore) (o store.Override, err error) {
	o = in.signature
	o.Kind, o.Zone, o.Events, o.Burst, o.Enforce, o.Rollout, o.Reason = shown.Kind, shown.Zone, shown.Events, shown.Burst, shown.Enforce, shown.Rollout, cmp.Or(shown.Reason, o.Reason)
	if o.Until = store.NoEnd; shown.Until != 0 {
		o.Until = int64(min(shown.Until*1e6, store.NoEnd))
	}
	switch {
	case o.Kind == store.OverrideZone:
		if shown.ClientKey != "" || shown.Template != "" || len(shown.Values) > 0 {
			return o, fmt.Errorf("zone %s: kind zone changes all clients, and a client is named: write kind limit for one", shown.Zone)
		}
	case shown.ClientKey != "":
		o.ClientKey = limiter.KeyOf(shown.ClientKey)
	default:
		buckets, err := bound.BucketsOf(append([]string{shown.Template}, shown.Values...), nil)
		if err != nil || len(buckets) != 1 {
			return o, fmt.Errorf("zone %s: %w", shown.Zone, cmp.Or(err, errNoClient))
		}
		o.ClientKey = buckets[0].Key
	}
	if err := bound.allows(&o); err != nil {
		return o, fmt.Errorf("the %s of %q in zone %s: %w", o.Kind, shown.ClientKey, shown.Zone, err)
	}
	return o, nil
}

var errNoClient = errors.New("it names no client: write client_key, or template and values")

// prune adds the removal of limits and rules that are not wanted.
func (in *importing) prune(ctx context.Context, all []*stores.Handle) error {
	for _, handle := range all {
		there, err := in.in(ctx, handle)
		if err != nil {
			return err
		}
		there.current.All(func(o *store.Override) bool {
			isRule := o.Kind == store.OverrideLimit || o.Kind == store.OverrideZone
			// Zones that the config lacks are of other Caddys.
			if isRule && in.zones[o.Zone] != nil && o.Until > in.now && !there.wanted[there.kept(o.ID())] {
				gone := in.signature
				gone.Kind, gone.Zone, gone.ClientKey = o.Kind, o.Zone, o.ClientKey
				there.changes = append(there.changes, store.OverrideChange{Override: gone, Removes: true, Expected: o.Version})
			}
			return true
		})
	}
	return nil
}

// carryOut makes the changes, unless it is only to tell them. A store that fails changes nothing of what was
// made in others.
func (in *importing) carryOut(ctx context.Context, all []*stores.Handle, onlyTells bool) (any, error) {
	in.answer.Changes = []adminapi.ImportedChange{}
	for _, handle := range all {
		there := in.by[handle]
		if there == nil || len(there.changes) == 0 {
			continue
		}
		outcomes := make([]store.OverrideOutcome, len(there.changes))
		if !onlyTells {
			made, err := makeChanges(ctx, handle, in.limiterIn(handle), there.changes)
			for i := range outcomes {
				outcomes[i].Err = err
			}
			if err == nil {
				outcomes = made
			}
		}
		for i := range there.changes {
			in.answer.Changes = append(in.answer.Changes, in.shown(handle, there, &there.changes[i], &outcomes[i]))
		}
	}
	slices.SortStableFunc(in.answer.Changes, func(a, b adminapi.ImportedChange) int {
		return compareOverrides(*cmp.Or(a.After, a.Before), *cmp.Or(b.After, b.Before))
	})
	return in.answer, nil
}

// limiterIn returns a function that returns the limiter of a zone of the config in a store.
func (in *importing) limiterIn(handle *stores.Handle) func(zone string) *limiter.Limiter {
	return func(zone string) *limiter.Limiter {
		all := in.zones[zone]
		return all[max(slices.Index(storeNames(all), handle.Name), 0)].limiter
	}
}

func (in *importing) shown(handle *stores.Handle, there *importedStore, c *store.OverrideChange, outcome *store.OverrideOutcome) (change adminapi.ImportedChange) {
	if before := there.current.Of(there.kept(c.ID()), in.now); before != nil {
		shown := overrideIn(in.zones[c.Zone], handle.Name, before)
		change.Before = &shown
	}
	if !c.Removes {
		o := c.Override
		o.Version = outcome.Version
		shown := overrideIn(in.zones[c.Zone], handle.Name, &o)
		shown.ReplacedDamaged = outcome.WasDamaged
		change.After = &shown
	}
	change.Warning = cmp.Or(warningOf(handle, outcome), there.unused[there.kept(c.ID())])
	switch {
	case errors.Is(outcome.Err, store.ErrChanged):
		change.Error = conflictText(outcome)
	case outcome.Err != nil:
		change.Error = "store " + handle.Name + ": " + oneLine(outcome.Err)
	}
	return change
}
