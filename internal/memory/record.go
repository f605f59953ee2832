package memory

import (
	"container/heap"
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// records are those of all views. The zero value is empty.
type records struct {
	mu    sync.Mutex
	all   map[string]*record
	queue recordQueue
	bytes int
	// shares are the bytes of records by the first lines of their IDs.
	shares  map[string]int
	version int64
}

// record is one of them, at a place of the queue.
type record struct {
	store.Record
	// due is in microseconds since the epoch.
	due   int64
	place int
}

// recordBytes is what a record takes beside ID and value.
const recordBytes = 150

func (r *record) size() int { return len(r.ID) + len(r.Value) + recordBytes }

// Record implements [store.Records].
func (s *Store) Record(_ context.Context, id string) (store.Record, error) {
	kept := &s.buckets.records
	kept.mu.Lock()
	defer kept.mu.Unlock()
	return kept.at(id, s.now().UnixMicro()), nil
}

// at returns what there is under an ID. mu is held.
func (k *records) at(id string, now int64) store.Record {
	r := k.all[id]
	if r == nil {
		return store.Record{ID: id, Now: now}
	}
	there := r.Record
	there.Left, there.Now = time.Duration(r.due-now)*time.Microsecond, now
	return there
}

// PutRecord implements [store.Records].
func (s *Store) PutRecord(_ context.Context, r store.Record) (store.Record, error) {
	if err := store.CheckRecord(&r); err != nil {
		return store.Record{}, err
	}
	kept := &s.buckets.records
	kept.mu.Lock()
	defer kept.mu.Unlock()
	now := s.now().UnixMicro()
	if there := kept.at(r.ID, now); there.Version != r.Version {
		return there, store.NotExecuted(store.ErrChanged)
	}
	next := &record{Record: store.Record{ID: r.ID, Value: r.Value}, due: now + r.Left.Microseconds()}
	before := kept.all[r.ID]
	if before == nil && r.Value != "" && !kept.hasRoom(next) {
		return store.Record{}, store.ErrRecordsFull
	}
	if before != nil {
		heap.Remove(&kept.queue, before.place)
		delete(kept.all, r.ID)
		kept.count(r.ID, -before.size())
	}
	if r.Value != "" {
		if kept.all == nil {
			kept.all = map[string]*record{}
		}
		kept.version++
		next.Version = strconv.FormatInt(kept.version, 10)
		kept.all[r.ID] = next
		heap.Push(&kept.queue, next)
		kept.count(r.ID, next.size())
	}
	return kept.at(r.ID, now), nil
}

// hasRoom reports whether there is room for a new record, in all and of its share. mu is held.
func (k *records) hasRoom(r *record) bool {
	left := store.MaxRecords - k.bytes - r.size()
	share, _, is := strings.Cut(r.ID, "\n")
	return left >= 0 && (!is || k.shares[share]+r.size() <= store.MaxShare*left)
}

// count adds to the bytes of the records. mu is held.
func (k *records) count(id string, bytes int) {
	k.bytes += bytes
	share, _, is := strings.Cut(id, "\n")
	if !is {
		return
	}
	if k.shares == nil {
		k.shares = map[string]int{}
	}
	if k.shares[share] += bytes; k.shares[share] == 0 {
		delete(k.shares, share)
	}
}

// DueRecords implements [store.Records].
func (s *Store) DueRecords(_ context.Context, most int) (due []store.Record, err error) {
	kept := &s.buckets.records
	kept.mu.Lock()
	defer kept.mu.Unlock()
	now := s.now().UnixMicro()
	for len(due) < most && len(kept.queue) > 0 && kept.queue[0].due <= now {
		r := kept.queue[0]
		due = append(due, kept.at(r.ID, now))
		r.due = now + store.RecordPause.Microseconds()
		heap.Fix(&kept.queue, 0)
	}
	return due, nil
}

// recordQueue is a heap of records by when they are due.
type recordQueue []*record

func (q recordQueue) Len() int           { return len(q) }
func (q recordQueue) Less(i, j int) bool { return q[i].due < q[j].due }
func (q recordQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

// Push implements [heap.Interface].
func (q *recordQueue) Push(x any) {
	r := x.(*record)
	r.place = len(*q)
	*q = append(*q, r)
}

// Pop implements [heap.Interface].
func (q *recordQueue) Pop() any {
	last := len(*q) - 1
	r := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return r
}
