package fleet

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// changes are the paths of changes that one Caddy or all have to make, up to a zone in them. Imports
// and simulations are about one Caddy.
var changes = map[string]merger{
	"buckets": as(mergeResets),
	"blocks":  as(mergeOverrides),
	"grants":  as(mergeOverrides),
	"limits":  as(mergeOverrides),
	"zones":   as(mergeOverrides),
}

// change sends a change of what a shared store keeps to one Caddy, from which the others have it, and
// another to all.
func (a *API) change(ctx context.Context, method, path, what, zone string, query url.Values, body []byte, merge merger) (int, []byte, error) {
	st, members := a.status(ctx)
	if st == nil {
		return first(ask(ctx, a.members, stateTimeout, http.MethodGet, root, nil))
	}
	about := asked{query: query, known: st}
	stores := about.storesOf(zone, what != "zones")
	if name := query.Get("store"); name != "" {
		stores = []string{name}
	}
	// Of a zone that no config has, the stores are not known.
	if len(stores) > 0 && about.areShared(stores...) {
		for _, i := range st.Instances {
			if i.Error != "" {
				about.failed = append(about.failed, failure{i.Address, i.Error})
			}
		}
		return oneOf(ctx, members, method, path, body, merge, about)
	}
	everyone := slices.DeleteFunc(slices.Clone(a.members), func(m Member) bool { return isTwin(st, m.Address) })
	all := ask(ctx, everyone, changeTimeout, method, path, body)
	good, failed := parted(all)
	if method == http.MethodDelete && len(good) > 0 {
		// What is to be removed need not be in the memory of each.
		failed = withoutUnknown(failed, all)
	}
	switch {
	case len(good) == 0:
		return first(all)
	case len(failed) > 0:
		done, texts := []string{}, []string{}
		for _, g := range good {
			done = append(done, g.address)
		}
		for _, f := range failed {
			texts = append(texts, f.String())
		}
		return refuse(http.StatusBadGateway, "the store is not known to be the same one for all Caddys, and not all have made the change: done at %s; not at %s", strings.Join(done, ", "), strings.Join(texts, "; "))
	}
	merged, err := merge(good, about)
	if err != nil {
		return 0, nil, err
	}
	return encode(http.StatusOK, merged)
}

// oneOf sends a change to one Caddy after the other, until one answers that can reach the store.
func oneOf(ctx context.Context, members []Member, method, path string, body []byte, merge merger, about asked) (int, []byte, error) {
	var all []answered
	for i := range members {
		r := ask(ctx, members[i:i+1], changeTimeout, method, path, body)[0]
		switch {
		case r.isGood() && len(about.failed) > 0:
			merged, err := merge([]answered{r}, about)
			if err != nil {
				return 0, nil, err
			}
			return encode(r.status, merged)
		case r.err == nil && r.status != http.StatusBadGateway && r.status != http.StatusGatewayTimeout:
			return r.status, r.text, nil
		}
		all = append(all, r)
	}
	return first(all)
}
