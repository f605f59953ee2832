// Command demo runs two Caddys that share limits in two Redis shards, each with
// a replica, sends them 200,000 requests of 500 clients, and compares what
// Redis counted with what was served. Then it tells where to send requests by
// hand, until it is interrupted.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/loadgen"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

var (
	requests = flag.Int64("requests", 200_000, "how many requests are sent")
	clients  = flag.Int64("clients", 500, "by how many clients")
	once     = flag.Bool("once", false, "end after the comparison")
)

const (
	shards = 2
	caddys = 2
)

const caddyfile = `{
	admin %s
	persist_config off
	log {
		level WARN
	}
	rate_limit {
		store redis {
			shard a {
				primary %s
				replica %s
			}
			shard b {
				primary %s
				replica %s
			}
		}
	}
}

http://%s {
	rate_limit {header.X-Api-Key} 5000 1h
	respond "Hello.
"
}
`

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "demo")
	if err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	defer os.RemoveAll(dir)

	var redis []*redistest.Shard
	for i := range shards {
		shard, err := redistest.LaunchShard(1)
		if err != nil {
			return err
		}
		defer func() { _ = shard.Stop() }()
		redis = append(redis, shard)
		fmt.Printf("shard %c: primary %s, replica %s\n", 'a'+i, shard.Primary.Addr(), shard.Replicas[0].Addr())
	}
	addrs, err := startCaddys(dir, redis)
	if err != nil {
		return err
	}
	for _, addr := range addrs {
		defer addr.process.Stop()
	}

	served, err := load(ctx, addrs)
	if err != nil {
		return err
	}
	if err := compare(ctx, redis, served); err != nil {
		return err
	}
	if *once {
		return nil
	}
	fmt.Println("\nTry it, and end it with Ctrl-C:")
	for _, addr := range addrs {
		fmt.Printf("  curl -i -H 'X-Api-Key: me' http://%s/\n", addr.site)
	}
	fmt.Printf("  curl -s http://%s/metrics | grep rate_limit\n", addrs[0].admin)
	<-ctx.Done()
	return nil
}

// instance is a running Caddy.
type instance struct {
	site, admin string
	process     *caddyproc.Process
}

func startCaddys(dir string, redis []*redistest.Shard) (instances []instance, err error) {
	fmt.Println("building caddy")
	binary, err := caddyproc.Build(dir)
	if err != nil {
		return nil, err
	}
	free, err := caddyproc.FreeAddrs(2 * caddys)
	if err != nil {
		return nil, err
	}
	for i := range caddys {
		c := instance{site: free[2*i], admin: free[2*i+1]}
		config := fmt.Sprintf(caddyfile, c.admin,
			redis[0].Primary.Addr(), redis[0].Replicas[0].Addr(),
			redis[1].Primary.Addr(), redis[1].Replicas[0].Addr(), c.site)
		c.process, err = caddyproc.Start(binary, filepath.Join(dir, strconv.Itoa(i)), config, os.Stderr, c.site)
		if err != nil {
			for _, other := range instances {
				other.process.Stop()
			}
			return nil, err
		}
		fmt.Printf("caddy %d: http://%s\n", i+1, c.site)
		instances = append(instances, c)
	}
	return instances, nil
}

// load sends the requests to all Caddys at the same time and returns how many
// of each client were served.
func load(ctx context.Context, instances []instance) (served map[string]int64, err error) {
	fmt.Printf("sending %d requests of %d clients\n", *requests, *clients)
	served = map[string]int64{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	errs := make([]error, len(instances))
	results := make([]loadgen.Result, len(instances))
	for i, c := range instances {
		wg.Go(func() {
			results[i], errs[i] = loadgen.Run(ctx, loadgen.Options{
				Addr: c.site, Header: "X-Api-Key", Connections: 32, Duration: 10 * time.Minute,
				Requests: *requests / int64(len(instances)),
				Key:      func(n int64) string { return "client-" + strconv.FormatInt(n%*clients, 10) },
				OnResponse: func(key string, resp *http.Response) {
					if resp.StatusCode == http.StatusOK {
						mu.Lock()
						served[key]++
						mu.Unlock()
					}
				},
			})
		})
	}
	wg.Wait()
	for i, r := range results {
		if errs[i] != nil {
			return nil, fmt.Errorf("send load: %w", errs[i])
		}
		fmt.Printf("caddy %d answered %d requests in %v, %.0f per second, by status %v\n",
			i+1, r.Requests, r.Elapsed.Round(time.Millisecond), float64(r.Requests)/r.Elapsed.Seconds(), r.Status)
	}
	return served, ctx.Err()
}

// compare reads every bucket back from Redis.
func compare(ctx context.Context, redis []*redistest.Shard, served map[string]int64) error {
	// The last charges may be on their way still.
	time.Sleep(time.Second)
	differ, total, buckets := 0, int64(0), 0
	for i, shard := range redis {
		here := 0
		keys := shard.Primary.Client().Scan(ctx, 0, "rl:*", 1000).Iterator()
		for keys.Next(ctx) {
			count, err := shard.Primary.Client().HGet(ctx, keys.Val(), "c").Int64()
			if err != nil {
				return fmt.Errorf("read %s: %w", keys.Val(), err)
			}
			client := keys.Val()[strings.LastIndexByte(keys.Val(), ':')+1:]
			if count != served[client] {
				differ++
				fmt.Printf("  %s: Redis counted %d, served were %d\n", client, count, served[client])
			}
			total += count
			here++
		}
		if err := keys.Err(); err != nil {
			return fmt.Errorf("list buckets: %w", err)
		}
		buckets += here
		fmt.Printf("shard %c holds %d buckets\n", 'a'+i, here)
	}
	sum := int64(0)
	for _, n := range served {
		sum += n
	}
	fmt.Printf("Redis counted %d requests in %d buckets; %d requests of %d clients were served; %d buckets differ\n",
		total, buckets, sum, len(served), differ)
	if differ > 0 || buckets != len(served) {
		return fmt.Errorf("the counts differ")
	}
	return nil
}
