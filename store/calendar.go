package store

import (
	"errors"
	"path"
	"sync"
	"time"
)

// Calendar makes windows of [FixedWindow] those of a calendar. The zero value makes
// none.
type Calendar struct {
	// Unit is Day, Week, Month or Year, or empty for none.
	Unit CalendarUnit
	// TimeZone is the IANA name of the zone in which windows begin at midnight; empty
	// means UTC.
	TimeZone string
	// SundayFirst makes weeks begin on Sunday, and not on Monday.
	SundayFirst bool
}

// CalendarUnit is how long a window of a calendar is.
type CalendarUnit string

// The units of a calendar.
const (
	Day   CalendarUnit = "day"
	Week  CalendarUnit = "week"
	Month CalendarUnit = "month"
	Year  CalendarUnit = "year"
)

// Length returns the length of the longest unit, not counting changes of the clock:
// of a month 31 days, of a year 366.
func (u CalendarUnit) Length() time.Duration {
	const day = 24 * time.Hour
	return map[CalendarUnit]time.Duration{Day: day, Week: 7 * day, Month: 31 * day, Year: 366 * day}[u]
}

// String returns what the windows are, such as "month in Europe/Berlin".
func (c Calendar) String() string {
	text := string(c.Unit)
	if c.SundayFirst {
		text += " from Sunday"
	}
	if c.TimeZone != "" {
		text += " in " + c.TimeZone
	}
	return text
}

// Window returns a length that no window of the calendar exceeds: clocks are put back
// by three hours at most.
func (c Calendar) Window() time.Duration { return c.Unit.Length() + 3*time.Hour }

// Validate returns an error if there is no such time zone. Local is none, nor are
// localtime and other files of a machine, which begin with a small letter: they are
// not the same on each machine. A zone has one name, because each is kept in memory.
func (c Calendar) Validate() error {
	name := c.TimeZone
	if name == "" {
		return nil
	}
	_, err := time.LoadLocation(name)
	if err != nil || name == "Local" || name[0] < 'A' || name[0] > 'Z' || path.Clean(name) != name {
		return errors.New("there is no such time zone")
	}
	return nil
}

// locations are the time zones in use, by name. Names come from configs, so there are
// few.
var locations sync.Map

func (c Calendar) location() *time.Location {
	if l, ok := locations.Load(c.TimeZone); ok {
		return l.(*time.Location)
	}
	l, err := time.LoadLocation(c.TimeZone)
	if err != nil {
		// Validate has seen it.
		l = time.UTC
	}
	locations.Store(c.TimeZone, l)
	return l
}

// End returns the end of the window of which the instant is part, both in
// microseconds since the epoch.
func (c Calendar) End(instant int64) int64 {
	now := time.UnixMicro(instant).In(c.location())
	year, month, day := now.Date()
	switch c.Unit {
	case Week:
		first := time.Monday
		if c.SundayFirst {
			first = time.Sunday
		}
		day += 7 - int(now.Weekday()-first+7)%7
	case Month:
		month, day = month+1, 1
	case Year:
		year, month, day = year+1, time.January, 1
	default:
		day++
	}
	return beginAfter(instant, year, month, day, now.Location())
}

// beginAfter returns the first instant after another at which a day begins. Where clocks
// are changed at midnight, the day begins with the change, or its midnight comes twice.
func beginAfter(instant int64, year int, month time.Month, day int, in *time.Location) int64 {
	midnight := time.Date(year, month, day, 0, 0, 0, 0, in)
	shown := time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Unix()
	changed, changes := midnight.ZoneBounds()
	_, offset := midnight.Zone()
	// Where a change skips midnight, Date is too early or too late by what it skips.
	switch at := midnight.Unix() + int64(offset); {
	case at < shown:
		return changes.UnixMicro()
	case at > shown:
		return changed.UnixMicro()
	}
	begin := midnight
	if !changed.IsZero() {
		// The midnight before the change, if it came then too.
		_, before := changed.Add(-1).Zone()
		if first := time.Unix(shown-int64(before), 0); first.Before(changed) && first.UnixMicro() > instant {
			begin = first
		}
	}
	if !changes.IsZero() && begin.UnixMicro() <= instant {
		// The one after it.
		_, after := changes.Zone()
		if second := time.Unix(shown-int64(after), 0); !second.Before(changes) {
			begin = second
		}
	}
	return begin.UnixMicro()
}
