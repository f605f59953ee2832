package store_test

import (
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// calendarZones change their clocks at midnight (Beirut, Havana, Asuncion, Sao Paulo) or
// across it (St. John's), have midnight twice (Amman), change by half an hour (Lord Howe),
// by two (Troll) or three (Casey), skip a day (Apia), or have quarters of an hour
// (Kathmandu).
var calendarZones = []string{
	"", "Europe/Berlin", "America/New_York", "Asia/Beirut", "America/Havana", "America/Asuncion",
	"America/Sao_Paulo", "Asia/Amman", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kathmandu", "Africa/Cairo", "America/St_Johns",
	"Antarctica/Troll", "Antarctica/Casey",
}

// unitOf names the window of an instant by the standard library's calendar.
func unitOf(c store.Calendar, at time.Time) time.Time {
	year, month, day := at.Date()
	switch c.Unit {
	case store.Week:
		back := int(at.Weekday()+6) % 7
		if c.SundayFirst {
			back = int(at.Weekday())
		}
		day -= back
	case store.Month:
		day = 1
	case store.Year:
		month, day = time.January, 1
	}
	return time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
}

// TestCalendarWindows follows the windows of a century: each ends at the first instant
// whose date is in another one.
func TestCalendarWindows(t *testing.T) {
	for _, zone := range calendarZones {
		in, err := time.LoadLocation(zone)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []store.Calendar{
			{Unit: store.Day}, {Unit: store.Week}, {Unit: store.Week, SundayFirst: true}, {Unit: store.Month}, {Unit: store.Year},
		} {
			c.TimeZone = zone
			if err := c.Validate(); err != nil {
				t.Fatal(err)
			}
			at := time.Date(1990, time.January, 1, 12, 0, 0, 0, in)
			for at.Year() < 2090 {
				end := time.UnixMicro(c.End(at.UnixMicro())).In(in)
				before := unitOf(c, end.Add(-time.Microsecond))
				if after := unitOf(c, end); !after.After(before) {
					t.Fatalf("%v: the window of %v ends at %v, before and after which is the same %s", c, at, end, c.Unit)
				}
				if was := unitOf(c, at); !before.Equal(was) {
					t.Fatalf("%v: the window of %v ends at %v, and so has others in it", c, at, end)
				}
				if length := end.Sub(at); length > c.Window() {
					t.Fatalf("%v: the window of %v is %v long, more than %v", c, at, length, c.Window())
				}
				at = end
			}
		}
	}
}

// TestCalendarWindowOfEachInstant asks for the ends of windows within the days in which
// clocks are changed.
func TestCalendarWindowOfEachInstant(t *testing.T) {
	step := 13*time.Minute/time.Duration(sweep.Size(1, 27)) + time.Second
	for _, zone := range calendarZones {
		in, err := time.LoadLocation(zone)
		if err != nil {
			t.Fatal(err)
		}
		c := store.Calendar{Unit: store.Day, TimeZone: zone}
		at := time.Date(2000, time.January, 1, 0, 0, 0, 0, in)
		for range 60 {
			_, next := at.ZoneBounds()
			if next.IsZero() {
				break
			}
			for from := next.Add(-26 * time.Hour); from.Before(next.Add(26 * time.Hour)); from = from.Add(step) {
				end := time.UnixMicro(c.End(from.UnixMicro())).In(in)
				if !end.After(from) || end.Sub(from) > c.Window() {
					t.Fatalf("%s: the window of %v ends at %v", zone, from, end)
				}
				if before, after := unitOf(c, end.Add(-time.Microsecond)), unitOf(c, end); !before.Equal(unitOf(c, from)) || !after.After(before) {
					t.Fatalf("%s: the window of %v ends at %v, in the middle of a day", zone, from, end)
				}
			}
			at = next
		}
	}
}

func TestUnknownTimeZone(t *testing.T) {
	for _, name := range []string{"Europe/Nowhere", "Local", "localtime", "posix/UTC", "../zone"} {
		if err := (store.Calendar{Unit: store.Day, TimeZone: name}).Validate(); err == nil {
			t.Errorf("%s is a time zone", name)
		}
	}
}
