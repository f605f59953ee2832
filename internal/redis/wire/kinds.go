package wire

import (
	"cmp"
	"context"
	"fmt"
	"net"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// The problems of a server that cannot name others, before what it is.
const (
	noSentinel = "it is no sentinel, but "
	noNode     = "it is no node of a Redis Cluster, but "
)

// otherKind returns the fault of a server whose refusal of SENTINEL or CLUSTER shows that it is of another kind,
// or the refusal. process sends a command there.
func otherKind(ctx context.Context, refusal error, addr string, opts *Options, process func(ctx context.Context, cmd goredis.Cmder) error) error {
	m, _ := MeaningOf(refusal)
	if m.Kind == store.KindAuth || m.Hint&(Lacking|clusterless) == 0 {
		return refusal
	}
	info := goredis.NewStringCmd(ctx, "info")
	if process(ctx, info) != nil {
		return refusal
	}
	if f := KindFault(func(name string) string { return fieldOf(info.Val(), name) }, addr, opts); f != nil {
		return f
	}
	return refusal
}

// KindFault returns the fault of a server at addr, with these fields of INFO, that was given as a sentinel or as a
// node of a cluster and is of another kind, or nil.
func KindFault(field func(name string) string, addr string, opts *Options) *Fault {
	given, problem := "sentinel", noSentinel
	if opts.Sentinel == nil {
		given, problem = "cluster", noNode
	}
	switch mode := cmp.Or(field("redis_mode"), field("server_mode")); {
	case mode == given:
		return nil
	case mode == "sentinel":
		return &Fault{Problem: problem + "a sentinel", Remedy: "write sentinel, the name of the master and this address in place of cluster"}
	case mode == "cluster":
		return &Fault{Problem: problem + "a node of a Redis Cluster", Remedy: fmt.Sprintf("write cluster %s in place of sentinel", addr)}
	case mode != "standalone":
		return nil
	case field("role") == "slave":
		primary := net.JoinHostPort(field("master_host"), field("master_port"))
		return &Fault{Problem: problem + "a replica of " + primary, Remedy: fmt.Sprintf("write primary %s and replica %s in place of %s", primary, addr, given)}
	}
	return &Fault{Problem: problem + "a standalone server", Remedy: fmt.Sprintf("write primary %s in place of %s", addr, given)}
}
