package limiter

import (
	"net/http"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestFreeResponsesAreBounded: a client that makes each request a 304 gets ten times the limit, which is 10, for
// nothing in a window. Then they count like others, and a window later they are free again.
func TestFreeResponsesAreBounded(t *testing.T) {
	for name, test := range map[string]struct {
		zone   *Zone
		status int
		free   int
	}{
		"fixed_window":          {&Zone{}, 304, 100},
		"charge before":         {&Zone{ChargeBefore: true}, 304, 100},
		"gcra":                  {&Zone{Algorithm: store.GCRA}, 304, 100},
		"sliding_window":        {&Zone{Algorithm: store.SlidingWindow, ChargeBefore: true}, 304, 100},
		"sliding_log":           {&Zone{Algorithm: store.SlidingLog, ChargeBefore: true}, 304, 100},
		"a cost":                {&Zone{Cost: Quantity{Number: 5}}, 304, 20},
		"a cost at the end":     {&Zone{Cost: Quantity{Text: "{http.rate_limit.response.json.n}", Number: 1}, SettleAtEnd: true}, 304, 100},
		"another status":        {&Zone{Free: freeStatus(404)}, 404, 1000},
		"304 beside another":    {&Zone{Free: freeStatus(404)}, 304, 100},
		"failures alone":        {&Zone{Free: freeStatus(200)}, 304, 1000},
		"a 304 that empties it": {&Zone{Forgives: freeStatus(304)}, 304, 1000},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			clock := func() time.Time { return now }
			h := newTestHandler(t, test.zone, memory.New(memory.NewBuckets(), memory.Options{Now: clock}))
			h.Now = clock
			for window := range 2 {
				for n := range test.free {
					if got := h.answeredWith(test.status).Code; got != test.status {
						t.Fatalf("window %d: the status is %d after %d free responses", window, got, n)
					}
				}
				if test.free == 1000 {
					return
				}
				charged := 0
				for charged < 100 && h.answeredWith(test.status).Code == test.status {
					charged++
				}
				if want := test.free / 10; charged != want {
					t.Errorf("window %d: %d more are served, want %d", window, charged, want)
				}
				if got := h.answeredWith(http.StatusOK).Code; got != http.StatusTooManyRequests {
					t.Errorf("window %d: then the status of another response is %d", window, got)
				}
				now = now.Add(2 * time.Hour)
			}
		})
	}
}

// TestFreeResponsesOfOthers are counted by client.
func TestFreeResponsesOfOthers(t *testing.T) {
	now := time.Now()
	c, window := new(recentClients), &store.Limit{Zone: "z", Window: time.Minute}
	alice, bob := c.idOf(aboutFree, window, "alice"), c.idOf(aboutFree, window, "bob")
	for _, step := range []struct {
		client string
		later  time.Duration
		want   int64
	}{{"alice", 0, 3}, {"bob", 0, 3}, {"alice", time.Second, 6}, {"alice", 58 * time.Second, 9}, {"alice", time.Second, 3}, {"bob", 0, 3}} {
		now = now.Add(step.later)
		id := alice
		if step.client == "bob" {
			id = bob
		}
		if got := c.addFree(id, 3, window.Window, now); got != step.want {
			t.Errorf("%s: %d, want %d", step.client, got, step.want)
		}
	}
	for range 2 {
		c.addFree(alice, store.MaxEvents, window.Window, now)
	}
	if got := c.addFree(alice, 1, window.Window, now); got != store.MaxEvents {
		t.Errorf("%d is not bounded", got)
	}
}
