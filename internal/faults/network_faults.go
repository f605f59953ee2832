package main

import (
	"context"
	"errors"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const (
	// delay is how much later replies come.
	delay = 200 * time.Millisecond
	// repliesBeforeReset, in bytes, are a handful of replies.
	repliesBeforeReset = 1000
)

// networkFaults are those of the network between Caddy and all servers.
var networkFaults = []*fault{
	{
		name: "network cut", launch: proxied(2),
		bring: lasts(onProxies((*redistest.Proxy).Down), onProxies((*redistest.Proxy).Up)), checks: away, primary: away,
	},
	{
		name: "replies delayed by 200 ms", launch: proxied(2),
		bring: lasts(
			onProxies(func(p *redistest.Proxy) error { return p.Delay(delay) }),
			onProxies((*redistest.Proxy).Pass)),
		checks: partly, primary: partly,
	},
	{
		name: "nothing arrives, connections stay", launch: proxied(2),
		bring:  lasts(onProxies((*redistest.Proxy).SwallowAll), onProxies((*redistest.Proxy).Pass)),
		checks: away, primary: away,
	},
	{
		name: "replies do not arrive", launch: proxied(2),
		bring:  lasts(onProxies((*redistest.Proxy).SwallowReplies), onProxies((*redistest.Proxy).Pass)),
		checks: away, primary: away,
	},
	{
		name: "connections reset in mid-reply", launch: proxied(2),
		bring: lasts(
			onProxies(func(p *redistest.Proxy) error { return p.ResetReplies(repliesBeforeReset) }),
			onProxies((*redistest.Proxy).Pass)),
		checks: partly, primary: partly,
	},
}

// onProxies is a step that does something to all proxies.
func onProxies(do func(*redistest.Proxy) error) func(context.Context, *shard) error {
	return func(_ context.Context, s *shard) error {
		var errs []error
		for _, proxy := range s.proxies {
			errs = append(errs, do(proxy))
		}
		return errors.Join(errs...)
	}
}
