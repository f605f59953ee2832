package envoy

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// windows are the windows of the units, which begin for all clients at once. Months have 30 days there, and
// years 365.
var windows = map[string]struct {
	count  int
	suffix string
	length time.Duration
}{
	"SECOND": {1, "s", time.Second}, "MINUTE": {1, "m", time.Minute}, "HOUR": {1, "h", time.Hour},
	"DAY": {1, "d", day}, "WEEK": {7, "d", 7 * day}, "MONTH": {30, "d", 30 * day}, "YEAR": {365, "d", 365 * day},
}

// longest is that of a zone.
const day, longest = 24 * time.Hour, 100 * 365 * day

// limit converts the limit of the descriptor that is the last of some entries. It returns where the
// descriptor leads, which is empty if it has no limit.
func (c *converter) limit(path string, d *descriptor, entries []entry) (leads string, err error) {
	if d.QuotaMode {
		c.differs(path+".quota_mode", "has no counterpart: it is only observed, as in shadow_mode, and answers have no metadata about it")
	}
	isShadow := d.ShadowMode || d.QuotaMode
	of := d.RateLimit
	if of == nil {
		return "", nil
	}
	limitPath := path + ".rate_limit"
	c.unknown(limitPath+".", of.Unknown)
	if !isEmpty(of.Replaces) {
		c.differs(limitPath+".replaces", "has no counterpart: a call has to fit into both limits")
	}
	if !isEmpty(of.Name) {
		c.differs(limitPath+".name", "has no counterpart, because it serves replaces: the zone has its own name")
	}
	if of.Algorithm != nil {
		c.differs(limitPath+".algorithm", "is left out: see algorithm of zones")
	}
	if of.Unlimited {
		return " unlimited", nil
	}
	events, window, err := of.numbers(limitPath)
	switch {
	case err != nil:
		return "", err
	case events == 0 && isShadow:
		c.differs(limitPath+".requests_per_unit", "of 0 in shadow_mode is converted to unlimited, without counts")
		return " unlimited", nil
	case events == 0:
		return " denied", nil
	}
	key, err := sharedKey(entries)
	if err != nil {
		c.differs(path, "is not shared by values: %s", err)
	}
	var options []string
	if key != "" {
		options = append(options, "key "+key)
	}
	options = append(options, "events "+strconv.Itoa(events), "window "+window+" aligned")
	if isShadow {
		options = append(options, "enforce 0")
	}
	name := c.nameOf(entries)
	c.zones = append(c.zones, block("zone "+name, options)...)
	return " zone " + name, nil
}

// isEmpty reports whether a field has no effect there: replaces without limits, or an empty name.
func isEmpty(of any) bool {
	all, isList := of.([]any)
	return of == nil || of == "" || isList && len(all) == 0
}

// numbers returns the events and the window of a limit at a path.
func (of *rateLimit) numbers(path string) (events int, window string, err error) {
	unit, isUnit := windows[strings.ToUpper(of.Unit)]
	if !isUnit {
		return 0, "", fmt.Errorf("%s.unit is %q: it must be second, minute, hour, day, week, month or year", path, of.Unit)
	}
	multiplier := 1
	if of.UnitMultiplier != nil {
		var isNumber bool
		if multiplier, isNumber = of.UnitMultiplier.(int); !isNumber || multiplier < 1 {
			return 0, "", fmt.Errorf("%s.unit_multiplier is no whole number from 1 on", path)
		}
	}
	if most := int(longest / unit.length); multiplier > most {
		return 0, "", fmt.Errorf("%s.unit_multiplier is more than %d: windows have at most 100 years", path, most)
	}
	events, isNumber := of.RequestsPerUnit.(int)
	if of.RequestsPerUnit != nil && !isNumber || events < 0 || events > math.MaxUint32 {
		return 0, "", fmt.Errorf("%s.requests_per_unit is no whole number from 0 to %d", path, uint32(math.MaxUint32))
	}
	return events, strconv.Itoa(multiplier*unit.count) + unit.suffix, nil
}

// sharedKey returns the key of a zone in which some values share their counts, or "". An error says why there is
// none.
func sharedKey(entries []entry) (string, error) {
	shared := map[string]bool{}
	for _, e := range entries[1:] {
		if e.isShared {
			shared[e.key] = true
		}
	}
	if len(shared) == 0 {
		return "", nil
	}
	var texts []string
	for _, e := range entries[1:] {
		switch {
		case e.isShared:
		case shared[e.key]:
			return "", fmt.Errorf("key %q is there twice", e.key)
		case strings.HasSuffix(e.key, `\`):
			return "", fmt.Errorf(`key %q ends with \, which a placeholder cannot`, e.key)
		default:
			texts = append(texts, "{rate_limit_service."+e.key+"}")
		}
	}
	if len(texts) == 0 {
		return "static", nil
	}
	return quoted(strings.Join(texts, " "))
}

// odd are the characters that names of zones cannot have.
var odd = regexp.MustCompile(`[^A-Za-z0-9_.-]+`)

// maxName bounds the names of zones.
const maxName = 60

// nameOf returns a name for the zone of a descriptor that no other has.
func (c *converter) nameOf(entries []entry) string {
	var parts []string
	for _, e := range entries {
		part := e.key
		if e.value != "" {
			part += "_" + strings.TrimSuffix(e.value, "*")
		}
		parts = append(parts, strings.Trim(odd.ReplaceAllString(part, "_"), "_"))
	}
	name := strings.Join(parts, ".")
	name = name[:min(len(name), maxName)]
	unique := name
	for n := 2; c.names[unique]; n++ {
		unique = name + "_" + strconv.Itoa(n)
	}
	c.names[unique] = true
	return unique
}
