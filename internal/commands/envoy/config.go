package envoy

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v2"
)

// config is a file as envoyproxy/ratelimit reads it, with the same library: in YAML 1.1 yes and on are true,
// and of a text without quotes, such as 007, all characters count.
type config struct {
	Domain      string
	Descriptors []descriptor
	Unknown     map[string]any `yaml:",inline"`
}

type descriptor struct {
	Key, Value     string
	RateLimit      *rateLimit `yaml:"rate_limit"`
	Descriptors    []descriptor
	ShadowMode     bool           `yaml:"shadow_mode"`
	QuotaMode      bool           `yaml:"quota_mode"`
	ShareThreshold bool           `yaml:"share_threshold"`
	DetailedMetric bool           `yaml:"detailed_metric"`
	ValueToMetric  bool           `yaml:"value_to_metric"`
	Unknown        map[string]any `yaml:",inline"`
}

type rateLimit struct {
	Unit            string
	RequestsPerUnit any `yaml:"requests_per_unit"`
	UnitMultiplier  any `yaml:"unit_multiplier"`
	Unlimited       bool
	Name, Replaces  any
	Algorithm       any
	Unknown         map[string]any `yaml:",inline"`
}

// read decodes a file. An error names its lines.
func read(text []byte) (of config, err error) {
	err = yaml.Unmarshal(text, &of)
	if wrong := new(yaml.TypeError); errors.As(err, &wrong) {
		err = errors.New(strings.Join(wrong.Errors, "; "))
	}
	return of, err
}

// unknown notes the fields that are not known.
func (c *converter) unknown(path string, fields map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		c.differs(path+name, "is unknown, and left out")
	}
}

// prefix returns the value without the * at its end.
func (d *descriptor) prefix() (text string, isPrefix bool) { return strings.CutSuffix(d.Value, "*") }

// check returns what the service refuses as well.
func (d *descriptor) check(path string) error {
	_, isPrefix := d.prefix()
	switch {
	case d.Key == "":
		return errors.New(path + ".key is missing, or empty")
	case d.ShareThreshold && !isPrefix:
		return errors.New(path + ".share_threshold needs a value that ends with *")
	}
	return nil
}

// taker returns the descriptor to which the service leads all values of all[i], or -1: one with the same value,
// or a prefix of it, that is before it in the file, or * wherever it is, if all[i] is for other values.
func taker(all []descriptor, i int) int {
	d := &all[i]
	text, isPrefix := d.prefix()
	for j := range all {
		o := &all[j]
		start, takesMore := o.prefix()
		switch {
		case o.Key != d.Key || j == i:
		case j < i && o.Value == d.Value,
			j < i && isPrefix && takesMore && strings.HasPrefix(text, start),
			d.Value == "" && o.Value == "*":
			return j
		}
	}
	return -1
}

// beginning returns the key of another descriptor with which that of all[i] begins, up to a _, or "". Only the
// first with a key has one.
func beginning(all []descriptor, i int) string {
	for j := range all {
		switch {
		case j < i && all[j].Key == all[i].Key:
			return ""
		case strings.HasPrefix(all[i].Key, all[j].Key+"_"):
			return all[j].Key
		}
	}
	return ""
}
