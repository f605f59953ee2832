package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

var background = context.Background()

// fault is something that goes wrong for a time.
type fault struct {
	name  string
	bring func(d time.Duration) error
}

// faults are those that lose nothing which a primary has replied to: what Redis
// itself loses in a failover nobody can count.
func (w *world) faults(rng *rand.Rand) []fault {
	list := []fault{
		{"static shard: network cut", during(w.proxies[0].Down, w.proxies[0].Up)},
		{"static shard: replica's network cut", during(w.proxies[1].Down, w.proxies[1].Up)},
		{"static shard: replies swallowed", during(w.proxies[0].SwallowReplies, w.proxies[0].Pass)},
		{"static shard: all swallowed", during(w.proxies[0].SwallowAll, w.proxies[0].Pass)},
		{"static shard: connections cut", func(d time.Duration) error {
			for start := time.Now(); time.Since(start) < d; time.Sleep(d / 20) {
				if err := w.proxies[0].Cut(); err != nil {
					return err
				}
			}
			return nil
		}},
		{"static shard: packets 200 ms late", during(
			func() error { return w.proxies[0].Delay(100 * time.Millisecond) },
			func() error { return w.proxies[0].Delay(0) })},
		killed("static primary", w.static.Primary), killed("static replica", w.static.Replicas[0]),
		paused("static primary", w.static.Primary), paused("static replica", w.static.Replicas[0]),
		killed("watched primary", w.watched.Primary), paused("watched primary", w.watched.Primary),
		killed("watched replica", w.watched.Replicas[0]), paused("watched replica", w.watched.Replicas[1]),
		killed("a sentinel", w.sentinels.Nodes[0]), paused("a sentinel", w.sentinels.Nodes[1]),
	}
	for i, node := range w.cluster.Nodes {
		list = append(list, killed(fmt.Sprint("cluster node ", i), node), paused(fmt.Sprint("cluster node ", i), node))
	}
	for i, server := range []*redistest.Server{w.static.Primary, w.watched.Primary, w.cluster.Nodes[0]} {
		name := []string{"static primary", "watched primary", "cluster node 0"}[i]
		list = append(list,
			fault{name + ": scripts flushed", func(time.Duration) error { return server.Client().ScriptFlush(background).Err() }},
			fault{name + ": out of memory", during(
				func() error { return server.Client().ConfigSet(background, "maxmemory", "1").Err() },
				func() error { return server.Client().ConfigSet(background, "maxmemory", "0").Err() })},
			fault{name + ": clients paused", func(d time.Duration) error {
				return server.Client().Do(background, "CLIENT", "PAUSE", d.Milliseconds(), "ALL").Err()
			}})
	}
	return append(list, fault{"cluster: a slot moves", func(time.Duration) error { return w.moveSlot(rng) }})
}

// during is a fault that begins and ends.
func during(begin, end func() error) func(time.Duration) error {
	return func(d time.Duration) error {
		if err := begin(); err != nil {
			return err
		}
		time.Sleep(d)
		return end()
	}
}

func killed(name string, s *redistest.Server) fault {
	return fault{name + " killed", during(s.Kill, s.Restart)}
}

func paused(name string, s *redistest.Server) fault {
	return fault{name + " silent", during(s.Pause, s.Resume)}
}

// moveSlot moves a slot with a bucket to the first node, which takes all.
func (w *world) moveSlot(rng *rand.Rand) error {
	from := w.cluster.Nodes[1+rng.IntN(2)]
	key, err := from.Client().RandomKey(background).Result()
	if err != nil {
		return fmt.Errorf("find a slot to move: %w", err)
	}
	ctx, cancel := context.WithTimeout(background, 20*time.Second)
	defer cancel()
	m := migration{redistest.Keyslot(key), from, w.cluster.Nodes[0]}
	err = w.cluster.MigrateSlot(ctx, m.slot, m.from, m.to)
	if err != nil {
		w.unfinished = append(w.unfinished, m)
	}
	return err
}

// tale is what went wrong, and how often.
type tale struct{ times map[string]int }

// bringFaults brings faults, one after the other, until ctx ends.
func bringFaults(ctx context.Context, w *world, rng *rand.Rand) *tale {
	t := &tale{times: map[string]int{}}
	faults := w.faults(rng)
	for ctx.Err() == nil {
		select {
		case <-time.After(time.Duration(rng.Int64N(int64(2 * *pause)))):
		case <-ctx.Done():
			return t
		}
		f := faults[rng.IntN(len(faults))]
		if err := f.bring(time.Duration(200+rng.IntN(4000)) * time.Millisecond); err != nil && !errors.Is(err, context.Canceled) {
			fmt.Printf("%s: %v\n", f.name, err)
		}
		t.times[f.name]++
	}
	return t
}

func (t *tale) String() string {
	var lines []string
	total := 0
	for name, n := range t.times {
		lines = append(lines, fmt.Sprintf("  %3d × %s", n, name))
		total += n
	}
	slices.Sort(lines)
	return fmt.Sprintf("%d faults:\n%s", total, strings.Join(lines, "\n"))
}
