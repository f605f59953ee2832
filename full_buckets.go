package shardlimit

import (
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// fullBuckets remembers, of a bounded number of buckets, until when they refuse
// whatever is asked of them. Where a request takes from several buckets, those
// are asked first, so that it touches no other if they refuse it again.
type fullBuckets struct {
	until *otter.Cache[bucketID, time.Time]
}

type bucketID struct{ zone, clientKey string }

// maxFullBuckets bounds the memory: to forget one costs a take that is
// refunded.
const maxFullBuckets = 100_000

func newFullBuckets() *fullBuckets {
	return &fullBuckets{otter.Must(&otter.Options[bucketID, time.Time]{MaximumSize: maxFullBuckets})}
}

func idOf(req *store.Request) bucketID { return bucketID{req.Limit.Zone, req.ClientKey} }

// has tells whether the request's bucket is known to be full.
func (f *fullBuckets) has(req *store.Request, now time.Time) bool {
	until, ok := f.until.GetIfPresent(idOf(req))
	return ok && now.Before(until)
}

// note takes in a refusal.
func (f *fullBuckets) note(req *store.Request, st *store.State, now time.Time) {
	if st.RetryAfter != store.Never {
		f.until.Set(idOf(req), now.Add(st.RetryAfter))
	}
}
