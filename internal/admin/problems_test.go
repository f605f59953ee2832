package admin

import (
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/ledger"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// jumper is a store whose clock was set.
type jumper struct {
	*memory.Store
	by time.Duration
	at time.Time
}

// LastJump implements [store.Operable].
func (j jumper) LastJump() (by time.Duration, at time.Time) { return j.by, j.at }

// Shards implements [store.Operable].
func (j jumper) Shards() []store.ShardFigures {
	return []store.ShardFigures{{Name: "a", Found: true, Servers: []store.ServerFigures{{
		Address: "h:1", Role: store.RolePrimary, State: store.ServerUp, Jump: j.by, JumpedAt: j.at,
	}}}}
}

// TestJumpOfAClockIsAProblem for a while.
func TestJumpOfAClockIsAProblem(t *testing.T) {
	for _, c := range []struct {
		by, ago time.Duration
		want    int
	}{{0, 0, 0}, {720 * time.Hour, time.Minute, 2}, {-time.Minute, time.Minute, 2}, {time.Hour, 2 * time.Hour, 0}} {
		base := jumper{by: c.by, at: time.Now().Add(-c.ago)}
		all := problemsOf(&stores.Opened{Name: "s", Operable: base, Accounts: ledger.NewLocal(ledger.NewFlights(), base)}, time.Now(), nil)
		if len(all) != c.want {
			t.Errorf("a jump by %v, %v ago: %d problems, want %d", c.by, c.ago, len(all), c.want)
		}
		for _, p := range all {
			if !strings.Contains(p.Text, "has jumped by "+c.by.String()) || p.Store != "s" {
				t.Errorf("problem %+v", p)
			}
		}
	}
}
