package wire

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// awaitPrimary searches until it finds that primary, or an error.
func awaitPrimary(t *testing.T, f finder, want string) {
	t.Helper()
	redistest.Eventually(t, "found "+want, func() error {
		found, err := search(t, f)
		if err == nil && (len(found) != 1 || found[0].Primary != want) {
			err = fmt.Errorf("found %+v", found)
		}
		return err
	})
}

func search(t *testing.T, f finder) ([]Roles, error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	found, err := f.Find(ctx)
	return found.Roles, err
}

// requireOlderRefused requires that older answers are refused while the later ones are missing, and are
// obeyed after a minute.
func requireOlderRefused(t *testing.T, f finder, h *history, older string, later *redistest.Server, newer string) {
	t.Helper()
	awaitPrimary(t, f, newer)
	for range 2 {
		redistest.Must(t, later.Pause())
		redistest.Eventually(t, "the older answer is refused", func() error {
			found, err := search(t, f)
			if err == nil {
				t.Fatalf("it is followed: %+v", found)
			}
			if !errors.Is(err, errOlder) {
				return err
			}
			return nil
		})
		redistest.Must(t, later.Resume())
		awaitPrimary(t, f, newer)
	}
	redistest.Must(t, later.Kill())
	redistest.Eventually(t, "the older answer is refused", func() error {
		if _, err := search(t, f); !errors.Is(err, errOlder) {
			return fmt.Errorf("the error is %w", err)
		}
		return nil
	})
	h.since = h.since.Add(-obeyAfter)
	awaitPrimary(t, f, older)
	if !h.since.IsZero() {
		t.Error("the older answer is not followed from now on")
	}
}

// TestSentinelThatWasCutOff names the primary before a failover that others know of.
func TestSentinelThatWasCutOff(t *testing.T) {
	t.Parallel()
	const name = "limits"
	sh := redistest.StartShard(t, 1)
	old := redistest.Start(t, redistest.ReplicaOf(sh.Primary))
	redistest.Must(t, old.WaitInSyncWith(t.Context(), sh.Primary))
	redistest.Must(t, old.Client().ReplicaOf(t.Context(), "NO", "ONE").Err())
	behind := redistest.StartSentinels(t, name, old, 1, redistest.SentinelOptions{})
	ahead := redistest.StartSentinels(t, name, sh.Primary, 1, redistest.SentinelOptions{})
	redistest.Must(t, ahead.Failover(t.Context()))
	promoted, err := ahead.WaitForMaster(t.Context(), sh.Primary.Addr())
	redistest.Must(t, err)
	s := newShard(t, Options{Sentinel: &SentinelOptions{Master: name, Addrs: append(behind.Addrs(), ahead.Addrs()...)}})
	f := NewSentinel(&s.Options)
	t.Cleanup(f.Close)
	requireOlderRefused(t, f, &f.history, old.Addr(), ahead.Nodes[0], promoted)
}

// TestNodeThatWasCutOff knows all slots, and their owners of before.
func TestNodeThatWasCutOff(t *testing.T) {
	t.Parallel()
	// A node timeout of its own keeps other tests from using the cluster afterwards.
	behind, ahead := redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(redistest.WaitTimeout)), redistest.StartCluster(t, 1, 0, redistest.NodeTimeout(2*redistest.WaitTimeout))
	for _, order := range [][]any{{"RESET", "HARD"}, {"SET-CONFIG-EPOCH", 9}, {"ADDSLOTSRANGE", 0, SlotCount - 1}} {
		redistest.Must(t, ahead.Nodes[0].Client().Do(t.Context(), append([]any{"CLUSTER"}, order...)...).Err())
	}
	redistest.Must(t, ahead.WaitUntilOK(t.Context()))
	s := newShard(t, Options{Cluster: []string{ahead.Addrs()[0], behind.Addrs()[0]}})
	t.Cleanup(s.Use(time.Second / 2))
	f := NewCluster(&s.Options)
	t.Cleanup(f.Close)
	var ids []string
	for _, c := range []*redistest.Cluster{behind, ahead} {
		id, err := c.Nodes[0].Client().Do(t.Context(), "CLUSTER", "MYID").Text()
		redistest.Must(t, err)
		ids = append(ids, id)
	}
	requireOlderRefused(t, sameCluster{f, ids}, &f.history, behind.Addrs()[0], ahead.Nodes[0], ahead.Addrs()[0])
}

// sameCluster takes nodes for those of one cluster.
type sameCluster struct {
	*Cluster
	ids []string
}

func (c sameCluster) Find(ctx context.Context) (Found, error) {
	c.belief.followed.marks, c.belief.isSet = c.ids, true
	return c.Cluster.Find(ctx)
}

// TestHistory obeys an older answer once a minute has brought nothing newer.
func TestHistory(t *testing.T) {
	type answer struct {
		after   time.Duration
		epoch   int64
		isWhole bool
		follows bool
	}
	const whole, partial, yes, no = true, false, true, false
	for name, answers := range map[string][]answer{
		"the first":                      {{0, 0, whole, yes}},
		"later and equal ones":           {{0, 1, whole, yes}, {0, 1, whole, yes}, {0, 3, partial, yes}},
		"an older one":                   {{0, 2, whole, yes}, {0, 1, whole, no}, {0, 2, whole, yes}},
		"older ones for a minute":        {{0, 2, whole, yes}, {0, 1, whole, no}, {obeyAfter - 1, 1, whole, no}, {1, 1, whole, yes}, {0, 0, whole, no}},
		"an older one after silence":     {{0, 2, whole, yes}, {time.Hour, 1, whole, no}},
		"a newer one in between":         {{0, 2, whole, yes}, {0, 1, whole, no}, {time.Second, 2, whole, yes}, {obeyAfter, 1, whole, no}},
		"what is not whole counts alone": {{0, 2, whole, yes}, {0, 9, partial, yes}, {0, 3, whole, yes}},
		"an older one that is not whole": {{0, 2, whole, yes}, {0, 1, partial, no}},
	} {
		var h history
		now := time.Unix(1_800_000_000, 0)
		for i, a := range answers {
			now = now.Add(a.after)
			if err := h.follow(a.epoch, a.isWhole, now); (err == nil) != a.follows {
				t.Errorf("%s, answer %d: %v", name, i, err)
			}
		}
	}
}

// TestBetterView is current, or else not older, more complete, and later.
func TestBetterView(t *testing.T) {
	const known = 5
	of := func(isWhole bool, covers int, epoch int64) clusterView {
		return clusterView{isWhole: isWhole, covers: covers, epoch: epoch}
	}
	// Each is better than those before it.
	views := []clusterView{
		of(false, 9, 4), of(false, 10, 3), of(false, 10, 4), of(true, SlotCount, 3), of(true, SlotCount, 4),
		of(false, 10, known), of(false, 10, 6), of(false, SlotCount, known), of(true, SlotCount, known), of(true, SlotCount, 7),
	}
	for i := range views {
		for j := range views {
			if got := views[i].isBelow(&views[j], known); got != (i < j) {
				t.Errorf("view %d is below view %d: %v", i, j, got)
			}
		}
	}
}
