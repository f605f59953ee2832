package envoy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v2"
)

// asked is a descriptor that a config of Envoy sends: its entries, of which those without a value may have any,
// and whether it is sent at the end of a stream, as a report. file has it.
type asked struct {
	entries  []entry
	isReport bool
	file     string
}

// keyed are the actions that make an entry of any value, and its key, if it is always the same.
var keyed = map[string]string{
	"request_headers": "", "query_parameters": "", "metadata": "", "remote_address": "remote_address",
	"masked_remote_address": "masked_remote_address", "source_cluster": "source_cluster", "destination_cluster": "destination_cluster",
}

// matching are the actions that make an entry of one value, and its key by default.
var matching = map[string]string{"generic_key": "generic_key", "header_value_match": "header_match", "query_parameter_value_match": "query_match"}

// envoyConfig reads the descriptors that a config of Envoy sends, in YAML or as /config_dump shows it. It
// reports whether the text is one: it has a list of rate_limits with actions.
func (c *converter) envoyConfig(f File) (is bool) {
	var root any
	if yaml.Unmarshal(f.Text, &root) != nil {
		return false
	}
	walk(root, "", func(path string, limit map[any]any) {
		is = true
		a := asked{file: f.Name, isReport: field(limit, "apply_on_stream_done") == true}
		for i, one := range list(field(limit, "actions")) {
			e, isKnown := entryOf(one)
			if !isKnown {
				c.fileName = f.Name
				c.differs(fmt.Sprintf("%s.actions[%d]", path, i), "is not understood: its descriptor is passed over; if Envoy reports by it with apply_on_stream_done, write postpaid or always yourself")
				return
			}
			a.entries = append(a.entries, e)
		}
		c.asked = append(c.asked, a)
	})
	return is
}

// walk calls f for each of the rate_limits with actions below a value at a path.
func walk(of any, path string, f func(path string, limit map[any]any)) {
	for i, below := range list(of) {
		walk(below, fmt.Sprintf("%s[%d]", path, i), f)
	}
	fields, _ := of.(map[any]any)
	for _, name := range sortedNames(fields) {
		at := strings.TrimPrefix(path+"."+name, ".")
		if snake(name) != "rate_limits" {
			walk(fields[name], at, f)
			continue
		}
		for i, one := range list(fields[name]) {
			if limit, isMap := one.(map[any]any); isMap && field(limit, "actions") != nil {
				f(fmt.Sprintf("%s[%d]", at, i), limit)
			}
		}
	}
}

// entryOf returns the entry that an action makes, and whether it is known.
func entryOf(action any) (entry, bool) {
	fields, _ := action.(map[any]any)
	for _, name := range sortedNames(fields) {
		of, _ := fields[name].(map[any]any)
		key, _ := field(of, "descriptor_key").(string)
		if byDefault, is := keyed[snake(name)]; is {
			e := entry{key: cmp.Or(byDefault, key)}
			return e, e.key != ""
		}
		if byDefault, is := matching[snake(name)]; is {
			e := entry{key: cmp.Or(key, byDefault), value: fmt.Sprint(field(of, "descriptor_value"))}
			if strings.Contains(e.value, "%") {
				// Envoy puts something in.
				e.value = ""
			}
			return e, true
		}
	}
	return entry{}, false
}

// field returns the field of a message, whose name may be in the form of JSON: applyOnStreamDone.
func field(of map[any]any, name string) any {
	for k, v := range of {
		if text, is := k.(string); is && snake(text) == name {
			return v
		}
	}
	return nil
}

func snake(name string) string {
	var b strings.Builder
	for _, r := range name {
		if r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
			r += 'a' - 'A'
		}
		b.WriteRune(r)
	}
	return b.String()
}

func list(of any) []any {
	all, _ := of.([]any)
	return all
}

func sortedNames(of map[any]any) (names []string) {
	for k := range of {
		if name, is := k.(string); is {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// reach returns the descriptors whose next entry leads to all[i], with their remaining entries.
func reach(all []descriptor, i int, before []asked) (left []asked) {
	for _, a := range before {
		if len(a.entries) > 0 && leadsTo(all, i, a.entries[0]) {
			a.entries = a.entries[1:]
			left = append(left, a)
		}
	}
	return left
}

// leadsTo reports whether an entry leads to all[i]: the exact value counts first, then the longest prefix, then
// any. One without a value may lead to each of its key.
func leadsTo(all []descriptor, i int, e entry) bool {
	if all[i].Key != e.key || e.value == "" {
		return all[i].Key == e.key
	}
	best := func(d *descriptor) int {
		text, isPrefix := d.prefix()
		switch {
		case d.Key != e.key:
			return -1
		case d.Value == e.value:
			return len(e.value) + 2
		case isPrefix && strings.HasPrefix(e.value, text):
			return len(text) + 1
		case d.Value == "":
			return 0
		}
		return -1
	}
	mine := best(&all[i])
	return mine >= 0 && !slices.ContainsFunc(all, func(d descriptor) bool { return best(&d) > mine })
}

// streamDone returns the word behind the zone of the descriptor at a path, which some of Envoy's end at.
func (c *converter) streamDone(path string, reached []asked) string {
	var looks, reports string
	for _, a := range reached {
		switch {
		case len(a.entries) > 0:
		case a.isReport:
			reports = cmp.Or(reports, a.file)
		default:
			looks = cmp.Or(looks, a.file)
		}
	}
	switch {
	case reports == "":
		return ""
	case looks == "":
		c.differs(path, "is always here: %s reports by it with apply_on_stream_done, and never asks", reports)
		return " always"
	default:
		c.differs(path, "is postpaid here: %s asks by it, and reports by it with apply_on_stream_done; a call with 0 hits is refused at exactly the limit, and passes there", reports)
		return " postpaid"
	}
}
