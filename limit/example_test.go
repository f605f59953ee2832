package limit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/limit"
)

// check ends an example that cannot go on.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

// asWorker, set to the address of a Redis, makes the test binary be a worker.
const asWorker = "SHARDLIMIT_TEST_AS_WORKER"

// work is a process of workers: it handles jobs while the limit lets it, and prints how many.
func work(addr string) {
	store, err := limit.OpenRedis(limit.Redis{
		CheckTimeout: 10 * time.Second,
		Shards:       []limit.Shard{{Primary: addr}},
	})
	check(err)
	defer store.Close()
	// A zone of Caddy with this name, key and window would spend the same limit.
	mails, err := store.Limit(limit.Config{Name: "mails", Key: "{header.X-Tenant}", Events: 100, Window: time.Hour})
	check(err)

	jobs := make(chan string)
	var sent atomic.Int64
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for tenant := range jobs {
				if ok, err := mails.Allow(context.Background(), tenant); err == nil && ok {
					sent.Add(1)
				}
			}
		})
	}
	for range 80 {
		jobs <- "acme"
	}
	close(jobs)
	workers.Wait()
	fmt.Println(sent.Load())
}

// startWorker starts this program again as a worker, and returns what it prints.
func startWorker(addr string) (string, error) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asWorker+"="+addr, "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	process.EndWithParent(cmd)
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
}

// Two processes with 80 jobs each share a limit of 100.
func Example_workerPool() {
	redis, err := redistest.Launch()
	check(err)
	defer func() { check(redis.Stop()) }()

	var sent atomic.Int64
	var processes sync.WaitGroup
	for range 2 {
		processes.Go(func() {
			text, err := startWorker(redis.Addr())
			check(err)
			n, err := strconv.ParseInt(text, 10, 64)
			check(err)
			sent.Add(n)
		})
	}
	processes.Wait()
	fmt.Println(sent.Load(), "of 160 jobs")
	// Output: 100 of 160 jobs
}

// A crawler asks each host for at most 20 pages in a second, and stops where a host says so.
func Example_crawler() {
	redis, err := redistest.Launch()
	check(err)
	defer func() { check(redis.Stop()) }()
	store, err := limit.OpenRedis(limit.Redis{CheckTimeout: 10 * time.Second, Shards: []limit.Shard{{Primary: redis.Addr()}}})
	check(err)
	defer store.Close()
	hosts, err := store.Limit(limit.Config{Name: "hosts", Algorithm: limit.GCRA, Events: 20, Burst: 5, Window: time.Second})
	check(err)
	client := &http.Client{Transport: &limit.Transport{Limit: hosts}}

	// The second site is overloaded at first.
	var asked atomic.Int64
	calm := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer calm.Close()
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 1 {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer busy.Close()

	var pages sync.WaitGroup
	var fetched atomic.Int64
	for _, site := range []string{calm.URL, busy.URL} {
		for page := range 8 {
			pages.Go(func() {
				for status := 0; status != http.StatusOK; {
					// Each request waits until its host may be asked again.
					resp, err := client.Get(fmt.Sprint(site, "/", page))
					check(err)
					check(resp.Body.Close())
					status = resp.StatusCode
				}
				fetched.Add(1)
			})
		}
	}
	pages.Wait()
	fmt.Println(fetched.Load(), "pages")
	// Output: 16 pages
}

// A client of a language model spends tokens by an estimate, and corrects it by the answer.
func Example_llmClient() {
	redis, err := redistest.Launch()
	check(err)
	defer func() { check(redis.Stop()) }()
	store, err := limit.OpenRedis(limit.Redis{CheckTimeout: 10 * time.Second, Shards: []limit.Shard{{Primary: redis.Addr()}}})
	check(err)
	defer store.Close()
	requests, err := store.Limit(limit.Config{Name: "requests", Events: 1000, Window: time.Hour})
	check(err)
	tokens, err := store.Limit(limit.Config{Name: "tokens", Events: 10_000, Window: time.Hour})
	check(err)
	client := &http.Client{Transport: &limit.Transport{Limit: requests}}

	// The model refuses the second request.
	var asked atomic.Int64
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 2 {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		fmt.Fprint(w, `{"usage": {"total_tokens": 120}}`)
	}))
	defer model.Close()

	ask := func(ctx context.Context, prompt string) error {
		const mostTokens = 500
		reserved, err := tokens.WaitReserve(ctx, "team-a", int64(len(prompt)/4)+mostTokens)
		if err != nil {
			return err
		}
		// After Commit it does nothing.
		defer func() { _ = reserved.Release(context.WithoutCancel(ctx)) }()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, model.URL, strings.NewReader(prompt))
		if err != nil {
			return err
		}
		resp, err := client.Do(r)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		var answer struct {
			Usage struct {
				Total int64 `json:"total_tokens"`
			} `json:"usage"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
			return err
		}
		return reserved.Commit(ctx, answer.Usage.Total)
	}
	for range 3 {
		fmt.Println(ask(context.Background(), "Why is the sky blue?"))
	}
	spent, err := tokens.Take(context.Background(), "team-a", 0)
	check(err)
	fmt.Println(spent.Used, "tokens")
	// Output:
	// <nil>
	// 429 Too Many Requests
	// <nil>
	// 240 tokens
}
