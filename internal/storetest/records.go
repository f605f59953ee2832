package storetest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// RunRecords tests the contract of [store.Records]. A store whose clock is real may ignore clock.
func RunRecords(t *testing.T, open func(t *testing.T, clock *Clock) store.Records) {
	for name, test := range map[string]func(*records){
		"Versions": (*records).testVersions, "Contents": (*records).testContents, "Due": (*records).testDue,
		"Portions": (*records).testPortions, "Bounds": (*records).testBounds, "Writers": (*records).testWriters,
	} {
		t.Run(name, func(t *testing.T) {
			clock := NewClock(start())
			test(&records{T: t, clock: clock, Records: open(t, clock), prefix: rand.Text()[:10] + " "})
		})
	}
}

// records is what one test works with. Its IDs have a prefix, because others may use the store.
type records struct {
	*testing.T
	store.Records
	clock  *Clock
	prefix string
}

func (f *records) read(id string) store.Record {
	f.Helper()
	r, err := f.Record(f.Context(), f.prefix+id)
	if err != nil {
		f.Fatalf("read %q: %v", id, err)
	}
	return r
}

// put puts a value in place of a version, due in an hour.
func (f *records) put(id, version, value string) (store.Record, error) {
	return f.PutRecord(f.Context(), store.Record{ID: f.prefix + id, Version: version, Value: value, Left: time.Hour})
}

func (f *records) mustPut(id, version, value string) store.Record {
	f.Helper()
	r, err := f.put(id, version, value)
	if err != nil || r.Value != value || r.ID != f.prefix+id {
		f.Fatalf("put %q: %+v, %v", id, r, err)
	}
	return r
}

// refused requires that a put changes nothing, and says what is there.
func (f *records) refused(what, id, version, value, there string) {
	f.Helper()
	r, err := f.put(id, version, value)
	if !errors.Is(err, store.ErrChanged) || !errors.Is(err, store.ErrNotExecuted) || r.Value != there || r.Version != f.read(id).Version || f.read(id).Value != there {
		f.Errorf("%s: %+v, %v", what, r, err)
	}
}

func (f *records) testVersions() {
	if r := f.read("a"); r.Value != "" || r.Version != "" || r.ID != f.prefix+"a" {
		f.Errorf("nothing is %+v", r)
	}
	f.refused("replace nothing", "a", "1", "x", "")
	one := f.mustPut("a", "", "one")
	if r := f.read("a"); r.Value != "one" || r.Version == "" || r.Version != one.Version || r.Left <= 0 || r.Left > time.Hour || r.Now < start().Add(-time.Hour).UnixMicro() {
		f.Errorf("one is %+v", r)
	}
	f.refused("a second one", "a", "", "x", "one")
	two := f.mustPut("a", one.Version, "two")
	f.refused("an old version", "a", one.Version, "x", "two")
	f.refused("removal of an old version", "a", one.Version, "", "two")
	if r := f.mustPut("a", two.Version, ""); r.Version != "" {
		f.Errorf("removed is %+v", r)
	}
	f.refused("replace what was removed", "a", two.Version, "x", "")
	f.mustPut("a", "", "three")
	f.mustPut("b", "", "three")
}

func (f *records) testContents() {
	for i, text := range []string{"x", " ", "a b\n7 1 1 c", "\x00\xff\xfe", strings.Repeat("long", 300), "{}:#$", "line\nline\nline"} {
		id := strconv.Itoa(i) + text
		r := f.mustPut(id, "", text)
		if got := f.read(id); got.Value != text || got.Version != r.Version {
			f.Errorf("%q is %+v", text, got)
		}
		f.mustPut(id, r.Version, "")
	}
	large := strings.Repeat("x", store.MaxRecord)
	f.mustPut("large", f.mustPut("large", "", large).Version, "")
}

// awaitDue moves the clock until all these are due, and returns them.
func (f *records) awaitDue(most int, ids ...string) (found []store.Record) {
	f.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		due, err := f.DueRecords(f.Context(), most)
		if err != nil {
			f.Fatal(err)
		}
		for _, r := range due {
			// The ID may be a kept form, so the value says which it is.
			if slices.Contains(ids, r.Value) {
				found = append(found, r)
			}
		}
		if len(found) >= len(ids) {
			return found
		}
		if time.Now().After(deadline) {
			f.Fatalf("due are %+v of %q", found, ids)
		}
		f.clock.Advance(10 * time.Millisecond)
		// A store with a real clock shows due records later.
		time.Sleep(time.Millisecond)
	}
}

func (f *records) testDue() {
	ctx := f.Context()
	put := func(id string, left time.Duration, version string) store.Record {
		f.Helper()
		r, err := f.PutRecord(ctx, store.Record{ID: f.prefix + id, Value: f.prefix + id, Version: version, Left: left})
		if err != nil {
			f.Fatal(err)
		}
		return r
	}
	put("later", time.Hour, "")
	put("soon", 20*time.Millisecond, "")
	put("now", 0, "")
	later := put("put off", 0, "")
	if later, err := f.PutRecord(ctx, store.Record{ID: later.ID, Value: "put off", Version: later.Version, Left: time.Hour}); err != nil {
		f.Fatal(later, err)
	}
	began := time.Now()
	found := f.awaitDue(100, f.prefix+"now", f.prefix+"soon")
	if values := []string{found[0].Value, found[len(found)-1].Value}; len(found) != 2 || !slices.Contains(values, f.prefix+"now") || !slices.Contains(values, f.prefix+"soon") {
		f.Errorf("due are %+v", found)
	}
	again, err := f.DueRecords(ctx, 100)
	// Where the machine stands still, the pause of a store whose clock is real may be over.
	isPaused := time.Since(began) < store.RecordPause
	if err != nil || isPaused && slices.ContainsFunc(again, func(r store.Record) bool { return strings.HasPrefix(r.Value, f.prefix) }) {
		f.Errorf("due again are %+v, %v", again, err)
	}
	// Whoever was told of one deals with it where it was found.
	for _, r := range found {
		r.Left, r.Value = time.Hour, "dealt with"
		other := r
		other.Version = "x"
		if is, err := f.PutRecord(ctx, other); !errors.Is(err, store.ErrChanged) || is.Version != r.Version {
			f.Errorf("another version of a due record: %+v, %v", is, err)
		}
		if _, err := f.PutRecord(ctx, r); err != nil {
			f.Error(err)
		}
	}
	if r := f.read("soon"); r.Value != "dealt with" {
		f.Errorf("it is %+v", r)
	}
}

func (f *records) testPortions() {
	var ids []string
	for i := range 7 {
		ids = append(ids, f.prefix+strconv.Itoa(i))
		if _, err := f.PutRecord(f.Context(), store.Record{ID: ids[i], Value: ids[i]}); err != nil {
			f.Fatal(err)
		}
	}
	seen := map[string]bool{}
	for _, r := range f.awaitDue(2, ids...) {
		seen[r.Value] = true
	}
	if len(seen) != len(ids) {
		f.Errorf("due are %v", seen)
	}
}

func (f *records) testBounds() {
	for what, r := range map[string]store.Record{
		"no ID":        {Value: "x"},
		"a long value": {ID: "a", Value: strings.Repeat("x", store.MaxRecord+1)},
		"a long time":  {ID: "a", Value: "x", Left: store.MaxRecordLeft + 1},
		"no time":      {ID: "a", Value: "x", Left: -1},
	} {
		if _, err := f.PutRecord(f.Context(), r); !errors.Is(err, store.ErrFinal) || errors.Is(err, store.ErrRecordSize) != (what == "a long value") {
			f.Errorf("%s: %v", what, err)
		}
	}
	f.mustPut("a", "", "x")
}

// testWriters expects that of writers of one version one succeeds.
func (f *records) testWriters() {
	const steps = 2
	atOnce(func(g int) {
		for n := range steps {
			for {
				r, err := f.Record(context.Background(), f.prefix+"shared")
				if err != nil {
					f.Error(err)
					return
				}
				_, err = f.put("shared", r.Version, r.Value+fmt.Sprintf("%d.%d ", g, n))
				if err == nil {
					break
				}
				if !errors.Is(err, store.ErrChanged) {
					f.Error(err)
					return
				}
			}
		}
	})
	if n := len(strings.Fields(f.read("shared").Value)); n != goroutines*steps {
		f.Errorf("%d writes are there, want %d", n, goroutines*steps)
	}
}
