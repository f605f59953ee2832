//go:build check

package operate

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
)

func (c *modelCaddy) isMending() bool {
	if !c.overrides.mending.TryLock() {
		return true
	}
	c.overrides.mending.Unlock()
	return false
}

// meet adds n Caddys; all of them read the overrides that the first one then sets.
func (m *model) meet(n, overrides int) {
	for range n {
		m.caddys = append(m.caddys, m.newCaddy(0))
	}
	m.config()
	mustChange(m.T, m.caddys[0].Operator, limitsOf("x", overrides))
	for _, c := range m.caddys {
		m.look(c)
	}
}

// TestChangesDuringAMending are known to others at their next look: the mender corrects no sum that a writer moves.
func TestChangesDuringAMending(t *testing.T) {
	inModel(t, func(m *model, p *modelCaddy) {
		m.meet(2, 1)
		w, q := m.caddys[1], m.caddys[2]
		m.shards[0].wipe()
		time.Sleep(time.Second)
		y := limitsOf("y", 1)
		isHeadRead, arePagesRead := false, false
		watch(p.Operator, func(name string, _ bool) {
			if name == "zrange" && p.isMending() && !arePagesRead {
				arePagesRead = true
				_, _ = q.Overrides(m.Context())
				mustChange(m.T, w.Operator, y)
			}
		}, func(name string) {
			if name == "hmget" && p.isMending() && !isHeadRead {
				isHeadRead = true
				mustChange(m.T, w.Operator, limitsOf("z", 1))
			}
		})
		m.look(p)
		m.look(p)
		m.look(q)
		if set, err := q.Overrides(m.Context()); err != nil || !arePagesRead || set.Of(y[0].ID(), 0) == nil {
			t.Errorf("mended %v: the change is not known, %v", arePagesRead, err)
		}
		synctest.Wait()
	}, 0)
}

// TestWhatRunsOutIsNotRead by other Caddys when one removes it.
func TestWhatRunsOutIsNotRead(t *testing.T) {
	inModel(t, func(m *model, p *modelCaddy) {
		m.meet(1, 0)
		changes := limitsOf("x", 600)
		for i := range changes {
			changes[i].Until = modelTime().Add(time.Hour + time.Duration(i)*500*time.Millisecond).UnixMicro()
		}
		mustChange(m.T, p.Operator, changes)
		q := m.caddys[1]
		m.look(q)
		watch(q.Operator, func(name string, _ bool) {
			if name == "zrange" {
				t.Error("the hash and the log are read")
			}
		}, nil)
		time.Sleep(time.Hour - time.Minute)
		for range 300 {
			m.look(p)
			time.Sleep(510 * time.Millisecond)
			m.look(q)
			time.Sleep(490 * time.Millisecond)
		}
	}, 0, 0)
}

// TestMendingIsReadTwice by others, at its begin and its end, however many calls it takes.
func TestMendingIsReadTwice(t *testing.T) {
	inModel(t, func(m *model, p *modelCaddy) {
		m.meet(1, 5*changesInCall)
		q := m.caddys[1]
		m.shards[0].wipe()
		time.Sleep(time.Second)
		reads, calls := 0, 0
		watch(q.Operator, func(name string, _ bool) {
			if there, _ := m.shards[0].server.Do("EXISTS", keysOfModel.Overrides()); name == "zrange" && fmt.Sprint(there) != "0" {
				reads++
			}
		}, nil)
		watch(p.Operator, func(string, bool) {}, func(string) {
			if p.isMending() {
				calls++
				_, _ = q.look(m.Context())
			}
		})
		m.look(p)
		m.look(p)
		if m.look(q); calls < 10 || reads > 2 {
			t.Errorf("after %d calls, it was read %d times", calls, reads)
		}
		if h, err := q.headOf(m.Context(), q.members[0].Shard); h.sum != q.overrides.state.sum {
			t.Errorf("not all were written back, %v", err)
		}
	}, 0)
}

// TestCaddyThatStoodStill for longer than tombstones are remembered brings nothing back.
func TestCaddyThatStoodStill(t *testing.T) {
	inModel(t, func(m *model, p *modelCaddy) {
		m.meet(1, 1)
		w, removal := m.caddys[1], limitsOf("x", 1)
		removal[0].Removes = true
		mustChange(m.T, w.Operator, removal)
		for range 93 * 6 {
			time.Sleep(4 * time.Hour)
			m.look(w)
		}
		for range 4 {
			m.look(p)
			m.look(w)
			time.Sleep(mendPeriod + time.Second)
		}
		if n := len(w.overrides.state.all); n > 0 {
			t.Errorf("%d are back", n)
		}
	}, 0, 0)
}

// TestShardsThatAreSlow at a first look: a silent one leaves time to read another one, and the first answer is awaited.
func TestShardsThatAreSlow(t *testing.T) {
	for name, delays := range map[string][2]time.Duration{"all are": {200 * time.Millisecond, 200 * time.Millisecond}, "one is silent": {0, time.Hour}} {
		inModel(t, func(m *model, p *modelCaddy) {
			m.meet(1, 1)
			ask := p.ask
			p.ask = func(ctx context.Context, shard *Shard, key string, reads bool, about func(isReplica bool) *wire.Command) (*wire.Command, error) {
				if cmd := about(false); !cmd.IsScript() && cmd.Args()[0] == "hmget" && !wire.Pause(ctx, delays[slices.Index(m.shards, p.at[shard])]) {
					return nil, ctx.Err()
				}
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				return ask(ctx, shard, key, reads, about)
			}
			p.overrides = &Overrides{}
			ctx, cancel := context.WithTimeout(m.Context(), 250*time.Millisecond)
			defer cancel()
			set, _ := p.Overrides(ctx)
			if set.Len() != 1 {
				t.Errorf("%s: nothing is known", name)
			}
			synctest.Wait()
		}, 0, 0)
	}
}
