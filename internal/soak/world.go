package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const master = "limits"

// world is the shards: a primary with a replica behind proxies, one that
// sentinels watch, and a cluster.
type world struct {
	static    *redistest.Shard
	proxies   []*redistest.Proxy
	watched   *redistest.Shard
	sentinels *redistest.Sentinels
	cluster   *redistest.Cluster
	// unfinished are the migrations of slots that a fault interrupted.
	unfinished []migration
	stops      []func() error
}

// migration is a slot of the cluster that moves from one node to another.
type migration struct {
	slot     int
	from, to *redistest.Server
}

// lasting makes servers keep, if their process is killed, all that they have
// replied to.
var lasting = []string{"--appendonly", "yes", "--appendfsync", "no"}

// longDown is how long sentinels and nodes wait before they replace a primary:
// longer than any fault lasts, for what its replicas lack then is lost without
// anybody's knowledge.
const longDown = time.Minute

func launchWorld() (w *world, err error) {
	w = new(world)
	defer func() {
		if err != nil {
			err = errors.Join(err, w.stop())
		}
	}()
	if w.static, err = redistest.LaunchShard(1, lasting...); err != nil {
		return w, err
	}
	w.stops = append(w.stops, w.static.Stop)
	for _, server := range []*redistest.Server{w.static.Primary, w.static.Replicas[0]} {
		proxy, err := redistest.NewProxy(server.Addr())
		if err != nil {
			return w, err
		}
		w.proxies = append(w.proxies, proxy)
		w.stops = append(w.stops, proxy.Close)
	}
	if w.watched, err = redistest.LaunchShard(2, lasting...); err != nil {
		return w, err
	}
	w.stops = append(w.stops, w.watched.Stop)
	if w.sentinels, err = redistest.LaunchSentinels(master, w.watched.Primary, 3, redistest.SentinelOptions{DownAfter: longDown}); err != nil {
		return w, err
	}
	w.stops = append(w.stops, w.sentinels.Stop)
	nodes := append(lasting[:len(lasting):len(lasting)], "--cluster-node-timeout", fmt.Sprint(longDown.Milliseconds()))
	if w.cluster, err = redistest.LaunchCluster(3, 1, nodes...); err != nil {
		return w, err
	}
	w.stops = append(w.stops, w.cluster.Stop)
	return w, nil
}

func (w *world) stop() error {
	var errs []error
	for i := len(w.stops) - 1; i >= 0; i-- {
		errs = append(errs, w.stops[i]())
	}
	return errors.Join(errs...)
}

// config is what a Caddyfile says of the shards.
func (w *world) config() string {
	return strings.Join([]string{
		"shard static {\nprimary " + w.proxies[0].Addr() + "\nreplica " + w.proxies[1].Addr() + "\n}",
		"shard watched {\nsentinel " + master + " " + strings.Join(w.sentinels.Addrs(), " ") + "\n}",
		"shard cluster {\ncluster " + strings.Join(w.cluster.Addrs()[:2], " ") + "\n}",
	}, "\n")
}

// servers are all that may hold data.
func (w *world) servers() []*redistest.Server {
	all := append([]*redistest.Server{w.static.Primary, w.watched.Primary}, w.static.Replicas...)
	return append(append(all, w.watched.Replicas...), w.cluster.Nodes...)
}

// mend ends all faults, and waits until every shard is whole: the cluster agrees
// on its slots, no slot is half moved, replicas are in sync, and the sentinels see
// all of them.
func (w *world) mend(ctx context.Context) error {
	var errs []error
	for _, p := range w.proxies {
		errs = append(errs, p.Up(), p.Pass(), p.Delay(0))
	}
	for _, s := range append(w.servers(), w.sentinels.Nodes...) {
		if s.Resume() != nil || s.Client().Ping(ctx).Err() != nil {
			errs = append(errs, s.Restart())
		}
	}
	for _, s := range w.servers() {
		errs = append(errs, s.Client().ConfigSet(ctx, "maxmemory", "0").Err(), s.Client().ClientUnpause(ctx).Err())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := w.cluster.WaitUntilOK(ctx); err != nil {
		return err
	}
	for _, m := range w.unfinished {
		if err := w.finish(ctx, m); err != nil {
			return err
		}
	}
	if err := w.cluster.WaitUntilOK(ctx); err != nil {
		return err
	}
	if err := w.static.WaitReplicated(ctx); err != nil {
		return err
	}
	return w.sentinels.WaitForReplicas(ctx, len(w.watched.Replicas))
}

// finish completes a migration, unless the slot has arrived.
func (w *world) finish(ctx context.Context, m migration) error {
	owner, err := w.cluster.Owner(ctx, m.slot)
	if err != nil || owner == m.to {
		return err
	}
	return w.cluster.MigrateSlot(ctx, m.slot, m.from, m.to)
}
