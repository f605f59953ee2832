package caddyproc

import (
	"fmt"
	"strconv"
	"strings"
)

// Metrics are the figures of a Caddy, by name and labels as it writes them.
type Metrics map[string]float64

// ParseMetrics reads lines such as name{label="value"} 1.
func ParseMetrics(text string) (Metrics, error) {
	m := Metrics{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		// A label's value may have spaces.
		space := strings.LastIndexByte(line, ' ')
		n, err := strconv.ParseFloat(line[space+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("read metric %s: %w", line, err)
		}
		m[line[:max(space, 0)]] = n
	}
	return m, nil
}

// Sum adds up what has a name and all of the labels, given as name="value".
func (m Metrics) Sum(name string, labels ...string) (n float64) {
	for key, value := range m {
		if Has(key, name, labels...) {
			n += value
		}
	}
	return n
}

// Has reports whether a key of Metrics has a name and all of the labels.
func Has(key, name string, labels ...string) bool {
	metric, has, _ := strings.Cut(key, "{")
	if metric != name {
		return false
	}
	for _, l := range labels {
		// Another label's name may end like this one's.
		if !strings.Contains(","+has, ","+l) {
			return false
		}
	}
	return true
}

// Label is the value of one of the labels in a key of Metrics.
func Label(key, name string) string {
	_, labels, _ := strings.Cut(key, "{")
	_, rest, _ := strings.Cut(","+labels, ","+name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}
