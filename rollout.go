package shardlimit

import "cmp"

// Rollout moves a share of a handler's clients to another store, so that it can
// be tried out on some before all use it. A hash of the client key, which is
// the same in every process, decides who is moved: more percent move more
// clients, and none of them back. A zone whose key is the same for all requests
// has one bucket, which is moved as a whole.
//
// All that counts for a client is counted in the store that it is in: of the
// counts in the other one, nothing is taken along. Handlers that have a zone in
// common therefore need the same rollout.
type Rollout struct {
	// The name of the other store, one of those in the `rate_limit` app and not
	// the handler's own. Required.
	Store string `json:"store,omitempty"`

	// How many percent of the clients are counted in the other store, from 0,
	// nobody, to 100, everybody; fractions are allowed. To change it while Caddy
	// runs, replace this value by the admin API; what is loaded next replaces it
	// again. A client that is moved begins with fresh counts in the other store,
	// so around that moment it can get up to twice its limit; one that is moved
	// back finds what is left of its old counts. Default: 0.
	Percent float64 `json:"percent"`
}

// validate tells what is wrong with the rollout of a handler that counts in the
// store of that name, or in one of its own.
func (o *Rollout) validate(own string, ownIsName bool) error {
	switch {
	case o == nil:
		return nil
	case o.Store == "":
		return badOption("rollout", "names no store: add the one to which clients are moved, such as rollout other 10")
	case !isPercent(o.Percent):
		return badOption("rollout", "%s %v: it must be from 0 to 100 percent, such as 12.5", o.Store, o.Percent)
	case ownIsName && cmp.Or(own, defaultStore) == o.Store:
		return badOption("rollout", "%s: that is the handler's own store: name the store to which clients are moved, or remove rollout", o.Store)
	}
	return nil
}
