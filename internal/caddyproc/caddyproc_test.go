//go:build check

package caddyproc

import "testing"

// TestLabelsAreWhole: the name of one label may end like another's, and a value
// may have spaces.
func TestLabelsAreWhole(t *testing.T) {
	m, err := ParseMetrics("# HELP x y\n" +
		"x{role=\"primary\",le=\"0.1\"} 2\nx{role=\"a b\",le=\"0.2\"} 3\nxy{role=\"primary\"} 5\nplain 7\n")
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, label string
		want        float64
	}{{"x", `role="primary"`, 2}, {"x", `le="primary"`, 0}, {"x", `role="a b"`, 3}, {"plain", "", 7}} {
		var labels []string
		if test.label != "" {
			labels = []string{test.label}
		}
		if got := m.Sum(test.name, labels...); got != test.want {
			t.Errorf("%s{%s} is %v, want %v", test.name, test.label, got, test.want)
		}
	}
	if got := Label(`x{role="primary",le="0.1"}`, "le"); got != "0.1" {
		t.Errorf("le is %q", got)
	}
	if _, err := ParseMetrics("x y"); err == nil {
		t.Error("a value that is no number is read")
	}
}
