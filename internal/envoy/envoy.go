// Package envoy converts configs of envoyproxy/ratelimit to Caddyfiles with rate_limit_service. What has no
// counterpart there is named with its path.
//
// The package imports nothing of this module.
package envoy

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// File is a config of envoyproxy/ratelimit, in YAML, with one domain.
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
	for _, f := range files {
		if err := c.file(f); err != nil {
			return Converted{}, fmt.Errorf("%s: %w", f.Name, err)
		}
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
}

// differs notes a difference at a path.
func (c *converter) differs(path, format string, args ...any) {
	c.differences = append(c.differences, c.fileName+": "+path+": "+fmt.Sprintf(format, args...))
}

func (c *converter) file(f File) error {
	c.fileName = f.Name
	var root map[string]any
	if err := yaml.Unmarshal(f.Text, &root); err != nil {
		return err
	}
	domain, _ := root["domain"].(string)
	switch {
	case domain == "":
		return fmt.Errorf("has no domain, so it is no config of limits; it has %s", strings.Join(slices.Sorted(maps.Keys(root)), ", "))
	case c.domains[domain]:
		return fmt.Errorf("domain %s is in another file as well: put the descriptors of both into one", domain)
	}
	c.domains[domain] = true
	c.unknown("", root, "domain", "descriptors")
	word, err := written(domain)
	if err != nil {
		return fmt.Errorf("domain: %w", err)
	}
	c.tree = append(c.tree, "domain "+word+" {")
	if err := c.descriptors("", root["descriptors"], []entry{{key: domain}}, "\t"); err != nil {
		return err
	}
	c.tree = append(c.tree, "}")
	return nil
}

// entry is an entry of a descriptor, of which isShared is set if its values share their counts. The first of
// a path is the domain.
type entry struct {
	key, value string
	isShared   bool
}

// descriptors converts the list of descriptors at a path, which follow some entries.
func (c *converter) descriptors(path string, list any, before []entry, indent string) error {
	if list == nil {
		return nil
	}
	all, ok := list.([]any)
	if !ok {
		return fmt.Errorf("%sdescriptors is no list", path)
	}
	taken := map[entry]bool{}
	for i, item := range all {
		path := fmt.Sprintf("%sdescriptors[%d]", path, i)
		fields, ok := item.(map[string]any)
		if !ok {
			return fmt.Errorf("%s is no map", path)
		}
		e, err := entryOf(fields)
		if err != nil {
			return fmt.Errorf("%s%w", path, err)
		}
		if e.value == "*" {
			e.value = ""
		}
		id := entry{key: e.key, value: e.value}
		if taken[id] {
			c.differs(path, "is left out: a descriptor before it takes the same values")
			continue
		}
		taken[id] = true
		if err := c.descriptor(path, fields, append(before[:len(before):len(before)], e), indent); err != nil {
			return err
		}
	}
	return nil
}

// entryOf returns the entry of a descriptor.
func entryOf(fields map[string]any) (e entry, err error) {
	var isText bool
	if e.key, isText = fields["key"].(string); !isText || e.key == "" {
		return e, errors.New(".key is missing, or no text")
	}
	switch value := fields["value"].(type) {
	case nil:
	case string:
		e.value = value
	case int, bool, float64:
		// The service takes it for the text.
		e.value = fmt.Sprint(value)
	default:
		return e, errors.New(".value is no text")
	}
	e.isShared = fields["share_threshold"] == true
	return e, nil
}

func (c *converter) descriptor(path string, fields map[string]any, entries []entry, indent string) error {
	c.unknown(path+".", fields, "key", "value", "rate_limit", "descriptors", "shadow_mode", "quota_mode", "share_threshold",
		"detailed_metric", "value_to_metric")
	for _, name := range []string{"detailed_metric", "value_to_metric"} {
		if fields[name] == true {
			c.differs(path+"."+name, "has no counterpart: metrics are by zone; caddy rate-limit top and near show clients")
		}
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
			return nil
		}
		line += " " + word
	}
	leads, err := c.limit(path, fields, entries)
	if err != nil {
		return err
	}
	nested, _ := fields["descriptors"].([]any)
	if leads == "" && len(nested) == 0 {
		leads = " unlimited"
	}
	line += leads
	if len(nested) == 0 {
		c.tree = append(c.tree, indent+line)
		return nil
	}
	c.tree = append(c.tree, indent+line+" {")
	err = c.descriptors(path+".", nested, entries, indent+"\t")
	c.tree = append(c.tree, indent+"}")
	return err
}

// unknown notes the fields that are not known.
func (c *converter) unknown(path string, fields map[string]any, known ...string) {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(known, name) {
			c.differs(path+name, "is unknown, and left out")
		}
	}
}

// caddyfile returns the whole Caddyfile.
func (c *converter) caddyfile(names []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Converted from %s.\n", strings.Join(names, ", "))
	if len(c.differences) > 0 {
		b.WriteString("#\n# What differs:\n")
		for _, d := range c.differences {
			b.WriteString("#   " + strings.ReplaceAll(d, "\n", " ") + "\n")
		}
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

// written returns a text as an argument in a Caddyfile, or an error if it cannot be one.
func written(text string) (string, error) {
	switch {
	case strings.ContainsAny(text, "{}"):
		return "", fmt.Errorf("%q has braces, in which a Caddyfile sees placeholders", text)
	case slices.Contains([]string{"zone", "unlimited", "denied", "import"}, text):
		return `"` + text + `"`, nil
	case !strings.ContainsAny(text, " \t\r\n\"`#\\<"):
		return text, nil
	case !strings.Contains(text, "`"):
		return "`" + text + "`", nil
	case strings.HasSuffix(text, `\`) || strings.Contains(text, `\"`):
		return "", fmt.Errorf("%q has quotes that a Caddyfile cannot have together", text)
	}
	return `"` + strings.ReplaceAll(text, `"`, `\"`) + `"`, nil
}
