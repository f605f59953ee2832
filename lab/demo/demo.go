// Package demo runs two Caddys that share limits in two Redis shards, each with a
// replica, sends them 200,000 requests of 500 clients, and compares the counts in Redis
// with the served requests. Then it waits for requests by hand, until it is interrupted.
package demo

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/lab/shards"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

var (
	flags    = flag.NewFlagSet("demo", flag.ExitOnError)
	requests = flags.Int64("requests", 200_000, "how many requests are sent")
	clients  = flags.Int64("clients", 500, "by how many clients")
	once     = flags.Bool("once", false, "end after the comparison")
)

// Run runs the demonstration.
func Run(ctx context.Context, args []string) (err error) {
	_ = flags.Parse(args) // it exits if a flag is invalid
	var redis []*shards.Shard
	config := site.Config{
		Log:    "level WARN",
		Stderr: true,
		Stores: "store redis {\n",
		Routes: []string{"rate_limit {header.X-Api-Key} 5000 1h\nrespond \"Hello.\n\""},
	}
	for _, name := range []string{"a", "b"} {
		shard, err := shards.Static(1)
		if err != nil {
			return err
		}
		defer func() { _ = shard.Stop() }()
		redis = append(redis, shard)
		config.Stores += shard.Text(name)
		fmt.Printf("shard %s: primary %s, replica %s\n", name, shard.Primary().Addr(), shard.Replicas()[0].Addr())
	}
	config.Stores += "}"
	fmt.Println("building caddy")
	w, err := site.Open("")
	if err != nil {
		return err
	}
	defer w.Close()
	sites, err := w.StartAll(2, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.StopAll(sites)) }()
	for i, s := range sites {
		fmt.Printf("caddy %d: http://%s\n", i+1, s.Addrs[0])
	}

	served, err := load(ctx, sites)
	if err != nil {
		return err
	}
	if err := compare(ctx, redis, served); err != nil || *once {
		return err
	}
	fmt.Println("\nTry it, and end it with Ctrl-C:")
	for _, s := range sites {
		fmt.Printf("  curl -i -H 'X-Api-Key: me' http://%s/\n", s.Addrs[0])
	}
	fmt.Printf("  curl -s http://%s/metrics | grep rate_limit\n", sites[0].Admin)
	<-ctx.Done()
	return nil
}

// load sends the requests to all Caddys at the same time, and returns the number of served
// requests by client.
func load(ctx context.Context, sites []*site.Site) (served map[string]int64, err error) {
	fmt.Printf("sending %d requests of %d clients\n", *requests, *clients)
	served = map[string]int64{}
	var mu sync.Mutex
	results := make([]loadgen.Result, len(sites))
	if err := traffic.Together(len(sites), func(i int) (err error) {
		results[i], err = loadgen.Run(ctx, loadgen.Options{
			Addr: sites[i].Addrs[0], Header: "X-Api-Key", Connections: 32, Duration: 10 * time.Minute,
			Requests: *requests / int64(len(sites)),
			Key:      func(n int64) string { return "client-" + strconv.FormatInt(n%*clients, 10) },
			OnResponse: func(key string, resp *http.Response) {
				if resp.StatusCode == http.StatusOK {
					mu.Lock()
					served[key]++
					mu.Unlock()
				}
			},
		})
		return err
	}); err != nil {
		return nil, fmt.Errorf("send load: %w", err)
	}
	for i, r := range results {
		fmt.Printf("caddy %d answered %d requests in %v, %.0f per second, by status %v\n",
			i+1, r.Requests, r.Elapsed.Round(time.Millisecond), float64(r.Requests)/r.Elapsed.Seconds(), r.Status)
	}
	return served, ctx.Err()
}

func compare(ctx context.Context, redis []*shards.Shard, served map[string]int64) error {
	time.Sleep(time.Second) // for the charges in flight
	differ, total, count, sum := 0, int64(0), 0, int64(0)
	for i, shard := range redis {
		buckets, err := shard.Buckets(ctx, "*")
		if err != nil {
			return err
		}
		for client, b := range buckets {
			if b.Count != served[client] {
				differ++
				fmt.Printf("  %s: Redis counted %d, served were %d\n", client, b.Count, served[client])
			}
			total += b.Count
		}
		count += len(buckets)
		fmt.Printf("shard %c holds %d buckets\n", 'a'+i, len(buckets))
	}
	for _, n := range served {
		sum += n
	}
	fmt.Printf("Redis counted %d requests in %d buckets; %d requests of %d clients were served; %d buckets differ\n",
		total, count, sum, len(served), differ)
	if differ > 0 || count != len(served) {
		return errors.New("the counts differ")
	}
	return nil
}
