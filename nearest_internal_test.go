package shardlimit

import (
	"strings"
	"testing"
)

func TestNearest(t *testing.T) {
	zone := strings.Split(zoneOptions, ", ")
	redis := strings.Split(redisOptions, ", ")
	for _, test := range []struct {
		word  string
		known []string
		want  string
	}{
		// Slips.
		{"evnets", zone, "events"},
		{"event", zone, "events"},
		{"windw", zone, "window"},
		{"windows", zone, "window"},
		{"ley", zone, "key"},
		{"kye", zone, "key"},
		{"costs", zone, "cost"},
		{"max_wiat", zone, "max_wait"},
		{"max_wait_que", zone, "max_wait_queue"},
		{"ipv5_prefix", zone, "ipv4_prefix"},
		{"check_timout", redis, "check_timeout"},
		{"pasword", redis, "password"},
		// Other forms.
		{"freeStatus", zone, "free_status"},
		{"free-status", zone, "free_status"},
		{"EVENTS", zone, "events"},
		// Beginnings, and what has more at its end.
		{"algo", zone, "algorithm"},
		{"ipv6", zone, "ipv6_prefix"},
		{"on", zone, "on_error"},
		{"window_size", zone, "window"},
		{"max", zone, ""},
		// Parts.
		{"max_events", zone, "events"},
		{"redis_password", redis, "password"},
		// Other words.
		{"limit", zone, ""},
		{"rate", zone, ""},
		{"", zone, ""},
		{"k", zone, ""},
		{"x", nil, ""},
	} {
		if got := nearest(test.word, test.known); got != test.want {
			t.Errorf("nearest to %q is %q, want %q", test.word, got, test.want)
		}
	}
}

// TestNearestIsItself: no known word is near another one first.
func TestNearestIsItself(t *testing.T) {
	for _, options := range []string{handlerOptions, zoneOptions, redisOptions, shardOptions, tlsOptions} {
		known := strings.Split(options, ", ")
		for _, word := range known {
			if got := nearest(word, known); got != word {
				t.Errorf("nearest to %s is %s", word, got)
			}
		}
	}
}

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
		if got := slips(test.a, test.b); got != test.want {
			t.Errorf("from %q to %q are %d slips, want %d", test.a, test.b, got, test.want)
		}
		if back := slips(test.b, test.a); back != test.want {
			t.Errorf("from %q to %q are %d slips, want %d", test.b, test.a, back, test.want)
		}
	}
}

func TestDidYouMean(t *testing.T) {
	known := []string{"events", "window"}
	if got := didYouMean("evnts", known); got != ", did you mean events?" {
		t.Errorf("it says %q", got)
	}
	if got := didYouMean("limit", known); got != "" {
		t.Errorf("it says %q", got)
	}
}
