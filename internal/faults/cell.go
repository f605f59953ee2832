package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// The values of the Caddyfile's options.
const (
	allow  = "allow"
	deny   = "deny"
	local  = "local"
	after  = "after"
	before = "before"
)

// cell is one fault under one policy.
type cell struct {
	fault   *fault
	onError string
	charge  string
}

func (c cell) String() string { return c.fault.name + ", " + c.policy() }

// policy is what the zone says.
func (c cell) policy() string { return c.onError + ", " + c.charge }

// faults are all that are tried.
func faults() (all []*fault) {
	for _, some := range [][]*fault{processFaults, networkFaults, stateFaults, groupFaults} {
		all = append(all, some...)
	}
	return all
}

// cells are all faults under all policies.
func cells() (all []cell) {
	for _, f := range faults() {
		for _, charge := range []string{after, before} {
			for _, onError := range []string{allow, deny, local} {
				all = append(all, cell{f, onError, charge})
			}
		}
	}
	return all
}

// settings are how cells are run.
type settings struct {
	// caddy is the path of the binary.
	caddy string
	// checkTimeout and dialTimeout are the store's.
	checkTimeout, dialTimeout time.Duration
	// before, during and after are how long requests come without the fault, with
	// it, and at least after it.
	before, during, after time.Duration
}

// greedyEvents is a limit that is reached while a fault lasts, and is reached
// there again by who is counted anew.
func (s settings) greedyEvents() int64 { return int64((s.before + s.during/4) / pace) }

// cellPatience bounds a cell.
const cellPatience = 3 * time.Minute

// attempts is how often a cell is tried while the machine stands still.
const attempts = 3

// run tries a cell, and again where promises were not kept while the machine stood
// still for as long as makes checks time out.
func (c cell) run(ctx context.Context, set settings) (o *outcome, err error) {
	for range attempts {
		watching, stop := context.WithCancel(ctx)
		heart := feel(watching)
		o, err = c.runOnce(ctx, set)
		stop()
		// A replica is given half of the time, and its answer needs some as well.
		if stood := heart.stood(); ctx.Err() != nil || stood < set.checkTimeout/4 || err == nil && len(o.unknown()) == 0 {
			break
		}
	}
	return o, err
}

func (c cell) runOnce(ctx context.Context, set settings) (_ *outcome, err error) {
	ctx, cancel := context.WithTimeout(ctx, cellPatience)
	defer cancel()
	dir, err := os.MkdirTemp("", "faults-")
	if err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	defer os.RemoveAll(dir)
	broken, err := c.fault.launch(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, broken.stop()) }()
	other, err := static(0)(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, other.stop()) }()
	site, err := startSite(c, set, filepath.Join(dir, "caddy"), broken, other)
	if err != nil {
		return nil, err
	}
	defer site.Stop()
	mine, others, err := site.clients(ctx, broken, other)
	if err != nil {
		return nil, err
	}
	t, err := recruit("http://"+site.Addr, mine, others, set.greedyEvents())
	if err != nil {
		return nil, err
	}
	defer t.stop()
	e := &experiment{cell: c, settings: set, broken: broken, other: other, site: site, traffic: t}
	if err := e.run(ctx); err != nil {
		return nil, fmt.Errorf("%w; the end of Caddy's log:\n%s", err, tailOf(site.Logs.String()))
	}
	return e.outcome(), nil
}

// tailOf is the end of a log.
func tailOf(log string) string {
	const most = 4000
	if len(log) > most {
		log = log[len(log)-most:]
	}
	return strings.TrimSpace(log)
}
