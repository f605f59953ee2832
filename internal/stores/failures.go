package stores

import (
	"sync"
	"time"
)

// failures are the last failures of shards, of type *failure, by failureOf. They outlive configs, as metrics do.
var failures sync.Map

// failureOf is what has failed at a shard: charges and refunds that were given up if isLost is set, or else
// checks and takes.
type failureOf struct {
	store, shard string
	isLost       bool
}

type failure struct {
	err error
	at  time.Time
}

func (of failureOf) note(now time.Time, err error) { failures.Store(of, &failure{err, now}) }

func (of failureOf) since(at time.Time) error {
	if last, ok := failures.Load(of); ok && !last.(*failure).at.Before(at) {
		return last.(*failure).err
	}
	return nil
}

// Unanswered returns the last error of a shard for which on_error has decided since an instant, or nil.
func (o *Opened) Unanswered(shard string, since time.Time) error {
	return o.failure(failureOf{o.Name, shard, false}, since)
}

// Lost returns the error of the last charge or refund that a shard was not sent and will not be, since an
// instant, or nil.
func (o *Opened) Lost(shard string, since time.Time) error {
	return o.failure(failureOf{o.Name, shard, true}, since)
}

// failure leaves out those of another config that had a store and a shard of these names.
func (o *Opened) failure(of failureOf, since time.Time) error {
	if since.Before(o.at) {
		since = o.at
	}
	return of.since(since)
}
