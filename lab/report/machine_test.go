package report

import "testing"

func TestWrkVersion(t *testing.T) {
	for told, want := range map[string]string{
		"wrk debian/4.1.0-3+b2 [epoll] Copyright (C) 2012 Will Glozer\nUsage: wrk <options> <url>\n": "wrk 4.1.0-3+b2",
		"wrk 4.2.0 [epoll] Copyright (C) 2012 Will Glozer\n":                                         "wrk 4.2.0",
		"":                     "no wrk",
		"sh: not found: wrk\n": "no wrk",
	} {
		if got := wrkVersion(told); got != want {
			t.Errorf("%q is %q, want %q", told, got, want)
		}
	}
}
