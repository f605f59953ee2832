package ledger

import (
	"reflect"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// look returns the bucket's entry, locked, or nil.
func (l *Ledger) look(r *store.Request) *entry {
	e, p, _ := l.lock(r)
	if e == nil {
		p.mu.Unlock()
	}
	return e
}

// inside returns a field of what the core knows, for tests of what no caller needs.
func inside(e *entry, path ...string) reflect.Value {
	v := reflect.ValueOf(&e.Bucket).Elem()
	for _, name := range path {
		if v.Kind() == reflect.Pointer {
			v = v.Elem()
		}
		v = v.FieldByName(name)
	}
	return v
}
