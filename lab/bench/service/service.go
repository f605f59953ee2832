// Package service compares the handler rate_limit_service with envoyproxy/ratelimit. Each is a process of its
// own, counts on the same Redis by the same limits, and is asked by gRPC over as many connections. All take
// turns, several rounds; a figure that is compared is the ratio of both in the same round. A bench is all
// processes, a trial is a server with the question that it is asked, and a Result holds the measurements.
package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
)

// Options say how much is measured.
type Options struct {
	Rounds int           // of which the median counts; 0 means 9
	More   int           // most rounds that are added where these do not decide a goal
	Length time.Duration // of each trial in a round; 0 means two seconds
	Caddy  string        // the path of a Caddy with this module; one is built if it is empty
}

// Run measures everything, and writes its progress to progress.
func Run(ctx context.Context, opts Options, progress io.Writer) (_ *Result, err error) {
	opts.Rounds, opts.Length = cmp.Or(opts.Rounds, 9), cmp.Or(opts.Length, 2*time.Second)
	b, err := open(opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	r := &Result{opts: opts, samples: map[string][]sample{}}
	// The first questions open windows, and show that the answers are right.
	for _, t := range b.trials {
		if err := t.greet(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", t.name, err)
		}
	}
	round := func(n int, those []*trial) error {
		for i := range those {
			t := those[(n+i)%len(those)]
			s, err := b.measure(ctx, t)
			if err != nil {
				return fmt.Errorf("%s: %w", t.name, err)
			}
			r.samples[t.name] = append(r.samples[t.name], s)
		}
		return nil
	}
	for n := range opts.Rounds {
		fmt.Fprintf(progress, "rate limit services: round %d of %d\n", n+1, opts.Rounds)
		if err := round(n, b.trials); err != nil {
			return nil, err
		}
	}
	undecided := func() (those []*trial) {
		wanted := r.undecided()
		for _, t := range b.trials {
			if slices.Contains(wanted, t.name) {
				those = append(those, t)
			}
		}
		return those
	}
	return r, report.AddRounds(opts.More, undecided, round)
}

// The names of the trials.
const (
	Admitted        = "rate_limit_service, admitted"
	Batched         = "rate_limit_service, admitted, `batch auto`"
	Refused         = "rate_limit_service, refused"
	floor           = "rate_limit_service, `unlimited`: no decision"
	peerAdmitted    = "envoyproxy/ratelimit, admitted"
	peerRefused     = "envoyproxy/ratelimit, refused"
	peerRefusedHere = "envoyproxy/ratelimit with its local cache, refused"
)

// names are those of the trials in the order of the table.
var names = []string{floor, Admitted, Batched, peerAdmitted, Refused, peerRefused, peerRefusedHere}

// clients are those that no limit stops. All refused questions are of one.
const clients = 10_000

// full is the key of what is refused.
const full = "full"

// The limits of both configs. The windows of envoyproxy/ratelimit are of the clock, so that shorter ones
// could end while refusals are measured.
const (
	oursText = `rate_limit_service {
	domain bench {
		descriptor client zone client
		descriptor batched zone batched
		descriptor full zone full
		descriptor free unlimited
	}
	zone client {
		events 100000000
		window 1h
	}
	zone batched {
		events 100000000
		window 1h
		batch auto
	}
	zone full {
		events 1
		window 1h
	}
}`
	peersText = `domain: bench
descriptors:
- key: client
  rate_limit: {unit: year, requests_per_unit: 100000000}
- key: full
  rate_limit: {unit: year, requests_per_unit: 1}
`
)

// bench is all processes.
type bench struct {
	opts   Options
	shop   *site.Workshop
	redis  *redistest.Server
	ours   *site.Site
	peers  []*caddyproc.Process
	trials []*trial
}

func open(opts Options) (_ *bench, err error) {
	b := &bench{opts: opts}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.shop, err = site.Open(opts.Caddy); err != nil {
		return nil, err
	}
	if b.redis, err = redistest.Launch(); err != nil {
		return nil, err
	}
	b.ours, err = b.shop.Start(site.Config{
		Log: "level ERROR", Stderr: true, Servers: "protocols h1 h2c", Routes: []string{oursText},
		// Its timeouts do not pass on a busy machine.
		Stores: "store redis {\nshard a {\nprimary " + b.redis.Addr() + "\n}\ncheck_timeout 5s\ncharge_timeout 5s\n}",
	})
	if err != nil {
		return nil, err
	}
	program := filepath.Join(b.shop.Dir, "ratelimit")
	if err := buildPeer(program); err != nil {
		return nil, err
	}
	plain, plainAddr, err := b.startPeer(program)
	if err != nil {
		return nil, err
	}
	cached, cachedAddr, err := b.startPeer(program, "LOCAL_CACHE_SIZE_IN_BYTES=10000000")
	if err != nil {
		return nil, err
	}
	// Commands in scripts count in Redis as well.
	scripts, counters := []string{"evalsha", "eval"}, []string{"incrby", "expire"}
	for _, t := range []struct {
		name, addr string
		server     *caddyproc.Process
		commands   []string
		key        string
	}{
		{floor, b.ours.Addrs[0], b.ours.Process, scripts, "free"},
		{Admitted, b.ours.Addrs[0], b.ours.Process, scripts, "client"},
		{Batched, b.ours.Addrs[0], b.ours.Process, scripts, "batched"},
		{Refused, b.ours.Addrs[0], b.ours.Process, scripts, full},
		{peerAdmitted, plainAddr, plain, counters, "client"},
		{peerRefused, plainAddr, plain, counters, full},
		{peerRefusedHere, cachedAddr, cached, counters, full},
	} {
		one := &trial{name: t.name, server: t.server, commands: t.commands}
		if err := one.prepare(t.addr, t.key); err != nil {
			return nil, err
		}
		b.trials = append(b.trials, one)
	}
	return b, nil
}

func (b *bench) close() (err error) {
	for _, t := range b.trials {
		err = errors.Join(err, t.close())
	}
	if b.ours != nil {
		b.ours.Stop()
	}
	for _, p := range b.peers {
		p.Stop()
	}
	if b.redis != nil {
		err = errors.Join(err, b.redis.Stop())
	}
	if b.shop != nil {
		err = errors.Join(err, b.shop.Close())
	}
	return err
}

// buildPeer builds the program of envoyproxy/ratelimit, which is a tool of the laboratory's module.
func buildPeer(file string) error {
	build := exec.Command("go", "build", "-o", file, "github.com/envoyproxy/ratelimit/src/service_cmd")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build envoyproxy/ratelimit: %w", err)
	}
	return nil
}

// startPeer runs envoyproxy/ratelimit with its default settings, except for addresses, the config's folder,
// statistics, which it would send to a server that is not there, and what env sets.
func (b *bench) startPeer(program string, env ...string) (p *caddyproc.Process, addr string, err error) {
	dir := filepath.Join(b.shop.Dir, fmt.Sprintf("ratelimit-%d", len(b.peers)))
	config := filepath.Join(dir, "limits", "config")
	if err := os.MkdirAll(config, 0o700); err != nil {
		return nil, "", fmt.Errorf("make a folder for envoyproxy/ratelimit: %w", err)
	}
	if err := os.WriteFile(filepath.Join(config, "bench.yaml"), []byte(peersText), 0o600); err != nil {
		return nil, "", fmt.Errorf("write the config of envoyproxy/ratelimit: %w", err)
	}
	port, release, err := process.ReservePort()
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = release() }()
	addr = "127.0.0.1:" + strconv.Itoa(port)
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), append(env, "HOST=127.0.0.1", "PORT=0", "DEBUG_HOST=127.0.0.1", "DEBUG_PORT=0",
		"GRPC_HOST=127.0.0.1", "GRPC_PORT="+strconv.Itoa(port), "REDIS_SOCKET_TYPE=tcp", "REDIS_URL="+b.redis.Addr(),
		"RUNTIME_ROOT="+dir, "RUNTIME_SUBDIRECTORY=limits", "RUNTIME_WATCH_ROOT=false", "DISABLE_STATS=true")...)
	logs := new(caddyproc.Logs)
	if p, err = caddyproc.Run(cmd, dir, logs, addr); err != nil {
		return nil, "", fmt.Errorf("start envoyproxy/ratelimit: %w; its log:\n%s", err, logs)
	}
	b.peers = append(b.peers, p)
	return p, addr, nil
}
