package algorithm

import (
	"reflect"
	"slices"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// MulDiv is mulDiv.
func MulDiv(a, b, c int64) (quotient, rest int64) { return mulDiv(a, b, c) }

// Members returns how many events or leases b keeps one by one.
func Members(b Bucket) int64 {
	switch b := b.(type) {
	case *SlidingLog:
		return b.members.since(0)
	case *Concurrency:
		return b.leases.since(0)
	}
	panic("a bucket without members")
}

// Clone returns a bucket of the same content that shares nothing with b.
func Clone(b Bucket) Bucket {
	switch b := b.(type) {
	case *SlidingLog:
		return &SlidingLog{members: slices.Clone(b.members)}
	case *Concurrency:
		return &Concurrency{leases: slices.Clone(b.leases)}
	}
	// The others are numbers, which can be compared; a slice would be shared.
	content := reflect.ValueOf(b).Elem()
	if !content.Comparable() {
		panic("unknown bucket")
	}
	c := reflect.New(content.Type())
	c.Elem().Set(content)
	return c.Interface().(Bucket)
}

// Touch has the effects of a take of r on b, except that it spends nothing.
func Touch(b Bucket, r *store.Request, now int64) {
	b.Open(r, now)
	if b, ok := b.(*GCRA); ok && r.Cost > 0 {
		b.renew(r, now)
	}
}
