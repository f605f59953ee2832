package wire

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// kinds has, by address, the servers that have refused SENTINEL or CLUSTER.
type kinds struct {
	mu  sync.Mutex
	met map[string]verdict
}

// verdict is what INFO has shown to be wrong with a server, or nil, and when.
type verdict struct {
	fault *Fault
	at    time.Time
}

// faultOf returns the fault of a server whose refusal of SENTINEL or CLUSTER shows that it is of another kind,
// or the refusal. process sends a command there, after FollowAfter again.
func (k *kinds) faultOf(ctx context.Context, refusal error, addr string, opts *Options, process func(ctx context.Context, cmd goredis.Cmder) error) error {
	m, _ := MeaningOf(refusal)
	if m.Kind == store.KindAuth || m.Hint&(Lacking|clusterless) == 0 {
		return refusal
	}
	k.mu.Lock()
	v, isKnown := k.met[addr]
	k.mu.Unlock()
	if !isKnown || time.Since(v.at) >= FollowAfter {
		info := goredis.NewStringCmd(ctx, "info")
		if err := process(ctx, info); err != nil && !IsReply(err) {
			return refusal
		}
		v = verdict{KindFault(fieldsOf(info.Val()), addr, opts), time.Now()}
		k.mu.Lock()
		if k.met == nil {
			k.met = map[string]verdict{}
		}
		maps.DeleteFunc(k.met, func(_ string, v verdict) bool { return time.Since(v.at) >= FollowAfter })
		k.met[addr] = v
		k.mu.Unlock()
	}
	if v.fault == nil {
		return refusal
	}
	return v.fault
}

// KindFault returns the fault of a server at addr, with these fields of INFO, that was given as a sentinel or as a
// node of a cluster and is of another kind, or nil.
func KindFault(field func(name string) string, addr string, opts *Options) *Fault {
	option, given, problem, n := "cluster", "node", "it is no node of a Redis Cluster, but ", len(opts.Cluster)
	if opts.Sentinel != nil {
		option, given, problem, n = "sentinel", "sentinel", "it is no sentinel, but ", len(opts.Sentinel.Addrs)
	}
	var kind, instead string
	switch mode := cmp.Or(field("redis_mode"), field("server_mode")); {
	case mode == option:
		return nil
	case mode == "sentinel":
		kind, instead = "a sentinel", "sentinel, the name of the master and this address"
	case mode == "cluster":
		kind, instead = "a node of a Redis Cluster", "cluster "+addr
	case mode != "standalone":
		return nil
	case field("role") == "slave":
		primary := net.JoinHostPort(fmt.Sprintf("%.100s", field("master_host")), field("master_port"))
		kind, instead = "a replica of "+primary, fmt.Sprintf("primary %s and replica %s", primary, addr)
	default:
		kind, instead = "a standalone server", "primary "+addr
	}
	f := &Fault{Code: "role", Problem: problem + kind, Remedy: fmt.Sprintf("give the %s's address, or write %s in place of %s", given, instead, option)}
	if n > 1 {
		// The others may be right.
		f.Remedy = fmt.Sprintf("remove its address, or give the %s's in its place", given)
	}
	return f
}
