package ledger

import "reflect"

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
