package wire

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
)

// TestRoles covers what clusters of several versions say of their nodes.
func TestRoles(t *testing.T) {
	node := func(id string, is ...string) clusterNode {
		n := clusterNode{id: id, addr: id}
		for _, word := range is {
			n.isPrimary = n.isPrimary || word == "primary"
			n.isDown = n.isDown || word == "down"
		}
		return n
	}
	owned := func(first, last int, ids ...string) ownedSlots {
		s := ownedSlots{SlotRange: SlotRange{first, last}}
		for i, id := range ids {
			s.nodes = append(s.nodes, clusterNode{id: id, addr: id, isPrimary: i == 0})
		}
		return s
	}
	type shards = [][]clusterNode
	low, high := []SlotRange{{0, 99}}, []SlotRange{{100, 199}}
	for name, c := range map[string]struct {
		slots  []ownedSlots
		shards shards
		want   []Roles
	}{
		"sound": {
			[]ownedSlots{owned(0, 99, "a", "b"), owned(100, 199, "c", "d")},
			shards{{node("b"), node("a", "primary")}, {node("c", "primary"), node("d")}},
			[]Roles{{Primary: "a", Replicas: []string{"b"}, Slots: low}, {Primary: "c", Replicas: []string{"d"}, Slots: high}},
		},
		"slots in two ranges": {
			[]ownedSlots{owned(0, 99, "a", "b"), owned(100, 199, "a", "b")}, shards{{node("a", "primary"), node("b")}},
			[]Roles{{Primary: "a", Replicas: []string{"b"}, Slots: []SlotRange{{0, 99}, {100, 199}}}},
		},
		"a primary without slots": {
			[]ownedSlots{owned(0, 99, "a")}, shards{{node("a", "primary")}, {node("b", "primary"), node("c")}},
			[]Roles{{Primary: "a", Slots: low}, {Primary: "b", Replicas: []string{"c"}}},
		},
		"two primaries in a shard": {
			[]ownedSlots{owned(0, 99, "a", "b")}, shards{{node("c", "primary"), node("a", "primary"), node("b")}},
			[]Roles{{Primary: "a", Replicas: []string{"b"}, Slots: low}, {Primary: "c"}},
		},
		"a replica that its shard lists beside two primaries": {
			[]ownedSlots{owned(0, 99, "a")}, shards{{node("b"), node("c", "primary"), node("a", "primary")}},
			[]Roles{{Primary: "a", Replicas: []string{"b"}, Slots: low}, {Primary: "c"}},
		},
		"a shard that is not listed": {
			[]ownedSlots{owned(0, 99, "a", "b"), owned(100, 199, "c")}, shards{{node("c", "primary")}},
			[]Roles{{Primary: "a", Replicas: []string{"b"}, Slots: low}, {Primary: "c", Slots: high}},
		},
		"a primary that is down": {
			[]ownedSlots{owned(0, 99, "a", "b")}, shards{{node("a", "primary", "down"), node("b")}},
			[]Roles{{Replicas: []string{"b"}, Down: []string{"a"}, Slots: low}},
		},
		"a replica that is down": {
			[]ownedSlots{owned(0, 99, "a")}, shards{{node("b", "down"), node("a", "primary")}},
			[]Roles{{Primary: "a", Down: []string{"b"}, Slots: low}},
		},
		"a primary that is down and lists no slots": {
			nil, shards{{node("a", "primary", "down"), node("b")}},
			[]Roles{{Replicas: []string{"b"}, Down: []string{"a"}}},
		},
	} {
		if got := rolesIn(c.slots, c.shards); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, c.want)
		}
	}
}

// TestSlotsThatCannotBeRead have no owner.
func TestSlotsThatCannotBeRead(t *testing.T) {
	reply := []any{
		"slots", []any{int64(1), int64(2)}, []any{int64(3), int64(4), "a"}, []any{int64(5), int64(6), []any{"a", int64(1)}},
		[]any{int64(7), int64(8), []any{nil, int64(6379), "id"}},
	}
	want := []ownedSlots{{SlotRange{7, 8}, []clusterNode{{id: "id", addr: "host:6379", isPrimary: true, isNameless: true}}}}
	if got := slotsIn(reply, "host:1"); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestCoveredSlots checks that each slot counts once, and that numbers outside the cluster do not count.
func TestCoveredSlots(t *testing.T) {
	for name, c := range map[string]struct {
		slots []SlotRange
		want  int
	}{
		"none":       {[]SlotRange{{9, 8}}, 0},
		"all":        {[]SlotRange{{0, 5460}, {5461, SlotCount - 1}}, SlotCount},
		"overlap":    {[]SlotRange{{0, 9999}, {5000, 9999}, {10_000, 11_383}}, 11_384},
		"impossible": {[]SlotRange{{-5, 2}, {SlotCount - 1, 1 << 40}, {9, 8}}, 4},
	} {
		if got := Covered([]Roles{{Primary: "a", Slots: c.slots[:1]}, {Primary: "b", Slots: c.slots[1:]}}); got != c.want {
			t.Errorf("%s: %d slots, want %d", name, got, c.want)
		}
	}
}

// TestLaterAnswerOfSentinels: of two with one epoch the one counts that fails over no more.
func TestLaterAnswerOfSentinels(t *testing.T) {
	of := func(primary string, epoch int64, failsOver bool) SentinelReply {
		return SentinelReply{Roles: Roles{Primary: primary}, epoch: epoch, failsOver: failsOver}
	}
	for name, c := range map[string]struct {
		answers []SentinelReply
		want    string
	}{
		"one":                     {[]SentinelReply{of("a", 0, false)}, "a"},
		"the latest":              {[]SentinelReply{of("a", 1, false), of("b", 2, false), of("c", 1, false)}, "b"},
		"the first of equal ones": {[]SentinelReply{of("a", 1, false), of("b", 1, false)}, "a"},
		"the one of most":         {[]SentinelReply{of("a", 1, false), of("b", 1, false), of("b", 1, false)}, "b"},
		"the latest of few":       {[]SentinelReply{of("a", 1, false), of("a", 1, false), of("b", 2, false)}, "b"},
		"one that fails over":     {[]SentinelReply{of("a", 2, true), of("b", 2, false)}, "b"},
		"the latest fails over":   {[]SentinelReply{of("a", 1, false), of("b", 2, true)}, "b"},
	} {
		got, err := new(Sentinel).Latest(c.answers)
		if err != nil || got.Primary != c.want {
			t.Errorf("%s: got %q, %v, want %q", name, got.Primary, err, c.want)
		}
	}
}

// TestReplacementOfConnections becomes rare while it is in vain, and is quick again later.
func TestReplacementOfConnections(t *testing.T) {
	var r replacement
	now, replaced := time.Unix(1_800_000_000, 0), 0
	wanted := func(lasts time.Duration) (n int) {
		for range lasts / (10 * time.Millisecond) {
			now = now.Add(10 * time.Millisecond)
			if r.isDue(now) {
				n++
			}
		}
		return n
	}
	if replaced = wanted(time.Minute); replaced < 25 || replaced > 35 {
		t.Errorf("replaced %d times in a minute in vain", replaced)
	}
	if now = now.Add(time.Minute); wanted(150*time.Millisecond) != 2 {
		t.Error("not replaced at once, and again after the shortest pause")
	}
}

// TestSearchThatHasEnded before a node was asked says why it found nothing.
func TestSearchThatHasEnded(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := NewCluster(&newShard(t, Options{Cluster: []string{"127.0.0.1:1"}}).Options).Find(ended)
	if !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "%!") {
		t.Errorf("got %v", err)
	}
}
