// Package envoy converts configs of envoyproxy/ratelimit to Caddyfiles with rate_limit_service. What has no
// counterpart there is named with its path.
package envoy

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// File is a config of envoyproxy/ratelimit, in YAML, with one domain, or one of Envoy, which says what Envoy asks.
type File struct {
	Name string
	Text []byte
}

// Converted is what some files are here.
type Converted struct {
	Caddyfile string `json:"caddyfile"`
	// Differences are what works in another way, or is left out: file, path and words.
	Differences []string `json:"differences"`
}

// Convert converts files to one Caddyfile. An error says which file is no such config.
func Convert(files ...File) (Converted, error) {
	c := converter{names: map[string]bool{}, domains: map[string]bool{}, differences: []string{}}
	limits := slices.DeleteFunc(slices.Clone(files), c.envoyConfig)
	for _, f := range limits {
		if err := c.file(f); err != nil {
			return Converted{}, fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	if len(limits) == 0 {
		return Converted{}, errors.New("there is no config of envoyproxy/ratelimit: name one beside those of Envoy")
	}
	if len(limits) == len(files) && len(c.zones) > 0 {
		c.differences = append(c.differences, "no config of Envoy was given: where it reports costs with apply_on_stream_done, write postpaid behind the zone, or always if it only reports by that descriptor; with Envoy's config as a further file, convert does so")
	}
	var names []string
	for _, f := range files {
		names = append(names, f.Name)
	}
	return Converted{c.caddyfile(names), c.differences}, nil
}

// converter is what is converted so far: the lines of the domains, and those of the zones.
type converter struct {
	fileName       string
	tree, zones    []string
	names, domains map[string]bool
	differences    []string
	// asked is what Envoy asks, by the configs of it.
	asked []asked
}

// differs notes a difference at a path.
func (c *converter) differs(path, format string, args ...any) {
	c.differences = append(c.differences, c.fileName+": "+path+": "+fmt.Sprintf(format, args...))
}

func (c *converter) file(f File) error {
	c.fileName = f.Name
	root, err := read(f.Text)
	switch {
	case err != nil:
		return err
	case root.Domain == "":
		has := slices.Sorted(maps.Keys(root.Unknown))
		if len(root.Descriptors) > 0 {
			has = append(has, "descriptors")
		}
		return fmt.Errorf("has no domain, so it is no config of limits; it has %v", has)
	case c.domains[root.Domain]:
		return fmt.Errorf("domain %s is in another file as well: put the descriptors of both into one", root.Domain)
	}
	c.domains[root.Domain] = true
	c.unknown("", root.Unknown)
	word, err := written(root.Domain)
	if err != nil {
		return fmt.Errorf("domain: %w", err)
	}
	lines, err := c.descriptors("", root.Descriptors, []entry{{key: root.Domain}}, c.asked)
	c.tree = append(c.tree, block("domain "+word, lines)...)
	return err
}

// block returns a line with a block below it.
func block(head string, below []string) []string {
	lines := []string{head + " {"}
	for _, line := range below {
		lines = append(lines, "\t"+line)
	}
	return append(lines, "}")
}

// entry is an entry of a descriptor, of which isShared is set if its values share their counts. The first of
// a path is the domain.
type entry struct {
	key, value string
	isShared   bool
}

// descriptors converts the list of descriptors at a path, which follow some entries. of is what is left of the
// descriptors of Envoy that get there.
func (c *converter) descriptors(path string, all []descriptor, before []entry, of []asked) (lines []string, err error) {
	for i := range all {
		d := &all[i]
		path, list := fmt.Sprintf("%sdescriptors[%d]", path, i), path
		if err := d.check(path); err != nil {
			return nil, err
		}
		if j := taker(all, i); j >= 0 {
			c.differs(path, "is left out: there, %sdescriptors[%d] takes all its values", list, j)
			continue
		}
		if key := beginning(all, i); key != "" {
			c.differs(path, "is apart from key %s here: there, entries are compared as key_value, so one may match descriptors of the other", key)
		}
		e := entry{d.Key, d.Value, d.ShareThreshold}
		if e.value == "*" {
			e.value = ""
		}
		more, err := c.descriptor(path, d, append(before[:len(before):len(before)], e), reach(all, i, of))
		if err != nil {
			return nil, err
		}
		lines = append(lines, more...)
	}
	return lines, nil
}

// descriptor converts the descriptor at a path, which is the last of some entries.
func (c *converter) descriptor(path string, d *descriptor, entries []entry, reached []asked) (lines []string, err error) {
	c.unknown(path+".", d.Unknown)
	const noMetric = "has no counterpart: metrics are by zone; caddy rate-limit top and near show clients"
	if d.DetailedMetric {
		c.differs(path+".detailed_metric", noMetric)
	}
	if d.ValueToMetric {
		c.differs(path+".value_to_metric", noMetric)
	}
	if d.Value == "" && strings.HasSuffix(d.Key, "*") {
		c.differs(path, "is left out: there, a key that ends with * takes all entries that begin so")
		return nil, nil
	}
	last := entries[len(entries)-1]
	line := "descriptor"
	for _, text := range []string{last.key, last.value} {
		if text == "" {
			continue
		}
		word, err := written(text)
		if err != nil {
			c.differs(path, "is left out: %s; write it into the config in JSON", err)
			return nil, nil
		}
		line += " " + word
	}
	leads, err := c.limit(path, d, entries)
	if err != nil {
		return nil, err
	}
	if strings.HasPrefix(leads, " zone ") {
		leads += c.streamDone(path, reached)
	}
	nested, err := c.descriptors(path+".", d.Descriptors, entries, reached)
	switch {
	case err != nil:
		return nil, err
	case len(nested) > 0:
		return block(line+leads, nested), nil
	case leads == "":
		leads = " unlimited"
	}
	return []string{line + leads}, nil
}

// caddyfile returns the whole Caddyfile.
func (c *converter) caddyfile(names []string) string {
	var b strings.Builder
	head := []string{"# Converted from " + strings.Join(names, ", ") + "."}
	if len(c.differences) > 0 {
		head = append(head, "#", "# What differs:")
	}
	for _, d := range c.differences {
		head = append(head, "#   "+d)
	}
	// Caddy puts environment variables into comments, too.
	comment := strings.NewReplacer("\n", " ", "{$", "{ $")
	for _, line := range head {
		b.WriteString(comment.Replace(line) + "\n")
	}
	b.WriteString(`{
	servers {
		# gRPC without TLS.
		protocols h1 h2c
	}
	# Counts are in memory. In Redis several Caddys share them:
	#
	# rate_limit {
	# 	store redis {
	# 		url redis://localhost:6379
	# 	}
	# }
}

http://:8081 {
	# Whoever reaches it can spend anybody's limit.
	bind 127.0.0.1

	rate_limit_service {
`)
	for _, line := range slices.Concat(c.tree, c.zones) {
		b.WriteString("\t\t" + line + "\n")
	}
	b.WriteString("\t}\n\trespond 404\n}\n")
	return b.String()
}

// written returns a text as an argument in a Caddyfile that is no word of it, or an error if it cannot be one.
func written(text string) (string, error) {
	switch {
	case strings.ContainsAny(text, "{}"):
		return "", fmt.Errorf("%q has braces, in which a Caddyfile sees placeholders", text)
	case slices.Contains([]string{"zone", "unlimited", "denied", "import"}, text):
		return `"` + text + `"`, nil
	}
	return quoted(text)
}

// quoted returns a text in the first of the forms that Caddy reads as that text.
func quoted(text string) (string, error) {
	for _, form := range []string{text, "`" + text + "`", `"` + strings.ReplaceAll(text, `"`, `\"`) + `"`} {
		tokens, err := caddyfile.Tokenize([]byte("descriptor "+form+" zone"), "")
		if err == nil && len(tokens) == 3 && tokens[1].Text == text {
			return form, nil
		}
	}
	return "", fmt.Errorf("%q has characters that a Caddyfile cannot have together", text)
}
