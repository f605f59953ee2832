package option_test

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/option"
)

func TestSlips(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"", "abc", 3},
		{"abc", "", 3},
		{"abc", "abc", 0},
		{"abc", "acb", 1},
		{"abcd", "badc", 2},
		{"kitten", "sitting", 3},
		{"events", "evnets", 1},
	} {
		if got := option.Slips(test.a, test.b); got != test.want {
			t.Errorf("from %q to %q are %d slips, want %d", test.a, test.b, got, test.want)
		}
		if back := option.Slips(test.b, test.a); back != test.want {
			t.Errorf("from %q to %q are %d slips, want %d", test.b, test.a, back, test.want)
		}
	}
}

func TestDidYouMean(t *testing.T) {
	known := []string{"events", "window"}
	if got := option.DidYouMean("evnts", known); got != ", did you mean events?" {
		t.Errorf("it says %q", got)
	}
	if got := option.DidYouMean("limit", known); got != "" {
		t.Errorf("it says %q", got)
	}
}
