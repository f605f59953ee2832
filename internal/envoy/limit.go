package envoy

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// windows are the windows of the units, which begin for all clients at once. Months have 30 days there, and
// years 365.
var windows = map[string]struct {
	length int
	suffix string
}{
	"SECOND": {1, "s"}, "MINUTE": {1, "m"}, "HOUR": {1, "h"}, "DAY": {1, "d"}, "WEEK": {7, "d"}, "MONTH": {30, "d"}, "YEAR": {365, "d"},
}

// limit converts the limit of the descriptor that ends with the last of some entries. It returns where the
// descriptor leads, which is empty if it has no limit.
func (c *converter) limit(path string, fields map[string]any, entries []entry) (leads string, err error) {
	raw, hasLimit := fields["rate_limit"]
	isShadow := fields["shadow_mode"] == true
	if fields["quota_mode"] == true {
		c.differs(path+".quota_mode", "has no counterpart: it is only observed, as in shadow_mode, and answers have no metadata about it")
		isShadow = true
	}
	if !hasLimit || raw == nil {
		return "", nil
	}
	of, ok := raw.(map[string]any)
	if path += ".rate_limit"; !ok {
		return "", fmt.Errorf("%s is no map", path)
	}
	c.unknown(path+".", of, "unit", "requests_per_unit", "unlimited", "name", "replaces", "unit_multiplier", "algorithm")
	if _, has := of["replaces"]; has {
		c.differs(path+".replaces", "has no counterpart: a call has to fit into both limits")
	}
	if _, has := of["name"]; has {
		c.differs(path+".name", "has no counterpart, because it serves replaces: the zone has its own name")
	}
	if _, has := of["algorithm"]; has {
		c.differs(path+".algorithm", "is left out: see algorithm of zones")
	}
	if of["unlimited"] == true {
		return " unlimited", nil
	}
	unit, _ := of["unit"].(string)
	window, isUnit := windows[strings.ToUpper(unit)]
	if !isUnit {
		return "", fmt.Errorf("%s.unit is %q: it must be second, minute, hour, day, week, month or year", path, unit)
	}
	multiplier := 1
	if m, has := of["unit_multiplier"]; has {
		if multiplier, ok = m.(int); !ok || multiplier < 1 {
			return "", fmt.Errorf("%s.unit_multiplier is no whole number from 1 on", path)
		}
	}
	events, isNumber := of["requests_per_unit"].(int)
	switch {
	case of["requests_per_unit"] == nil:
		events = 0
	case !isNumber || events < 0:
		return "", fmt.Errorf("%s.requests_per_unit is no whole number from 0 on", path)
	}
	if events == 0 {
		if isShadow {
			c.differs(path+".requests_per_unit", "of 0 in shadow_mode is converted to unlimited, without counts")
			return " unlimited", nil
		}
		return " denied", nil
	}
	name := c.nameOf(entries)
	c.zones = append(c.zones, "zone "+name+" {")
	if key := sharedKey(entries); key != "" {
		c.zones = append(c.zones, "\tkey "+key)
	}
	c.zones = append(c.zones, "\tevents "+strconv.Itoa(events), "\twindow "+strconv.Itoa(window.length*multiplier)+window.suffix+" aligned")
	if isShadow {
		c.zones = append(c.zones, "\tenforce 0")
	}
	c.zones = append(c.zones, "}")
	return " zone " + name, nil
}

// sharedKey returns the key of a zone in which some values share their counts, or "".
func sharedKey(entries []entry) string {
	isShared := false
	var texts []string
	for _, e := range entries[1:] {
		if e.isShared {
			isShared = true
		} else {
			texts = append(texts, "{rate_limit_service."+e.key+"}")
		}
	}
	switch {
	case !isShared:
		return ""
	case len(texts) == 0:
		return "static"
	}
	return "`" + strings.Join(texts, " ") + "`"
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
