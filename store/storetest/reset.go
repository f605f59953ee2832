package storetest

import (
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// testReset empties buckets of every algorithm, and looks at what there is
// before and afterwards, where the store can.
func testReset(f *fixture) {
	resetter, canReset := f.store.(store.Resetter)
	inspector, canInspect := f.store.(store.Inspector)
	if !canReset || !canInspect {
		f.Skip("the store cannot reset and inspect")
	}
	for _, kind := range Limits {
		limit := kind
		limit.Zone, limit.Window = "reset."+f.id, time.Hour
		r := store.Request{Limit: &limit, ClientKey: client, Events: 5}
		other := r
		other.ClientKey = "another"
		spend := func(r store.Request, id int) store.State {
			r.Cost, r.ID = 1, "id"+strconv.Itoa(id)
			return f.answer(f.store.Take(f.Context(), []store.Request{r}), 1)[0]
		}
		look := func(what string, r store.Request, used int64) {
			f.Helper()
			found := inspector.Inspect(f.Context(), r)
			if len(found.Copies) == 0 || found.Copies[0].Role != store.RolePrimary {
				f.Fatalf("%s, %s: no primary in %+v", limit.Algorithm, what, found)
			}
			st := found.Copies[0].State
			if st.Err != nil || found.Copies[0].Exists != (used > 0) || st.Used != used || st.Limit != 5 || st.Remaining != 5-used || st.Replica {
				f.Errorf("%s, %s: %+v, want %d used", limit.Algorithm, what, found.Copies[0], used)
			}
		}
		look("before anything was spent", r, 0)
		for round := range 2 {
			for id := range 5 {
				if st := spend(r, id); !st.Allowed {
					f.Errorf("%s, round %d: take %d is refused: %+v", limit.Algorithm, round, id, st)
				}
			}
			if st := spend(r, 5); st.Allowed {
				f.Errorf("%s, round %d: six of five are taken", limit.Algorithm, round)
			}
			spend(other, round)
			look("full", r, 5)
			if err := resetter.Reset(f.Context(), r); err != nil {
				f.Fatalf("%s: reset: %v", limit.Algorithm, err)
			}
			look("after the reset", r, 0)
			look("another client's", other, int64(round+1))
		}
		// What there is not can be reset as well.
		if err := resetter.Reset(f.Context(), r); err != nil {
			f.Errorf("%s: reset again: %v", limit.Algorithm, err)
		}
	}
}
