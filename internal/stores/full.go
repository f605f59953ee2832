package stores

import (
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// fullBuckets remembers, of a bounded number of buckets, what they refused and
// until when they will. Where a request takes from several buckets, those that
// will refuse it are asked first, so that it touches no other if they do.
type fullBuckets struct {
	refusals *otter.Cache[bucketID, refusedTake]
}

type bucketID struct{ zone, clientKey string }

// refusedTake stands for all takes of as much or more.
type refusedTake struct {
	until          time.Time
	cost, reserved int64
}

// maxFullBuckets bounds the memory: to forget one costs a take that is
// refunded.
const maxFullBuckets = 100_000

func newFullBuckets() *fullBuckets {
	return &fullBuckets{otter.Must(&otter.Options[bucketID, refusedTake]{MaximumSize: maxFullBuckets})}
}

func idOf(req *store.Request) bucketID { return bucketID{req.Limit.Zone, req.ClientKey} }

// Has tells whether the request is known to be refused.
func (f *fullBuckets) Has(req *store.Request, now time.Time) bool {
	refused, ok := f.refusals.GetIfPresent(idOf(req))
	return ok && now.Before(refused.until) && req.Cost >= refused.cost && req.Reserved >= refused.reserved
}

// Note takes in a refusal.
func (f *fullBuckets) Note(req *store.Request, st *store.State, now time.Time) {
	if st.RetryAfter != store.Never {
		f.refusals.Set(idOf(req), refusedTake{now.Add(st.RetryAfter), req.Cost, req.Reserved})
	}
}
