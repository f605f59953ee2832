// Package faults breaks Redis in many ways while a Caddy serves requests, compares the
// outcome with the promises of docs/failure-modes.md, and writes its observations to
// faults.md. A cell is a fault under a policy, an experiment is a cell while it runs, and
// an outcome holds the observations and checks them against the promises.
package faults

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/lab/report"
	"github.com/shardlimit/caddy-shardlimit/lab/site"
	"github.com/shardlimit/caddy-shardlimit/lab/traffic"
)

var (
	flags   = flag.NewFlagSet("faults", flag.ExitOnError)
	out     = report.Out(flags)
	only    = report.Only(flags, "killed.*deny")
	binary  = flags.String("caddy", "", "the Caddy to try; without it, it is built")
	timeout = flags.Duration("check-timeout", 250*time.Millisecond, "the store's check_timeout; a busy machine exceeds the default")
	during  = flags.Duration("during", 3*time.Second, "how long faults last that do not end by themselves")
)

//go:embed faults.md
var template string

// Run tries all cells.
func Run(ctx context.Context, args []string) error {
	_ = flags.Parse(args) // it exits if a flag is invalid
	shop, err := site.Open(*binary)
	if err != nil {
		return err
	}
	defer shop.Close()
	set := settings{
		caddy: shop.Caddy, checkTimeout: *timeout,
		before: 2 * time.Second, during: *during, after: time.Second,
	}
	outcomes, err := try(ctx, set, only)
	if only.String() == "" && ctx.Err() == nil {
		err = errors.Join(err, report.Write(*out, "faults.md", template, document(set, outcomes),
			map[string]fmt.Stringer{"faults.svg": draw(allFigures(outcomes))}))
	}
	return err
}

// try runs the wanted cells one after the other. The error names the promises that were
// broken.
func try(ctx context.Context, set settings, wanted *regexp.Regexp) (outcomes []*outcome, err error) {
	for _, c := range cells() {
		if !wanted.MatchString(c.String()) {
			continue
		}
		o, failed := c.run(ctx, set)
		switch {
		case ctx.Err() != nil:
			return outcomes, ctx.Err()
		case failed != nil:
			failed = fmt.Errorf("%s: %w", c, failed)
			fmt.Println(failed)
			err = errors.Join(err, failed)
			continue
		}
		outcomes = append(outcomes, o)
		fmt.Println(o)
		for _, b := range o.unknown() {
			err = errors.Join(err, fmt.Errorf("%s: %s", c, b.text))
		}
	}
	return outcomes, err
}

// The values of the Caddyfile's options.
const (
	allow  = "allow"
	deny   = "deny"
	local  = "local"
	after  = "after"
	before = "before"
)

// called, in place of a value of charge, has clients ask by calls of rate_limit_service, which takes as before
// does.
const called = "service"

// cell is one fault under one policy.
type cell struct {
	fault           *fault
	onError, charge string
}

// takes reports whether requests take what they cost, in place of a check and a charge.
func (c cell) takes() bool { return c.charge != after }

func (c cell) String() string { return c.fault.name + ", " + c.onError + ", " + c.charge }
func faults() []*fault        { return slices.Concat(processFaults, networkFaults, stateFaults, groupFaults) }

func cells() (all []cell) {
	for _, f := range faults() {
		charges := []string{after, before}
		if f.isCalled {
			charges = append(charges, called)
		}
		for _, charge := range charges {
			for _, onError := range []string{allow, deny, local} {
				all = append(all, cell{f, onError, charge})
			}
		}
	}
	return all
}

type settings struct {
	caddy        string        // the path of the binary
	checkTimeout time.Duration // the store's
	// before, during and after are how long requests are sent before the fault, with
	// it, and at least after it.
	before, during, after time.Duration
}

// greedyEvents is a limit that clients reach during a fault, and once more if their
// counts start anew.
func (s settings) greedyEvents() int64 { return int64((s.before + s.during/4) / pace) }

// run tries a cell, and up to two times more if promises were broken while the machine
// stalled for so long that checks time out, or before the fault, which only a stall does.
func (c cell) run(ctx context.Context, set settings) (o *outcome, err error) {
	for range 3 {
		watching, stop := context.WithCancel(ctx)
		stood := watchMachine(watching)
		o, err = c.runOnce(ctx, set)
		stop()
		longest := <-stood
		if ctx.Err() != nil || err == nil && len(o.unknown()) == 0 {
			break
		}
		// A replica gets half of the timeout, and its answer needs some of that.
		if longest < set.checkTimeout/4 && (err != nil || !o.isWrongBefore()) {
			break
		}
	}
	return o, err
}

// watchMachine observes until ctx ends whether this process runs on time, and then
// returns the longest stall. During a stall, timeouts pass that no fault causes.
func watchMachine(ctx context.Context) <-chan time.Duration {
	const interval = 5 * time.Millisecond
	stood := make(chan time.Duration, 1)
	go func() {
		longest := time.Duration(0)
		for last := time.Now(); traffic.Pause(ctx, interval) == nil; last = time.Now() {
			longest = max(longest, time.Since(last)-interval)
		}
		stood <- longest
	}()
	return stood
}

func (c cell) runOnce(ctx context.Context, set settings) (_ *outcome, err error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	shop, err := site.Open(set.caddy)
	if err != nil {
		return nil, err
	}
	defer shop.Close()
	broken, err := c.fault.launch(shop.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, broken.Stop()) }()
	other, err := static(0)(shop.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, other.Stop()) }()
	e := &experiment{outcome: &outcome{cell: c}, settings: set, broken: broken, other: other}
	if e.site, err = shop.Start(c.config(set, broken, other)); err != nil {
		return nil, err
	}
	defer e.site.Stop()
	mine, others, err := e.survey(ctx)
	if err != nil {
		return nil, err
	}
	ask := request
	if c.charge == called {
		ask = call
	}
	if e.crowd, err = recruit(ask, "http://"+e.site.Addrs[0], mine, others, set.greedyEvents()); err != nil {
		return nil, err
	}
	defer e.crowd.stop()
	if err := e.run(ctx); err != nil {
		return nil, fmt.Errorf("%w; the end of Caddy's log:\n%s", err, tailOf(e.site.Logs.String()))
	}
	return e.conclude(), nil
}

func tailOf(log string) string {
	const most = 4000
	return strings.TrimSpace(log[max(len(log)-most, 0):])
}

const (
	zone          = "api"             // limits the clients
	survey        = "survey"          // a zone that shows which clients belong to a shard
	faulty, sound = "faulty", "sound" // the names of the shard with the fault and of the other one
)

func (c cell) config(set settings, broken, other *shard) site.Config {
	charge := c.charge
	if charge == called {
		charge = before
	}
	limit := fmt.Sprintf(`zone %s {
	key {header.X-Client}
	events {header.X-Events} 1000000
	window 1h
	charge %s
	on_error %s
}
`, zone, charge, c.onError)
	route := "handle /survey {\nrate_limit {header.X-Client} 1000000 1h " + survey + "\nrespond ok\n}\n"
	if c.charge == called {
		route += "rate_limit_service {\ndomain " + zone + " {\ndescriptor x-client {\ndescriptor x-events zone " + zone + "\n}\n}\n" + limit + "}\n"
	} else {
		route += "handle {\nrate_limit {\n" + limit + "}\nrespond ok\n}\n"
	}
	return site.Config{
		Log: "exclude http.log.error",
		Stores: fmt.Sprintf("store redis {\n%s%scheck_timeout %s\n}",
			broken.Text(faulty), other.Text(sound), set.checkTimeout),
		Routes: []string{route},
	}
}

// surveyed is a number of clients of which each shard certainly gets enough.
const surveyed = 24

// survey finds the clients of the shard with the fault and those of the other one.
func (e *experiment) survey(ctx context.Context) (mine, others []string, err error) {
	client := traffic.NewClient(1)
	defer client.CloseIdleConnections()
	var visited time.Time
	err = traffic.Poll(ctx, time.Minute, func() error {
		if mine, err = e.broken.clients(ctx, survey); err != nil {
			return err
		}
		if others, err = e.other.clients(ctx, survey); err != nil {
			return err
		}
		n := len(mine) + len(others)
		if n == surveyed {
			return nil
		}
		// A busy machine may not serve a request in time.
		if time.Since(visited) > time.Second {
			for i := range surveyed {
				name := fmt.Sprintf("client-%d", i)
				if slices.Contains(mine, name) || slices.Contains(others, name) {
					continue
				}
				if x := traffic.Ask(client, "http://"+e.site.Addrs[0]+"/survey", map[string]string{"X-Client": name}); x.Status == 0 {
					return fmt.Errorf("find the shard of %s: no response", name)
				}
			}
			visited = time.Now()
		}
		return fmt.Errorf("%d of %d clients are charged", n, surveyed)
	})
	return mine, others, err
}

// metrics are Caddy's counters.
type metrics struct {
	storeErrors int64                       // checks and takes without an answer
	undelivered map[string]map[string]int64 // operations, by shard and outcome
	// lostRefunds are those of the outcome "lost" that are refunds. Refunds are not tried again.
	lostRefunds int64
}

func metricsIn(all caddyproc.Metrics) metrics {
	m := metrics{
		storeErrors: int64(all.Sum("caddy_rate_limit_store_errors_total")),
		undelivered: map[string]map[string]int64{faulty: {}, sound: {}},
	}
	for key, n := range all {
		if caddyproc.Has(key, "caddy_rate_limit_undelivered_total") {
			shard, outcome := caddyproc.Label(key, "shard"), caddyproc.Label(key, "outcome")
			m.undelivered[shard][outcome] += int64(n)
			if shard == faulty && outcome == "lost" && caddyproc.Label(key, "operation") == "refund" {
				m.lostRefunds += int64(n)
			}
		}
	}
	return m
}

func (m *metrics) failed(shard string) (n int64) {
	for _, of := range m.undelivered[shard] {
		n += of
	}
	return n
}
