package ledger

import (
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// TestOutageEndsWithWhatStillCounts: of the charges of a client, one a second, those arrive that
// would count by then, and the old ones take none with them.
func TestOutageEndsWithWhatStillCounts(t *testing.T) {
	for a, want := range map[store.Algorithm]func(outage int64) (least, most int64){
		// 50 of 60 drain, and a full bucket waits.
		store.GCRA: func(outage int64) (least, most int64) {
			owed := max(outage/6, 50)
			return owed - 1, owed + 1
		},
		// What is merged is known by two fifths of the window, and where windows begin is not known.
		store.SlidingWindow: func(int64) (least, most int64) { return 46, 80 },
		// What leaves a log is known by a fifth of the window.
		store.SlidingLog: func(int64) (least, most int64) { return 57, 74 },
	} {
		for _, outage := range []int64{61, 125, 600} {
			t.Run(fmt.Sprint(a, outage), func(t *testing.T) {
				simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
					s.setDown(true, false)
					r := store.Request{Limit: &store.Limit{Zone: "zone", Algorithm: a, Window: time.Minute}, ClientKey: "alice", Events: 50, Cost: 1}
					for i := range outage {
						r.ID = fmt.Sprint(i)
						l.ChargeDetached([]*store.Request{new(r)})
						pass(time.Second)
					}
					s.setDown(false, false)
					used := int64(0)
					for range 2000 {
						pass(time.Millisecond)
						used = max(used, s.used(r))
					}
					if least, most := want(outage); used < least || used > most {
						t.Errorf("%d are used, want from %d to %d", used, least, most)
					}
				})
			})
		}
	}
}

// TestWhatIsLeftDrainsAtTheLowestRate of the charges that waited, because it may be of those.
func TestWhatIsLeftDrainsAtTheLowestRate(t *testing.T) {
	simulated(t, func(t *testing.T, s *simulation, l *Ledger) {
		s.setDown(true, false)
		r := store.Request{Limit: &store.Limit{Zone: "zone", Algorithm: store.GCRA, Window: time.Minute}, ClientKey: "alice", Events: 1000, Burst: 5, Cost: 1000}
		l.ChargeDetached([]*store.Request{new(r)})
		pass(2 * time.Minute)
		r.Events, r.Cost = 10, 5
		l.ChargeDetached([]*store.Request{new(r)})
		s.setDown(false, false)
		pass(3 * time.Second)
		if used := s.used(r); used < 4 {
			t.Errorf("%d of 5 are used after some seconds, 10 of which drain in a minute", used)
		}
	})
}
