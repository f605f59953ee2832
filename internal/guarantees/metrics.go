package main

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// metrics are figures of a Caddy, by name and labels as it writes them.
type metrics map[string]float64

// metrics reads those of the limiter.
func (s *site) metrics() (metrics, error) {
	resp, err := http.Get("http://" + s.admin + "/metrics")
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	return parseMetrics(string(text))
}

// parseMetrics reads lines such as name{label="value"} 1.
func parseMetrics(text string) (metrics, error) {
	m := metrics{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "caddy_rate_limit_") {
			continue
		}
		space := strings.LastIndexByte(line, ' ')
		n, err := strconv.ParseFloat(line[space+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("read metric %s: %w", line, err)
		}
		m[line[:space]] = n
	}
	return m, nil
}

// sum adds up what has a name and all of the labels.
func (m metrics) sum(name string, labels ...string) (n float64) {
	for key, value := range m {
		if hasAll(key, name, labels) {
			n += value
		}
	}
	return n
}

func hasAll(key, name string, labels []string) bool {
	if !strings.HasPrefix(key, name+"{") {
		return false
	}
	for _, l := range labels {
		if !strings.Contains(key, l) {
			return false
		}
	}
	return true
}

// duration is the histogram of what commands to servers take.
const duration = "caddy_rate_limit_store_duration_seconds_bucket"

// longest bounds what the commands took by which a bucket changes, since earlier
// figures were read: it is the upper end of the slowest class that grew.
func (m metrics) longest(earlier metrics) (d time.Duration) {
	for _, operation := range []string{"charge", "take", "refund"} {
		// Classes hold what is in lower ones as well.
		total, of := 0.0, map[float64]float64{}
		for key, n := range m {
			if !hasAll(key, duration, []string{`operation="` + operation + `"`}) {
				continue
			}
			end, err := strconv.ParseFloat(label(key, "le"), 64)
			if err != nil {
				continue
			}
			of[end] += n - earlier[key]
			total = max(total, of[end])
		}
		least := math.Inf(1)
		for end, n := range of {
			if n == total {
				least = min(least, end)
			}
		}
		if total == 0 {
			continue
		}
		// Longer than the last class is longer than charge_timeout's patience.
		d = max(d, time.Duration(min(least, 5)*float64(time.Second)))
	}
	return d
}

// label is the value of one of the labels in a key.
func label(key, name string) string {
	_, labels, _ := strings.Cut(key, "{")
	// Another label's name may end like this one's.
	_, rest, _ := strings.Cut(","+labels, ","+name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}
